"""P's second copies without a server: when a relay's sender gets what, and how a copy ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base import KVPoll

from sglang_pdd.metrics import Counters
from sglang_pdd.patches import fanout
from sglang_pdd.patches.fanout import Fanout
from sglang_pdd.timeline import Timeline

ROOM, RELAY_ROOM, PROMPT, HIT = 7, 70, 100, 16  # HIT: tokens that RLD has cached


class Sender:
    """SGLang's, of either copy."""

    def __init__(self, **kwargs: Any) -> None:
        self.state, self.slot, self.aborted, self.cleared = KVPoll.Bootstrapping, -1, False, False

    def pop_decode_prefix_len(self) -> int:
        return HIT

    def init(self, pages: int, slot: int) -> None:
        assert pages == PROMPT - HIT
        self.slot = slot

    def abort(self) -> None:
        self.aborted = True

    def clear(self) -> None:
        self.cleared = True


class Slots(list[int]):
    """Metadata slots that are free."""

    available_size = list.__len__
    alloc = list.pop
    free = list.append


class World:
    """A prefill that has one request; ``sent``: what was handed to a relay's sender."""

    def __init__(self) -> None:
        self.slots = Slots([3])
        self.manager = SimpleNamespace(
            transfer_infos={RELAY_ROOM: {"rld:1": None}},
            request_status={RELAY_ROOM: 0},
            req_to_decode_prefix_len={},
            failure_records={RELAY_ROOM: "why"},
        )
        self.req = SimpleNamespace(
            origin_input_ids=[1] * PROMPT,
            output_ids=[],
            pending_bootstrap=False,
            bootstrap_host="p",
            bootstrap_room=ROOM,
            disagg_kv_sender=Sender(),
            start_send_idx=0,
            disagg_decode_prefix_len=0,
            metadata_buffer_index=1,
        )
        queue = SimpleNamespace(
            kv_manager=self.manager,
            transfer_backend=None,
            bootstrap_port=1,
            _num_pages_to_send=lambda req, hit: len(req.origin_input_ids) - hit,
        )
        scheduler = SimpleNamespace(
            disagg_prefill_bootstrap_queue=queue,
            req_to_metadata_buffer_idx_allocator=self.slots,
            attn_cp_cpu_group=None,
            attn_tp_cpu_group=None,
            disagg_prefill_inflight_queue=[self.req],
        )
        self.scheduler = scheduler
        self.waits = False  # the request, at MD, for others
        self.over: list[int] = []
        self.ended: list[tuple[int, str | None]] = []
        self.sent: list[tuple[int, int, bool]] = []
        self.counters = Counters()
        lanes: Any = SimpleNamespace(forget=self.over.append)
        timeline = Timeline(None, "prefill", "")
        self.fanout = Fanout(scheduler, lanes, 2.0, self.counters, timeline, self._end, lambda req: self.waits)

    def _end(self, room: int, why: str | None) -> None:
        self.ended.append((room, why))

    def open(self) -> Sender:
        self.fanout.open(self.req, RELAY_ROOM)
        sender: Sender = self.fanout._relays[RELAY_ROOM].sender
        return sender

    def send(self, scheduler: Any, req: Any, last: bool, end: int) -> None:
        """SGLang's `_send_kv_chunk`: it takes everything from the request."""
        assert req.bootstrap_room == RELAY_ROOM and req.metadata_buffer_index == req.disagg_kv_sender.slot == 3
        assert req.disagg_decode_prefix_len == HIT
        self.sent.append((req.start_send_idx, end, last))
        req.start_send_idx = end

    def computed(self, end: int) -> None:
        self.fanout.computed(self.send, self.req, end, end == PROMPT, written=None)

    def step(self) -> list[Any]:
        """Returns the requests that SGLang looks at."""
        self.fanout.pump(self.send)
        with self.fanout.keeping():
            return list(self.scheduler.disagg_prefill_inflight_queue)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(fanout, "get_kv_class", lambda backend, kind: Sender)
    monkeypatch.setattr(
        fanout, "poll_and_all_reduce_attn_cp_tp_group", lambda senders, *groups: [s.state for s in senders]
    )
    return World()


def test_a_relay_gets_what_is_computed_from_where_its_cache_ends(world: World) -> None:
    own = world.req.disagg_kv_sender
    sender = world.open()
    world.computed(40)
    world.step()
    assert world.sent == []
    sender.state = KVPoll.WaitingForInput
    world.step()
    world.step()
    assert world.sent == [(HIT, 40, False)] and world.fanout.sessions == {"rld:1"}
    world.computed(PROMPT)
    world.computed(PROMPT)
    assert world.sent[1:] == [(40, PROMPT, True)]
    req = world.req
    assert (req.disagg_kv_sender, req.start_send_idx, req.bootstrap_room) == (own, 0, ROOM)
    assert (req.disagg_decode_prefix_len, req.metadata_buffer_index) == (0, 1)
    sender.state = KVPoll.Success
    world.step()
    assert world.ended == [(RELAY_ROOM, None)] and world.over == [RELAY_ROOM]
    assert sender.cleared and not sender.aborted and world.slots == [3] and len(world.fanout) == 0
    assert world.counters.get("lan.bytes") == 2 * (PROMPT - HIT)


def test_prefill_may_be_faster_than_the_decision(world: World) -> None:
    world.req.output_ids = [5]
    world.open().state = KVPoll.WaitingForInput
    world.step()
    assert world.sent == [(HIT, PROMPT, True)]


def test_a_copy_waits_for_its_metadata_slot(world: World) -> None:
    slot = world.slots.pop()
    world.open().state = KVPoll.WaitingForInput
    world.computed(PROMPT)
    world.step()
    assert world.sent == []
    world.slots.append(slot)
    world.step()
    assert world.sent == [(HIT, PROMPT, True)]


@pytest.mark.parametrize(
    "copy, own, why",
    [
        (KVPoll.Failed, KVPoll.Transferring, "copy_failed"),
        (KVPoll.Transferring, KVPoll.Failed, "aborted"),
        (KVPoll.Transferring, KVPoll.Success, "landed"),
    ],
)
def test_who_ends_a_copy(world: World, copy: int, own: int, why: str) -> None:
    sender = world.open()
    sender.state = KVPoll.WaitingForInput
    world.step()
    sender.state, world.req.disagg_kv_sender.state = copy, own
    world.step()
    assert world.ended == [(RELAY_ROOM, why)] and world.over == [RELAY_ROOM]
    assert sender.aborted and sender.cleared and world.slots == [3] and not world.manager.failure_records


@pytest.mark.parametrize("copy", [KVPoll.Success, KVPoll.Failed])
def test_a_request_that_waits_for_others_keeps_its_pages_for_the_relay(world: World, copy: int) -> None:
    world.waits = True
    sender = world.open()
    world.req.disagg_kv_sender.state = KVPoll.Success
    assert world.step() == [] and world.scheduler.disagg_prefill_inflight_queue == [world.req]
    sender.state = KVPoll.WaitingForInput
    world.computed(PROMPT)
    assert world.step() == [] and world.sent == [(HIT, PROMPT, True)]
    sender.state = copy
    assert world.step() == [world.req] == world.scheduler.disagg_prefill_inflight_queue
    assert world.ended == [(RELAY_ROOM, None if copy == KVPoll.Success else "copy_failed")]


def test_but_not_if_its_own_copy_fails(world: World) -> None:
    world.waits = True
    world.open()
    world.req.disagg_kv_sender.state = KVPoll.Failed
    assert world.step() == [world.req] and world.ended == [(RELAY_ROOM, "aborted")]


def test_a_copy_ends_in_the_step_in_which_its_request_does(world: World) -> None:
    sender = world.open()
    world.fanout.landed(world.req)
    assert sender.aborted and len(world.fanout) == 0 and world.ended == [(RELAY_ROOM, "landed")]


def test_whoever_drops_a_copy_knows(world: World) -> None:
    sender = world.open()
    world.fanout.drop(RELAY_ROOM, "refused")
    world.fanout.drop(RELAY_ROOM, "refused")
    assert sender.aborted and len(world.fanout) == 0 and world.ended == []


def test_what_comes_too_late_is_swept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.open()
    world.fanout.drop(RELAY_ROOM, "refused")
    world.fanout.sweep()
    assert RELAY_ROOM in world.manager.transfer_infos  # SGLang may yet hear of it
    monkeypatch.setattr(fanout, "LATE", -1.0)
    world.fanout.sweep()
    assert not world.manager.transfer_infos and not world.manager.request_status
