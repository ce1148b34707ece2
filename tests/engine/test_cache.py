"""MD's cache on SGLang's own tree and allocator: who owns which page, and that nobody reads what is not there yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cache_pool import World, publish_arguments
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_pdd.drc import Refetch

STEPS, RUNS = 60, 40


@pytest.fixture(scope="module", autouse=True)
def arguments() -> Iterator[None]:
    publish_arguments()
    yield


@dataclass(eq=False)
class _Transfer:
    """A transfer of MD's; ``follower`` is set for one that fetches again."""

    room: int
    req: Any
    row: np.ndarray
    start: int
    landed: bool = False
    failed: bool = False
    follower: int | None = None
    lock: Any = None


class Transfers:
    """What `Prefixes` does with the cache, without a network."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cache = world.cache
        self.pending = world.cache.pending
        self.live: dict[int, _Transfer] = {}
        self.holds: dict[int, tuple[int, ...]] = {}  # slot -> the text up to its token
        self.rooms = 0

    def begin(self, ids: tuple[int, ...], **fields: Any) -> _Transfer | None:
        req = self.world.request(ids, **fields)
        hit = self.world.admit(req)
        if hit is None:
            return None
        self.rooms += 1
        row = self.cache.row(req, len(ids))
        transfer = self.live[self.rooms] = _Transfer(self.rooms, req, row, hit // self.world.page)
        for slot in self.world.slots(req, len(ids))[hit:].tolist():
            self.holds.pop(slot, None)
        _, refetches = self.pending.begin(transfer.room, row, transfer.start)
        self.cache.publish(req)
        self.fetch(refetches)
        return transfer

    def fetch(self, refetches: tuple[Refetch, ...]) -> None:
        for r in refetches:
            req = self.live[r.follower].req
            lock = self.cache.hold(req, r.end)
            row = self.pending.row(r.room)
            self.live[r.room] = _Transfer(r.room, req, row, r.start, follower=r.follower, lock=lock)

    def land_some(self, transfer: _Transfer, pages: int) -> None:
        self._write(transfer, transfer.start + pages)
        self.pending.progress(transfer.room, pages)

    def _write(self, transfer: _Transfer, pages: int) -> None:
        ids, page = tuple(transfer.req.origin_input_ids), self.world.page
        for position in range(transfer.start * page, min(len(transfer.row), pages) * page):
            if position < len(ids):
                slot = int(transfer.row[position // page]) * page + position % page
                self.holds[slot] = ids[: position + 1]

    def land(self, transfer: _Transfer) -> None:
        self._write(transfer, len(transfer.row))
        self.pending.progress(transfer.room)
        transfer.landed = True
        if transfer.follower is not None:
            self.pending.end(transfer.room)
            self.let_go(transfer)

    def let_go(self, transfer: _Transfer) -> None:
        del self.live[transfer.room]
        if transfer.follower is None:
            self.world.release(transfer.req)
        else:
            self.cache.unlock(transfer.lock)
        if transfer.failed:
            self.fetch(self.pending.released(transfer.room))
        self.cache.cut(transfer.req, transfer.row)

    def fail(self, transfer: _Transfer) -> None:
        transfer.failed = True
        self.pending.failed(transfer.room)
        follower = self.live.get(transfer.follower) if transfer.follower is not None else None
        if follower is not None and not follower.failed:
            self.fail(follower)

    def run(self, transfer: _Transfer) -> bool:
        """It runs, if it may, and reads its whole prompt."""
        if transfer.failed or transfer.follower is not None or not self.pending.ready(transfer.room):
            return False
        self.pending.end(transfer.room)
        del self.live[transfer.room]
        self.check(transfer.req)
        return True

    def check(self, req: Any) -> None:
        ids = tuple(req.origin_input_ids) + tuple(req.output_ids)
        for position, slot in enumerate(self.world.slots(req, req.kv.kv_committed_len).tolist()):
            assert self.holds.get(slot) == ids[: position + 1], "read before it was written"

    def decode(self, req: Any, output: tuple[int, ...]) -> None:
        start, ids = len(req.origin_input_ids), tuple(req.origin_input_ids) + output
        if self.world.decode(req, output):
            for position in range(start, len(ids) - 1):
                slot = int(self.world.slots(req, len(ids))[position])
                self.holds[slot] = ids[: position + 1]
            # As after an extend pass: what has been computed joins the tree while the request runs on.
            req.refresh_fill_ids()
            self.cache.checkpoint(req, up_to=req.kv.kv_committed_len)
            self.check(req)


class Machine(RuleBasedStateMachine):
    """Everything that may happen to MD's cache, in any order."""

    page = 4

    def __init__(self) -> None:
        super().__init__()
        self.world = World(24 * self.page, self.page, rows=256)
        self.transfers = Transfers(self.world)
        self.running: list[Any] = []
        self.texts: set[tuple[int, ...]] = set()

    def pick(self, data: st.DataObject, wanted: Any) -> Any:
        found = [t for t in self.transfers.live.values() if wanted(t)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(pages=st.lists(st.integers(0, 1), min_size=1, max_size=6), tail=st.integers(0, 3), salt=st.booleans())
    def admit(self, pages: list[int], tail: int, salt: bool) -> None:
        text = tuple(token for token in pages for _ in range(self.page)) + (7,) * min(tail, self.page - 1)
        if self.transfers.begin(text, extra_key="salt" if salt else None):
            self.texts.add(text)

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        if transfer := self.pick(data, lambda t: not t.failed and not t.landed):
            self.transfers.land(transfer)

    @rule(data=st.data(), pages=st.integers(0, 4))
    def fail(self, data: st.DataObject, pages: int) -> None:
        """Some of it has landed by then."""
        if transfer := self.pick(data, lambda t: not t.failed):
            if not transfer.landed:
                self.transfers.land_some(transfer, pages)
            self.transfers.fail(transfer)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if transfer := self.pick(data, lambda t: t.failed):
            self.transfers.let_go(transfer)

    @rule(output=st.lists(st.integers(0, 1), max_size=9))
    def run(self, output: list[int]) -> None:
        for transfer in list(self.transfers.live.values()):
            if self.transfers.run(transfer):
                self.running.append(transfer.req)
                self.transfers.decode(transfer.req, (*output, 9))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.running:
            req = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.transfers.check(req)
            self.world.finish(req)

    @invariant()
    def every_token_of_the_pool_has_one_owner(self) -> None:
        mine = [t.req for t in self.transfers.live.values() if t.follower is None] + self.running
        assert self.world.accounted() + sum(map(self.world.private, mine)) == self.world.size
        slots = self.world.tree_slots()
        assert len(slots) == len(set(slots.tolist()))

    def teardown(self) -> None:
        """However it went: all can end, and everything is evictable."""
        for _ in range(50):
            for transfer in list(self.transfers.live.values()):
                if transfer.failed:
                    self.transfers.let_go(transfer)
                elif not transfer.landed:
                    self.transfers.land(transfer)
            self.run([])
            while self.running:
                self.world.finish(self.running.pop())
            if not self.transfers.live:
                break
        assert not self.transfers.live, "somebody waits for ever"
        assert self.world.cache.protected_size() == 0
        assert self.world.accounted() == self.world.size
        slots = self.world.tree_slots()
        assert self.transfers.pending.readable(slots // self.page) == len(slots)
        assert all(int(slot) in self.transfers.holds for slot in slots)


class OneTokenPages(Machine):
    page = 1


@pytest.mark.parametrize("machine", [Machine, OneTokenPages])
def test_anything_in_any_order(machine: type[Machine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=RUNS, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def text(*pages: int, page: int = 4) -> tuple[int, ...]:
    return tuple(token for token in pages for _ in range(page))


def test_a_prompt_on_its_way_is_shared_to_the_page() -> None:
    transfers = Transfers(World(256, 4))
    leader = transfers.begin((*text(1, 2, 3), 4, 4))
    follower = transfers.begin(text(1, 2, 5))
    assert leader and follower and follower.start == 2
    transfers.land(follower)
    assert not transfers.run(follower)
    transfers.land(leader)
    assert transfers.run(follower) and transfers.run(leader)


def test_another_namespace_shares_nothing() -> None:
    transfers = Transfers(World(256, 4))
    transfers.begin(text(1, 2, 3))
    other = transfers.begin(text(1, 2, 3), extra_key="other")
    assert other and other.start == 0


def test_a_failed_leader_that_nobody_follows_leaves_nothing() -> None:
    world = World(256, 4)
    transfers = Transfers(world)
    transfers.fail(leader := transfers.begin((*text(1, 2, 3), 4)))
    transfers.let_go(leader)
    assert world.allocator.available_size() == 256


def test_what_had_landed_of_a_failed_transfer_stays() -> None:
    world = World(256, 4)
    transfers = Transfers(world)
    transfers.land_some(leader := transfers.begin((*text(1, 2, 3), 4)), 2)
    transfers.fail(leader)
    transfers.let_go(leader)
    assert world.cache.evictable_size() == 8 and world.allocator.available_size() == 248
    again = transfers.begin(text(1, 2, 3))
    assert again and again.start == 2
    transfers.land(again)
    assert transfers.run(again)


def test_of_a_failed_leader_only_what_is_shared_is_fetched_again() -> None:
    world = World(256, 4)
    transfers = Transfers(world)
    leader = transfers.begin(text(1, 2, 3, 4))
    follower = transfers.begin(text(1, 2, 9))
    transfers.land(follower)
    transfers.fail(leader)
    transfers.let_go(leader)
    (again,) = [t for t in transfers.live.values() if t.follower is not None]
    assert (again.start, len(again.row)) == (0, 2)
    assert not transfers.run(follower)
    transfers.land(again)
    assert transfers.run(follower)
    world.finish(follower.req)
    assert world.cache.evictable_size() == 12 and world.cache.protected_size() == 0


def test_output_never_joins_the_tree_where_somebody_else_brings_it() -> None:
    """A running request would be moved onto pages that hold nothing yet."""
    transfers = Transfers(World(256, 4))
    running = transfers.begin(text(1, 2))
    transfers.land(running)
    assert transfers.run(running)
    other = transfers.begin(text(1, 2, 3))
    transfers.decode(running.req, text(3, 3))
    transfers.check(running.req)
    assert other.start == 2 and running.req.kv.cache_protected_len == 8


def test_nothing_on_its_way_is_evicted() -> None:
    world = World(64, 4)
    transfers = Transfers(world)
    transfers.begin(text(*range(8)))
    assert transfers.begin(text(*range(20, 30))) is None
    assert transfers.begin(text(*range(20, 28))) is not None
    assert world.cache.evictable_size() == 0


@pytest.mark.parametrize("page", [1, 4])
def test_stock_and_ours_hit_alike(page: int) -> None:
    """One at a time, there is nothing on its way, and the trees are the same."""
    ours, stock = World(512, page), World(512, page, UnifiedRadixCache)
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = tuple(np.repeat(rng.integers(0, 3, rng.integers(1, 6)), 5).tolist())
        hits = []
        for world in (ours, stock):
            req = world.request(ids)
            hits.append(world.admit(req))
            if world is ours:
                row = world.cache.row(req, len(ids))
                world.cache.pending.begin(1, row, hits[-1] // page)
                world.cache.publish(req)
                world.cache.pending.progress(1)
                world.cache.pending.end(1)
            world.cache.checkpoint(req, up_to=len(ids))
            assert world.decode(req, (1, 2, 1, 2, 3))
            world.finish(req)
        assert hits[0] == hits[1]
        assert ours.cache.evictable_size() == stock.cache.evictable_size()
