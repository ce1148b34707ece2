"""`Late` beside SGLang's queue and tree: who goes on, what P hears of it, and who gives way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cache_pool import publish_arguments
from sglang.srt.disaggregation.base import KVPoll
from test_followers import Main, alone, done, text

from sglang_pdd.metrics import Counters
from sglang_pdd.patches import late
from sglang_pdd.patches.late import Late
from sglang_pdd.patches.unwanted import Unwanted
from sglang_pdd.protocol import Awaited
from sglang_pdd.timeline import Timeline


class Side:
    """`Late`, and what it says and does."""

    def __init__(self, main: Main) -> None:
        self.main = main
        self.said: list[Awaited] = []
        self.running = 0
        self.gone: list[Any] = []
        self.streamed: list[Any] = []
        self.scheduler: Any = SimpleNamespace(
            disagg_decode_transfer_queue=main.queue,
            disagg_decode_prealloc_queue=SimpleNamespace(queue=[], retracted_queue=[]),
            token_to_kv_pool_allocator=main.world.allocator,
            tree_cache=main.world.cache,
            running_batch=SimpleNamespace(batch_size=lambda: self.running),
            output_streamer=SimpleNamespace(stream_output=lambda reqs, logprob: self.streamed.extend(reqs)),
        )
        self.late = Late(self.scheduler, main.prefixes, self.gone.append, lambda _, message: self.said.append(message))

    def finish(self, ids: tuple[int, ...]) -> Any:
        """A request whose answer is complete before its KV has landed."""
        transfer = self.main.admit(ids)
        self.late.keep(transfer)
        return transfer

    def step(self, short: bool = False) -> None:
        self.late.step(short)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    publish_arguments()
    return Side(alone(monkeypatch))


def test_p_hears_once_for_whom_nobody_waits(side: Side) -> None:
    first, second = side.finish(text(1, 2)), side.finish(text(3))
    for _ in range(3):
        side.step()
    assert side.said == [Awaited(first.req.bootstrap_room, False), Awaited(second.req.bootstrap_room, False)]
    assert len(side.late) == 2
    done(first, second)
    assert side.main.step() == [first, second]
    side.step()
    assert len(side.late) == 0


def test_somebody_comes_to_wait_for_it(side: Side) -> None:
    first = side.finish(text(1, 2))
    side.step()
    follower = side.main.admit(text(1, 2, 3))
    side.step()
    room = first.req.bootstrap_room
    assert side.said == [Awaited(room, False), Awaited(room, True)]
    assert first.kv_receiver.state != KVPoll.Failed
    side.late.keep(follower)  # this answer, too, is complete: nobody is left who waits for either
    side.step()
    assert set(side.said[2:]) == {Awaited(t.req.bootstrap_room, False) for t in (first, follower)}


@pytest.mark.parametrize("wanted", ["pool", "memory", "retracted", "next tokens"])
def test_who_is_in_the_way_ends(side: Side, wanted: str) -> None:
    idle = [side.finish(text(*pages)) for pages in ((1, 2), (3, 4), (3, 4, 5))]
    side.step()
    side.main.admit(text(6))  # wants the link only: P sees to that
    side.step()
    assert not any(t.kv_receiver.state == KVPoll.Failed for t in idle)
    queue = side.scheduler.disagg_decode_prealloc_queue
    if wanted == "pool":
        queue.queue.append(SimpleNamespace(waiting_for_input=True))
    elif wanted == "retracted":
        queue.retracted_queue.append(None)
    elif wanted == "next tokens":
        side.running = side.main.world.size // late.HEADROOM
    side.step(short=wanted == "memory")
    assert all(t.kv_receiver.state == KVPoll.Failed for t in idle) and len(side.late) == 0
    assert not side.main.manager.failure_records
    side.main.step()
    assert not side.main.copies(), "fetched again, for nobody"


def test_who_is_waited_for_does_not_give_way(side: Side) -> None:
    idle, led = side.finish(text(1, 2)), side.finish(text(3, 4))
    side.step()
    side.main.admit(text(3, 4, 5))
    side.step(short=True)
    assert [t.kv_receiver.state == KVPoll.Failed for t in (idle, led)] == [True, False]
    assert len(side.late) == 1 and side.said[2:] == [Awaited(led.req.bootstrap_room, True)]


def test_what_is_fetched_again_for_nobody(side: Side) -> None:
    """It goes last, comes back for whoever follows it, and gives way like a prompt whose answer is complete."""
    leader, follower = side.main.admit(text(1, 2, 3)), side.main.admit(text(1, 2, 4))
    for transfer in (leader, follower):
        transfer.kv_receiver.abort()
        side.main.step()
    (copy,) = side.main.copies()
    room = copy.bootstrap_room
    side.step()
    assert side.said == [Awaited(room, False)]
    last = side.main.admit(text(1, 2, 5))
    side.step()
    assert side.said[1:] == [Awaited(room, True)] and copy.state != KVPoll.Failed
    last.kv_receiver.abort()
    side.main.step()
    side.step(short=True)
    assert copy.state == KVPoll.Failed and len(side.said) == 2


def test_a_room_that_is_used_again(side: Side) -> None:
    first = side.finish(text(1))
    side.step()
    done(first)
    side.main.step()
    again = side.main.admit(text(2), room=first.req.bootstrap_room)
    side.late.keep(again)
    side.step()
    assert side.said == [Awaited(first.req.bootstrap_room, False)] * 2


@pytest.mark.parametrize("everybody", [False, True])
def test_an_abort_does_not_see_a_leader_that_has_sampled(
    side: Side, monkeypatch: pytest.MonkeyPatch, everybody: bool
) -> None:
    leader, follower, fresh = (side.main.admit(text(*pages)) for pages in ((1, 2), (1, 2, 3), (4,)))
    side.main.admit(text(4, 5))
    leader.req.output_ids.append(7)
    seen: list[Any] = []
    monkeypatch.setattr(late.ingress, "seam", SimpleNamespace(late=side.late))
    for request in (leader, follower, fresh):
        order = SimpleNamespace(rid=request.req.rid, abort_all=everybody)
        late.abort_request(lambda scheduler, order: seen.append(list(side.main.queue.queue)), side.scheduler, order)
    assert len(side.main.queue.queue) == 4
    assert [leader in queue for queue in seen] == [everybody] * 3 if everybody else [False, True, True]
    assert side.gone == side.streamed == [] if everybody else side.gone == [leader]
    assert leader.req.finished() is not everybody and not follower.req.finished() and not fresh.req.finished()


class Prefill:
    """P with copies under way, some of which nobody waits for."""

    def __init__(self, copies: int, idle: int, by_stream: bool = True) -> None:
        self.ended: list[int] = []
        self.slots = 4
        self.records: dict[int, str] = {}
        manager = SimpleNamespace(conclude_failure=self._conclude, failure_records=self.records)
        self.scheduler = SimpleNamespace(
            disagg_prefill_inflight_queue=[SimpleNamespace(bootstrap_room=room) for room in range(copies)],
            disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[], kv_manager=manager),
            waiting_queue=[],
            chunked_req=None,
            req_to_metadata_buffer_idx_allocator=SimpleNamespace(available_size=lambda: self.slots),
        )
        self.counters = Counters()
        self.unwanted = Unwanted(self.scheduler, by_stream, self.counters, Timeline(None, "prefill", ""))
        self.unwanted.rooms = set(range(idle))

    def _conclude(self, *, bootstrap_room: int, failure_reason: str) -> None:
        self.ended.append(bootstrap_room)
        self.records[bootstrap_room] = failure_reason

    def step(self) -> list[int]:
        self.unwanted.make_room()
        assert not self.records, "SGLang would log an error"
        return self.ended


def test_p_ends_nothing_that_is_not_in_the_way() -> None:
    prefill = Prefill(copies=3, idle=2)
    prefill.scheduler.waiting_queue.append(None)
    prefill.unwanted.planned(object())
    assert prefill.step() == []
    prefill.scheduler.chunked_req = object()
    prefill.unwanted.planned(None)
    assert prefill.step() == []
    assert Prefill(copies=2, idle=2, by_stream=False).step() == []


def test_a_link_without_an_order_is_left_to_those_who_wait() -> None:
    assert Prefill(copies=3, idle=2, by_stream=False).step() == [0, 1]


@pytest.mark.parametrize("wanted", ["pages or a row", "slot"])
def test_p_ends_what_others_wait_for_the_memory_of(wanted: str) -> None:
    prefill = Prefill(copies=3, idle=2)
    if wanted == "slot":
        prefill.slots = 0
        assert prefill.step() == []
        prefill.scheduler.disagg_prefill_bootstrap_queue.queue.append(None)
    else:
        prefill.scheduler.waiting_queue.append(None)
        prefill.unwanted.planned(None)
    assert prefill.step() == [0, 1]
    assert prefill.step() == [0, 1]  # once
    assert prefill.counters.get("wan.given_up") == 2


def test_what_p_gives_up_is_no_error_of_mds(side: Side) -> None:
    late_one, live = side.finish(text(1, 2)), side.main.admit(text(6))
    records = side.main.manager.failure_records
    records.update({t.req.bootstrap_room: "nobody waits for it" for t in (late_one, live)})
    side.late.hush([KVPoll.Failed, KVPoll.Failed])
    assert list(records) == [live.req.bootstrap_room]
