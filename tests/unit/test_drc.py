"""The decode-side cache's core against a simple model: a tree of single pages, a pool that knows what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sglang_pdd.drc import BINS, Pending, Refetch, hit_bin

POOL = 24
Text = tuple[int, ...]  # a page holds one token here
STEPS, RUNS = 60, 400


@dataclass(eq=False)
class _Node:
    page: int
    parent: _Node | None = None
    token: int = 0
    children: dict[int, _Node] = field(default_factory=dict)
    locks: int = 0


class _Tree:
    """A radix tree of single pages."""

    def __init__(self) -> None:
        self.root = _Node(-1)

    def match(self, text: Text) -> list[_Node]:
        path, node = [], self.root
        for token in text:
            if (child := node.children.get(token)) is None:
                break
            path.append(node := child)
        return path

    def grow(self, path: list[_Node], text: Text, pages: list[int]) -> list[_Node]:
        node = path[-1] if path else self.root
        for token, page in zip(text, pages, strict=True):
            child = node.children[token] = _Node(page, node, token)
            path.append(node := child)
        return path

    def nodes(self) -> list[tuple[Text, _Node]]:
        found: list[tuple[Text, _Node]] = []
        stack: list[tuple[Text, _Node]] = [((), self.root)]
        while stack:
            text, node = stack.pop()
            for token, child in node.children.items():
                found.append(((*text, token), child))
                stack.append(((*text, token), child))
        return found


@dataclass(eq=False)
class _Request:
    room: int
    text: Text
    path: list[_Node]
    unsent: list[tuple[int, Text]]  # pages that its writer has yet to write, with what belongs there
    landed: int = 0
    follower: int | None = None  # whose refetch this is
    failed: bool = False
    running: bool = False


class Machine(RuleBasedStateMachine):
    """Everything that SGLang's queues and the network may do, in any order."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.pending = Pending(POOL)
        self.tree = _Tree()
        self.free = list(range(POOL))
        self.holds: dict[int, Text | None] = dict.fromkeys(range(POOL))
        self.requests: dict[int, _Request] = {}
        self.rooms = 0
        self.outputs = 100

    # --- helpers

    def lock(self, path: list[_Node], by: int) -> None:
        for node in path:
            node.locks += by
            assert node.locks >= 0

    def pick(self, data: st.DataObject, kind: str) -> _Request:
        found = [r for r in self.requests.values() if getattr(self, kind)(r)]
        return data.draw(st.sampled_from(found)) if found else None  # type: ignore[return-value]

    def flies(self, r: _Request) -> bool:
        return not r.failed and not r.running and r.landed < self.own(r)

    def fails(self, r: _Request) -> bool:
        return not r.failed and not r.running

    def writes(self, r: _Request) -> bool:  # also after its failure, until it is released
        return bool(r.unsent)

    def drains(self, r: _Request) -> bool:
        return r.failed

    def runs(self, r: _Request) -> bool:
        return r.running

    @staticmethod
    def own(r: _Request) -> int:
        return r.own  # type: ignore[attr-defined,no-any-return]

    def begin(self, room: int, text: Text, path: list[_Node], start: int, follower: int | None) -> None:
        unsent = [(path[i].page, text[: i + 1]) for i in range(start, len(text))]
        request = self.requests[room] = _Request(room, text, path, unsent, follower=follower)
        request.own = len(text) - start  # type: ignore[attr-defined]
        for page, _ in unsent:
            self.holds[page] = None

    def refetch(self, refetches: tuple[Refetch, ...]) -> None:
        for r in refetches:
            text = self.requests[r.follower].text[: r.end]
            path = self.tree.match(text)
            assert len(path) == r.end
            self.lock(path, 1)
            self.begin(r.room, text, path, r.start, r.follower)

    def cut(self, request: _Request) -> None:
        row = np.array([node.page for node in request.path], dtype=np.int64)
        if (keep := self.pending.readable(row)) == len(row):
            return
        path = list(request.path)
        while len(path) > keep and not path[-1].children and not path[-1].locks:
            self.drop(path.pop())
        self.pending.cut(row, len(path))

    def drop(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.token]
        self.free.append(node.page)

    # --- rules

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple))
    def admit(self, text: Text) -> None:
        path = self.tree.match(text)
        start = len(path)
        if len(text) - start > len(self.free):
            return
        fresh = [self.free.pop() for _ in range(len(text) - start)]
        path = self.tree.grow(path, text[start:], fresh)
        self.lock(path, 1)
        self.rooms += 1
        room = self.rooms
        self.begin(room, text, path, start, None)
        row = np.array([node.page for node in path], dtype=np.int64)
        bad = sum(self.pending.readable(row[i : i + 1]) == 0 for i in range(start))
        shared, refetches = self.pending.begin(room, row, start)
        assert shared == bad
        self.refetch(refetches)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """A page arrives; the transfer may not know yet."""
        if request := self.pick(data, "writes"):
            page, text = request.unsent.pop(0)
            assert page not in self.free, "written after it was given away"
            others = [p for r in self.requests.values() if r is not request for p, _ in r.unsent]
            assert page not in others, "two writers"
            self.holds[page] = text

    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        if request := self.pick(data, "flies"):
            request.landed = self.own(request) - len(request.unsent)
            if request.landed:
                self.pending.progress(request.room, request.landed)

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        if request := self.pick(data, "flies"):
            for page, text in request.unsent:
                self.holds[page] = text
            request.unsent.clear()
            request.landed = self.own(request)
            self.pending.progress(request.room)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The transfer fails, or the client disconnects; its writer may write on."""
        if request := self.pick(data, "fails"):
            request.failed = True
            self.pending.failed(request.room)
            follower = self.requests.get(request.follower) if request.follower is not None else None
            if follower is not None and self.fails(follower):
                follower.failed = True
                self.pending.failed(follower.room)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if request := self.pick(data, "drains"):
            self.release_now(request)

    @rule()
    def run(self) -> None:
        """Whoever may run does so, and reads everything."""
        for request in list(self.requests.values()):
            refetch = request.follower is not None and not self.flies(request)
            if request.running or request.failed or not (refetch or self.pending.ready(request.room)):
                continue
            self.pending.end(request.room)
            for i, node in enumerate(request.path):
                good = self.holds[node.page] == request.text[: i + 1]
                assert good or (refetch and i < len(request.path) - self.own(request)), "read before it was written"
            if request.follower is not None:
                del self.requests[request.room]
                self.lock(request.path, -1)
                self.cut(request)
            else:
                request.running = True

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=3).map(tuple))
    def finish(self, data: st.DataObject, tokens: Text) -> None:
        """Its output joins the tree, but for what somebody else is bringing there."""
        request = self.pick(data, "runs")
        if request is None or len(tokens) > len(self.free):
            return
        text = request.text + tokens
        pages = [self.free.pop() for _ in tokens]
        for page, end in zip(pages, range(len(request.text) + 1, len(text) + 1), strict=True):
            self.holds[page] = text[:end]
        there = self.tree.match(text)
        known = self.pending.readable(np.array([n.page for n in there], dtype=np.int64))
        if known == len(there):
            self.free += pages[: len(there) - len(request.text)]  # the tree's own copies stay
            self.tree.grow(there, text[len(there) :], pages[len(there) - len(request.text) :])
        else:
            self.free += pages
        del self.requests[request.room]
        self.lock(request.path, -1)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        leaves = [n for _, n in self.tree.nodes() if not n.children and not n.locks]
        if leaves:
            self.drop(data.draw(st.sampled_from(leaves)))

    # --- what must hold

    @invariant()
    def every_page_has_one_owner(self) -> None:
        Machine.steps += 1
        owned = sorted(self.free + [n.page for _, n in self.tree.nodes()])
        assert owned == list(range(POOL))

    @invariant()
    def what_can_be_matched_is_there_or_comes(self) -> None:
        for text, node in self.tree.nodes():
            if self.pending.readable(np.array([node.page])):
                assert self.holds[node.page] == text
            else:
                assert node.locks, "a page that holds nothing can be evicted, and its mark stays"

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        for request in self.requests.values():
            if not request.running and not request.failed and request.landed == self.own(request):
                missing = [n.page for n in request.path if not self.pending.readable(np.array([n.page]))]
                assert bool(missing) == (not self.pending.ready(request.room)) or request.follower is not None

    @precondition(lambda self: not self.requests)
    @invariant()
    def at_rest_everything_is_evictable(self) -> None:
        assert not len(self.pending)
        assert self.pending.readable(np.arange(POOL)) == POOL
        assert all(not node.locks for _, node in self.tree.nodes())

    def teardown(self) -> None:
        """However it went: all can end, and nothing is left over."""
        for _ in range(20):
            for request in list(self.requests.values()):
                if request.failed:
                    self.release_now(request)
            for request in self.requests.values():
                if self.flies(request):
                    for page, text in request.unsent:
                        self.holds[page] = text
                    request.unsent.clear()
                    request.landed = self.own(request)
                    self.pending.progress(request.room)
            self.run()
            for request in [r for r in self.requests.values() if r.running]:
                del self.requests[request.room]
                self.lock(request.path, -1)
            if not self.requests:
                break
        assert not self.requests, "somebody waits for ever"
        self.at_rest_everything_is_evictable()

    def release_now(self, request: _Request) -> None:
        del self.requests[request.room]
        self.lock(request.path, -1)
        self.refetch(self.pending.released(request.room))
        self.cut(request)


def test_anything_in_any_order() -> None:
    """At least 10,000 steps."""
    Machine.steps = 0
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Machine.steps >= 10_000


def _row(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


def test_a_follower_waits_for_what_it_shares() -> None:
    pending = Pending(16)
    assert pending.begin(1, _row(0, 1, 2, 3), 0) == (0, ())
    assert pending.begin(2, _row(0, 1, 8), 2) == (2, ())
    pending.progress(2)
    assert not pending.ready(2) and pending.followed(1)
    pending.progress(1, 1)
    assert not pending.ready(2)
    pending.progress(1, 2)
    assert pending.ready(2) and not pending.ready(1) and not pending.followed(1)


def test_followers_of_followers() -> None:
    pending = Pending(16)
    pending.begin(1, _row(0, 1), 0)
    pending.begin(2, _row(0, 1, 2), 2)
    assert pending.begin(3, _row(0, 1, 2, 3), 3) == (3, ())
    pending.progress(3)
    pending.progress(1)
    assert not pending.ready(3)
    pending.progress(2)
    assert pending.ready(3)


def test_of_a_failed_leader_followers_fetch_what_they_share_once() -> None:
    pending = Pending(16)
    pending.begin(1, _row(0, 1, 2, 3), 0)
    pending.begin(2, _row(0, 1, 8), 2)
    pending.begin(3, _row(0, 1, 2, 9), 3)
    pending.progress(1, 1)
    pending.failed(1)
    (refetch,) = pending.released(1)
    assert (refetch.follower, refetch.start, refetch.end) == (3, 1, 3)
    pending.cut(_row(0, 1, 2, 3), 3)  # its last page holds nothing, and nobody wants it
    assert pending.readable(_row(0, 3)) == 2
    for room in (2, 3, refetch.room):
        pending.progress(room)
    assert pending.ready(2) and pending.ready(3)


def test_a_refetch_that_fails_is_another_followers_turn() -> None:
    pending = Pending(16)
    pending.begin(1, _row(0, 1), 0)
    pending.begin(2, _row(0, 1, 2), 2)
    pending.begin(3, _row(0, 1, 3), 2)
    pending.failed(1)
    (first,) = pending.released(1)
    pending.failed(first.room)
    pending.failed(first.follower)
    (second,) = pending.released(first.room)
    assert second.follower != first.follower and second.room != first.room


def test_nobody_writes_what_another_writes() -> None:
    pending = Pending(4)
    pending.begin(1, _row(0, 1), 0)
    with pytest.raises(ValueError, match="others write"):
        pending.begin(2, _row(1, 2), 0)
    with pytest.raises(ValueError, match="taken"):
        pending.begin(1, _row(3), 0)


def test_bins_of_hit_rates() -> None:
    hits = (0, 899, 900, 949, 950, 969, 970, 980, 990, 998, 999)
    expected = ("0-90", "0-90", "90-95", "90-95", "95-97", "95-97", "97-98", "98-99", "99-100", "99-100", "full")
    assert tuple(hit_bin(hit * 10, 9990) for hit in hits) == expected
    assert hit_bin(0, 0) == "full" and set(expected) == set(BINS)
