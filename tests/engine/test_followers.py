"""`Prefixes` between SGLang's queues and its tree, with receivers of our own: who runs when, what is fetched again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_pool import World, publish_arguments
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_pdd.drc import waiting_tokens
from sglang_pdd.metrics import Counters
from sglang_pdd.patches import refetch
from sglang_pdd.patches.prefixes import Prefixes
from sglang_pdd.protocol import Follows

PAGE, SIZE, SLOTS = 4, 256, 2


@pytest.fixture(scope="module", autouse=True)
def arguments() -> Iterator[None]:
    publish_arguments()
    yield


class Manager:
    """Of SGLang's KV manager, what is asked for."""

    def __init__(self) -> None:
        self.failure_records: dict[int, str] = {}
        self.asked: list[dict[str, Any]] = []
        self.acknowledged = True
        self.waiting_timeout = 300.0
        self.armed: set[int] = set()  # rooms whose acknowledgement is waited for

    def submit_prefill_recompute(self, receiver: Any, payload: dict[str, Any]) -> None:
        self.asked.append(payload)

    def is_abort_release_safe(self, room: int, acks: int) -> bool:
        return self.acknowledged or acks == 0

    def clear_deferred_abort_state(self, room: int) -> None:
        self.armed.discard(room)


class Receiver:
    """Of SGLang's receiver, what is asked for; its state is the test's."""

    reachable = True

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.state = KVPoll.WaitingForInput
        self.conclude_state: KVPoll | None = None
        self.abort_notified = False
        self.bootstrap_infos = [{"is_dummy": False}]
        self.prefill_dp_rank = 0
        self.sent: tuple[Any, ...] | None = None
        self.cleared = False

    def init(self, rank: int) -> None:
        if not self.reachable:
            del self.bootstrap_infos  # as SGLang's, which knows P's ranks only then
            self.abort()

    def send_metadata(self, pages: Any, slot: int, state: Any, decode_prefix_len: int) -> None:
        self.sent = (pages.tolist(), slot, decode_prefix_len)

    def abort(self) -> None:
        if self.conclude_state != KVPoll.Failed:
            self.kv_mgr.failure_records[self.bootstrap_room] = "aborted"
        self.state = self.conclude_state = KVPoll.Failed
        self.ensure_abort_notified()

    def ensure_abort_notified(self, force_arm: bool = False) -> None:
        if not self.abort_notified and self.sent is not None:
            self.kv_mgr.armed.add(self.bootstrap_room)
            self.abort_notified = True

    def clear(self) -> None:
        self.cleared = True
        self.conclude_state = self.conclude_state or self.state


class Main:
    """MD without a network: its cache, its queues, and `Prefixes`."""

    def __init__(self) -> None:
        self.world = World(SIZE, PAGE)
        self.manager = Manager()
        self.queue: Any = SimpleNamespace(
            queue=[],
            gloo_group=None,
            metadata_buffers=SimpleNamespace(clear_slot=lambda slot: None),
            req_to_metadata_buffer_idx_allocator=ReqToMetadataIdxAllocator(SLOTS),
            deferred_kv_release_timeout=30.0,
        )
        scheduler = SimpleNamespace(
            tree_cache=self.world.cache,
            disagg_decode_transfer_queue=self.queue,
            disagg_decode_prealloc_queue=SimpleNamespace(transfer_backend="mooncake", kv_manager=self.manager),
        )
        self.ignored: deque[int] = deque()
        self.over: list[int] = []
        self.landed: dict[int, int] = {}  # pages, by room
        self.counters = Counters()
        timeline: Any = SimpleNamespace(event=lambda *args, **fields: None)
        landings: Any = SimpleNamespace(
            end=self.over.append,
            pages=lambda room, senders: self.landed.get(room, 0),
            so_far=lambda room: self.landed.get(room, 0),
        )
        self.said: list[tuple[str, Follows]] = []  # to which prefill
        self.prefixes = Prefixes(
            scheduler,
            self.counters,
            timeline,
            landings,
            self.ignored.append,
            lambda req, message: self.said.append((req.bootstrap_host, message)),
        )
        self.rooms = 0

    def admit(self, ids: tuple[int, ...], room: int | None = None, prefill: str = "p") -> Any:
        self.rooms += 1
        req = self.world.request(
            ids, bootstrap_host=prefill, bootstrap_port=1, bootstrap_room=self.rooms if room is None else room
        )
        hit = self.world.admit(req)
        receiver = Receiver(self.manager, f"{prefill}:1", req.bootstrap_room)
        transfer = SimpleNamespace(req=req, kv_receiver=receiver, is_rebootstrap=False, host_staged=False)
        self.prefixes.admitted(transfer, hit)
        self.queue.queue.append(transfer)
        return transfer

    def step(self) -> list[Any]:
        """SGLang looks at its transfers; returns those that have landed."""
        polls = self.prefixes.polled([t.kv_receiver.state for t in self.queue.queue])
        seen = list(zip(self.queue.queue, polls, strict=True))
        self.queue.queue = [t for t, poll in seen if poll not in (KVPoll.Success, KVPoll.Failed)]
        for transfer in [t for t, poll in seen if poll == KVPoll.Failed]:
            self.world.release(transfer.req)
            self.prefixes.released(transfer)
            self.manager.failure_records.pop(transfer.req.bootstrap_room, None)
        self.prefixes.refetches.pump()
        return [t for t, poll in seen if poll == KVPoll.Success]

    def cut_off(self, transfer: Any, pages: int) -> None:
        """It fails when so many of its pages have landed."""
        self.landed[transfer.req.bootstrap_room] = pages
        transfer.kv_receiver.abort()

    def finish(self, *transfers: Any) -> None:
        for transfer in transfers:
            self.world.finish(transfer.req)

    def copies(self) -> list[Receiver]:
        return [copy.receiver for copy in self.prefixes.refetches._copies]

    def at_rest(self) -> bool:
        slots = self.queue.req_to_metadata_buffer_idx_allocator.available_size()
        return bool(
            not len(self.prefixes.refetches)
            and not len(self.world.cache.pending)
            and slots == SLOTS
            and self.world.cache.protected_size() == 0
            and self.world.accounted() == SIZE
            and not self.manager.failure_records
            and not self.manager.armed
        )


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    return alone(monkeypatch)


def alone(monkeypatch: pytest.MonkeyPatch) -> Main:
    def poll(receivers: list[Receiver], group: Any, copies: Any, buffers: Any) -> list[KVPoll]:
        return [receiver.state for receiver in receivers]

    monkeypatch.setattr(refetch, "get_kv_class", lambda backend, kind: Receiver)
    monkeypatch.setattr(refetch, "poll_and_all_reduce", poll)
    monkeypatch.setattr(refetch, "all_reduce_flags", lambda flags, group, op: flags)
    monkeypatch.setattr(Receiver, "reachable", True)
    return Main()


def text(*pages: int) -> tuple[int, ...]:
    return tuple(token for token in pages for _ in range(PAGE))


def done(*transfers: Any) -> None:
    for transfer in transfers:
        transfer.kv_receiver.state = KVPoll.Success


def test_a_follower_lands_with_its_leader(main: Main) -> None:
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    assert main.prefixes.followed(leader) and not main.prefixes.followed(follower)
    done(follower)
    assert main.step() == []
    done(leader)
    assert main.step() == [leader, follower]
    main.finish(leader, follower)
    assert main.at_rest() and main.counters.get("drc.shared") == 2 * PAGE


def test_prefills_hear_who_follows_whom_if_they_are_several(main: Main) -> None:
    first = main.admit(text(1, 2, 3, 4))
    main.admit(text(1, 2, 5))
    assert main.said == [], "P sees by itself what its own requests have in common"
    main.landed[first.req.bootstrap_room] = 1
    far = main.admit(text(1, 2, 3, 6, 7), prefill="q")
    said = Follows(far.req.bootstrap_room, 2 * PAGE, ((first.req.bootstrap_room, 2 * PAGE),))
    assert main.said == [("q", said), ("p", said)]
    main.said.clear()
    back = main.admit(text(1, 2, 3, 6, 7, 8))
    leaders = ((first.req.bootstrap_room, 2 * PAGE), (far.req.bootstrap_room, 2 * PAGE))
    said = Follows(back.req.bootstrap_room, PAGE, leaders)
    assert sorted(main.said) == [("p", said), ("q", said)]


def test_prefills_hear_that_something_is_fetched_again(main: Main) -> None:
    leader, first, second = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4, 5)), main.admit(text(1, 6), prefill="q")
    done(first, second)
    main.said.clear()
    leader.kv_receiver.abort()
    main.step()
    (copy,) = main.copies()
    room = copy.bootstrap_room
    mine = Follows(first.req.bootstrap_room, 2 * PAGE, ((room, 2 * PAGE),))
    theirs = Follows(second.req.bootstrap_room, PAGE, ((room, PAGE),))
    assert main.said == [("p", mine), ("q", theirs), ("p", theirs)]


def test_what_a_failed_leader_owes_is_fetched_again_once(main: Main) -> None:
    leader, *others = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4)), main.admit(text(1, 5))
    done(*others)
    leader.kv_receiver.abort()
    assert main.step() == []
    (copy,) = main.copies()
    pages = main.world.cache.row(others[0].req, 2 * PAGE)
    assert copy.sent == (pages.tolist(), 0, 0)
    (payload,) = main.manager.asked
    assert payload["input_ids"] == list(text(1, 2)) and payload["bootstrap_room"] == copy.bootstrap_room
    assert main.ignored == deque([copy.bootstrap_room]) and main.over == []
    copy.state = KVPoll.Success
    assert main.step() == []
    assert main.over == [copy.bootstrap_room], "streams may not write into it any more"
    assert main.step() == others
    main.finish(*others)
    assert main.at_rest() and copy.cleared


def test_a_refetch_waits_for_a_slot(main: Main) -> None:
    slots = main.queue.req_to_metadata_buffer_idx_allocator
    taken = [slots.alloc() for _ in range(SLOTS)]
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    leader.kv_receiver.abort()
    main.step()
    assert main.copies()[0].sent is None
    for slot in taken:
        slots.free(slot)
    main.step()
    assert main.copies()[0].sent is not None
    main.copies()[0].state = KVPoll.Success
    done(follower)
    main.step()
    assert main.step() == [follower]
    main.finish(follower)
    assert main.at_rest()


@pytest.mark.parametrize("reachable", [True, False])
def test_a_refetch_that_fails_ends_the_follower_it_was_for(
    main: Main, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    leader, first, second = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4)), main.admit(text(1, 5))
    done(first, second)
    main.manager.acknowledged = False
    monkeypatch.setattr(Receiver, "reachable", reachable)
    leader.kv_receiver.abort()
    main.step()
    if reachable:
        main.copies()[0].abort()
        main.step()  # it has failed, and with it the first follower
        main.step()
        assert len(main.copies()) == 1, "its writer has not ended"
        main.manager.acknowledged = True
    monkeypatch.setattr(Receiver, "reachable", True)
    for _ in range(3):
        main.step()
    assert first not in main.queue.queue and main.counters.get("drc.refetches_failed") == 1
    (copy,) = main.copies()
    assert copy.sent is not None and copy.sent[2] == 0 and len(copy.sent[0]) == 1
    copy.state = KVPoll.Success
    main.step()
    assert main.step() == [second]
    main.finish(second)
    assert main.at_rest()


def http_fails(receiver: Receiver, answered: bool) -> None:
    """As in SGLang's thread that asks P's HTTP port."""

    def stock(manager: Manager, receiver: Receiver, reason: str) -> None:
        receiver.abort()
        manager.failure_records[receiver.bootstrap_room] = reason

    if answered:
        refetch.recompute_failed(stock, receiver.kv_mgr, receiver, "status=503")
        return
    try:
        raise TimeoutError
    except TimeoutError:
        refetch.recompute_failed(stock, receiver.kv_mgr, receiver, "errored")


@pytest.mark.parametrize("how", ["an answer", "no answer", "no time left"])
def test_a_prefill_that_does_not_answer_is_asked_once(main: Main, how: str) -> None:
    leader = main.admit(text(1, 2, 3))
    followers = [main.admit(text(1, 2, 4)), main.admit(text(1, 2, 5)), main.admit(text(1, 6)), main.admit(text(1, 7))]
    stranger = main.admit(text(1, 8), prefill="q")
    done(*followers, stranger)
    leader.kv_receiver.abort()
    main.step()
    (copy,) = main.copies()
    if how == "no time left":
        main.manager.waiting_timeout = 0.0
        copy.abort()
    else:
        http_fails(copy, how == "an answer")
    main.step()
    ended = [t.kv_receiver.state == KVPoll.Failed for t in (*followers, stranger)]
    assert ended == [True] + [how != "an answer"] * 3 + [False]
    for _ in range(3):
        main.step()
    (copy,) = main.copies()
    assert copy.bootstrap_addr == ("p:1" if how == "an answer" else "q:1")
    copy.state = KVPoll.Success
    main.step()
    rest = main.step()
    assert rest == ([*followers[1:], stranger] if how == "an answer" else [stranger])
    main.finish(*rest)
    assert main.at_rest() and main.counters.get("drc.refetches_failed") == 1


@pytest.mark.parametrize("landed", [True, False])
def test_an_http_error_that_comes_late_leaves_nothing(main: Main, landed: bool) -> None:
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    done(follower)
    leader.kv_receiver.abort()
    main.step()
    (copy,) = main.copies()
    if landed:
        copy.state = KVPoll.Success
    else:
        copy.abort()
    main.step()
    main.finish(*main.step())
    assert main.at_rest() and copy.cleared
    http_fails(copy, answered=True)
    assert main.at_rest()


def test_what_is_fetched_again_says_how_urgent_it_is(main: Main) -> None:
    leader = main.admit(text(1, 2, 3))
    main.admit(text(1, 2, 4, 5, 6)), main.admit(text(1, 2, 7, 8)), main.admit(text(1, 2) + (9,) * 11)
    leader.kv_receiver.abort()
    main.step()
    assert waiting_tokens(main.manager.asked[0]["rid"]) == 2 * PAGE


def test_what_nobody_waits_for_any_more_is_given_up(main: Main) -> None:
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    leader.kv_receiver.abort()
    main.step()
    main.prefixes.refetches.give_up()
    (copy,) = main.copies()
    assert copy.state != KVPoll.Failed and not main.prefixes.refetches.orphans(), "somebody waits for it"
    follower.kv_receiver.abort()
    main.step()
    assert main.prefixes.refetches.orphans() == {copy.bootstrap_room: follower.req}
    main.manager.acknowledged = False
    main.prefixes.refetches.give_up()
    main.step()
    assert main.world.cache.protected_size() == 2 * PAGE, "P may still write"
    assert not main.prefixes.refetches.orphans()
    main.manager.acknowledged = True
    main.step()
    assert main.at_rest() and main.counters.get("drc.refetches_failed") == 0


def test_what_nobody_waits_for_any_more_is_not_begun(main: Main) -> None:
    slots = main.queue.req_to_metadata_buffer_idx_allocator
    taken = [slots.alloc() for _ in range(SLOTS)]
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    for transfer in (leader, follower):
        transfer.kv_receiver.abort()
        main.step()
    assert not main.copies()
    for slot in taken:
        slots.free(slot)
    assert main.at_rest() and not main.manager.asked


@pytest.mark.parametrize("slots", [0, SLOTS])
def test_an_abort_of_everything_ends_what_is_fetched_again(main: Main, slots: int) -> None:
    allocator = main.queue.req_to_metadata_buffer_idx_allocator
    taken = [allocator.alloc() for _ in range(SLOTS - slots)]
    leader, *followers = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4)), main.admit(text(1, 5))
    leader.kv_receiver.abort()
    main.step()
    assert len(main.copies()) == 1
    main.prefixes.all_aborted()
    for transfer in followers:
        transfer.kv_receiver.abort()
    for slot in taken:
        allocator.free(slot)
    main.prefixes.refetches.ask()  # SGLang admits before it looks at its transfers
    for _ in range(2):
        main.step()
    assert main.at_rest() and len(main.manager.asked) == (1 if slots else 0)


def test_a_refetch_outlives_its_followers(main: Main) -> None:
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    leader.kv_receiver.abort()
    main.step()
    follower.kv_receiver.abort()
    main.step()
    assert main.world.cache.protected_size() == 2 * PAGE, "pages that are being written could be evicted"
    main.copies()[0].state = KVPoll.Success
    main.step()
    assert main.at_rest() and main.world.cache.evictable_size() == 2 * PAGE


def test_what_had_landed_is_kept(main: Main) -> None:
    main.cut_off(main.admit((*text(1, 2, 3), 4)), 2)
    assert main.step() == []
    assert main.at_rest() and main.world.cache.evictable_size() == 2 * PAGE
    again = main.admit((*text(1, 2, 3), 4))
    assert again.req.prefix_len == 2 * PAGE
    done(again)
    assert main.step() == [again]
    main.finish(again)
    assert main.at_rest() and main.counters.get("drc.salvaged") == 2 * PAGE


@pytest.mark.parametrize("pages, kept", [(0, 0), (1, 1), (3, 3), (4, 3), (5, 3)])
def test_what_had_landed_is_kept_in_whole_pages(main: Main, pages: int, kept: int) -> None:
    """The last page is not the tree's: it has tokens of nobody. And what follows the pages is metadata."""
    main.cut_off(main.admit((*text(1, 2, 3), 4)), pages)
    main.step()
    assert main.at_rest() and main.world.cache.evictable_size() == kept * PAGE
    assert main.counters.get("drc.salvaged") == kept * PAGE


def test_what_every_rank_has_is_kept(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(flags: list[int], group: Any, op: Any) -> list[int]:
        assert op == torch.distributed.ReduceOp.MIN
        return [min(flag, 1) for flag in flags]  # another rank has one page

    monkeypatch.setattr(refetch, "all_reduce_flags", reduce)
    main.cut_off(main.admit(text(1, 2, 3)), 3)
    main.step()
    assert main.at_rest() and main.world.cache.evictable_size() == PAGE


def test_followers_fetch_what_had_not_landed(main: Main) -> None:
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    main.cut_off(leader, 1)
    main.step()
    (copy,) = main.copies()
    assert copy.sent is not None and copy.sent[2] == PAGE and main.world.cache.evictable_size() == 0
    follower.kv_receiver.abort()
    copy.abort()
    for _ in range(4):
        main.step()
    assert main.at_rest() and main.world.cache.evictable_size() == PAGE


def test_what_is_fetched_again_may_land_in_part_too(main: Main) -> None:
    leader, first, second = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 3, 4)), main.admit(text(1, 2, 5))
    done(first, second)
    main.cut_off(leader, 0)
    main.step()
    (copy,) = main.copies()
    assert copy.sent is not None and len(copy.sent[0]) == 3
    main.landed[copy.bootstrap_room] = 1
    copy.abort()
    for _ in range(4):
        main.step()
    (copy,) = main.copies()
    assert copy.sent is not None and copy.sent[2] == PAGE and len(copy.sent[0]) == 1
    copy.state = KVPoll.Success
    main.step()
    assert main.step() == [second]
    main.finish(second)
    assert main.at_rest()


def test_behind_what_is_still_on_its_way_nothing_is_kept(main: Main) -> None:
    leader, follower = main.admit(text(1, 2)), main.admit(text(1, 2, 3, 4))
    main.cut_off(follower, 1)
    main.step()
    done(leader)
    assert main.step() == [leader]
    main.finish(leader)
    assert main.at_rest() and main.world.cache.evictable_size() == 2 * PAGE
    assert main.counters.get("drc.salvaged") == 0


def test_a_room_that_is_taken(main: Main) -> None:
    first = main.admit(text(1, 2), room=7)
    second = main.admit(text(1, 2, 3), room=7)
    assert second.kv_receiver.state == KVPoll.Failed
    second.kv_receiver.send_metadata([], 0, [], decode_prefix_len=0)
    assert second.kv_receiver.sent is None, "P would write to these pages what is the other one's"
    done(first)
    assert main.step() == [first]
    main.finish(first)
    assert main.at_rest()


def test_a_prompt_recomputed_by_sglang_is_not_shared(main: Main) -> None:
    req = main.world.request(text(1, 2), bootstrap_host="p", bootstrap_port=1, bootstrap_room=9)
    main.world.admit(req)
    main.prefixes.admitted(SimpleNamespace(req=req, is_rebootstrap=True, host_staged=False), 0)
    assert main.admit(text(1, 2)).req.prefix_len == 0


def test_a_thousand_random_aborts(main: Main) -> None:
    chance = random.Random(0)
    aborts = 0
    while aborts < 1000:
        action, flying = chance.random(), [t for t in main.queue.queue if t.kv_receiver.state != KVPoll.Failed]
        if action < 0.6 and len(flying) < 16:
            pages = [chance.randint(0, 1) for _ in range(chance.randint(1, 5))]
            main.admit(text(*pages) + (9,) * chance.randint(0, PAGE - 1))
        elif action < 0.8 and len(flying) > 3:
            main.cut_off(chance.choice(flying), chance.randint(0, 3))
            aborts += 1
        elif flying:
            done(chance.choice(flying))
        if chance.random() < 0.2:  # or soon everything would be there
            main.world.cache.evict(EvictParams(num_tokens=SIZE))
        for copy in main.copies():
            if copy.sent is not None and chance.random() < 0.3:
                main.landed[copy.bootstrap_room] = chance.randint(0, 2)
                copy.abort() if chance.random() < 0.3 else setattr(copy, "state", KVPoll.Success)
        main.finish(*main.step())
        mine = sum(main.world.private(t.req) for t in main.queue.queue)
        assert main.world.accounted() + mine == SIZE
    for _ in range(30):
        done(*[t for t in main.queue.queue if t.kv_receiver.state != KVPoll.Failed])
        for copy in main.copies():
            copy.state = KVPoll.Success
        main.finish(*main.step())
    assert main.at_rest() and not main.queue.queue
    assert main.counters.get("drc.refetched") > 0 and main.counters.get("drc.refetches_failed") > 0
    assert main.counters.get("drc.salvaged") > 0
