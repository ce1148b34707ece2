"""`Prefixes` between SGLang's queues and its tree, with receivers of our own: who runs when, what is fetched again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cache_pool import World, publish_arguments
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator

from sglang_pdd.metrics import Counters
from sglang_pdd.patches import prefixes
from sglang_pdd.patches.prefixes import Prefixes

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

    def submit_prefill_recompute(self, receiver: Any, payload: dict[str, Any]) -> None:
        self.asked.append(payload)

    def is_abort_release_safe(self, room: int, acks: int) -> bool:
        return self.acknowledged or acks == 0

    def clear_deferred_abort_state(self, room: int) -> None:
        pass


class Receiver:
    """Of SGLang's receiver, what is asked for; its state is the test's."""

    reachable = True

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.state = KVPoll.WaitingForInput
        self.conclude_state: KVPoll | None = None
        self.abort_notified = False
        self.bootstrap_infos = [None]
        self.prefill_dp_rank = 0
        self.sent: tuple[Any, ...] | None = None
        self.cleared = False

    def init(self, rank: int) -> None:
        if not self.reachable:
            self.abort()

    def send_metadata(self, pages: Any, slot: int, state: Any, decode_prefix_len: int) -> None:
        self.sent = (pages.tolist(), slot, decode_prefix_len)

    def abort(self) -> None:
        self.state = self.conclude_state = KVPoll.Failed

    def ensure_abort_notified(self, force_arm: bool = False) -> None:
        self.abort_notified = self.sent is not None

    def clear(self) -> None:
        self.cleared = True


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
        self.counters = Counters()
        timeline: Any = SimpleNamespace(event=lambda *args, **fields: None)
        self.prefixes = Prefixes(scheduler, self.counters, timeline, self.ignored.append, self.over.append)
        self.rooms = 0

    def admit(self, ids: tuple[int, ...], room: int | None = None) -> Any:
        self.rooms += 1
        req = self.world.request(
            ids, bootstrap_host="p", bootstrap_port=1, bootstrap_room=self.rooms if room is None else room
        )
        hit = self.world.admit(req)
        receiver = Receiver(self.manager, "p:1", req.bootstrap_room)
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
        self.prefixes.pump()
        return [t for t, poll in seen if poll == KVPoll.Success]

    def finish(self, *transfers: Any) -> None:
        for transfer in transfers:
            self.world.finish(transfer.req)

    def copies(self) -> list[Receiver]:
        return [copy.receiver for copy in self.prefixes._copies]

    def at_rest(self) -> bool:
        slots = self.queue.req_to_metadata_buffer_idx_allocator.available_size()
        return bool(
            not len(self.prefixes)
            and not len(self.world.cache.pending)
            and slots == SLOTS
            and self.world.cache.protected_size() == 0
            and self.world.accounted() == SIZE
        )


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    return alone(monkeypatch)


def alone(monkeypatch: pytest.MonkeyPatch) -> Main:
    def poll(receivers: list[Receiver], group: Any, copies: Any, buffers: Any) -> list[KVPoll]:
        return [receiver.state for receiver in receivers]

    monkeypatch.setattr(prefixes, "get_kv_class", lambda backend, kind: Receiver)
    monkeypatch.setattr(prefixes, "poll_and_all_reduce", poll)
    monkeypatch.setattr(prefixes, "all_reduce_flags", lambda flags, group, op: flags)
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
    """Of a transfer that says how far it has come."""
    leader, follower = main.admit(text(1, 2, 3)), main.admit(text(1, 2, 4))
    main.world.cache.pending.progress(leader.req.bootstrap_room, 1)
    leader.kv_receiver.abort()
    main.step()
    (copy,) = main.copies()
    assert copy.sent is not None and copy.sent[2] == PAGE and main.world.cache.evictable_size() == 0
    follower.kv_receiver.abort()
    copy.abort()
    for _ in range(4):
        main.step()
    assert main.at_rest() and main.world.cache.evictable_size() == PAGE


def test_a_room_that_is_taken(main: Main) -> None:
    first = main.admit(text(1, 2), room=7)
    second = main.admit(text(1, 2, 3), room=7)
    assert second.kv_receiver.state == KVPoll.Failed
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
            chance.choice(flying).kv_receiver.abort()
            aborts += 1
        elif flying:
            done(chance.choice(flying))
        for copy in main.copies():
            if copy.sent is not None and chance.random() < 0.3:
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
