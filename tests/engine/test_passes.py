"""MD's extend passes without a server: whose turn it is, and how a takeover ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import NextBatchPlan

from sglang_pdd.metrics import Counters
from sglang_pdd.patches import extend, passes
from sglang_pdd.patches.passes import Passes
from sglang_pdd.timeline import Timeline

PROMPT, STEP = 100, 64
STOCK = NextBatchPlan(batch_to_run=None, running_batch=None)


class Req(SimpleNamespace):
    """A request, which SGLang compares by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def finished(self) -> bool:
        return self.finished_reason is not None

    def update_finish_state(self) -> None:
        self.finished_reason = self.to_finish


class Running:
    """The running batch."""

    batch_is_full = False

    def __init__(self, requests: int = 0) -> None:
        self.requests = requests

    def is_empty(self) -> bool:
        return self.requests == 0

    def batch_size(self) -> int:
        return self.requests


class World:
    """A main decode in which requests have landed. There is memory for a pass while ``memory`` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.mixes = True, False
        self.running = Running()
        self.passes_run: list[list[tuple[int, int, bool]]] = []  # (room, end, last) of each part of each pass
        self.seen: list[list[int]] = []  # rooms that SGLang's own planning saw waiting
        self.closed: list[tuple[int, str]] = []
        self.stuck: list[int] = []
        self.released: list[int] = []
        self.retracted: list[Any] = []
        transfers = SimpleNamespace(queue=[], has_pending_deferred_releases=lambda: False)
        self.scheduler = SimpleNamespace(
            waiting_queue=[],
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
            disagg_decode_transfer_queue=transfers,
            disagg_decode_prealloc_queue=SimpleNamespace(retracted_queue=self.retracted),
            output_streamer=SimpleNamespace(stream_output=lambda reqs, logprob: None),
            tree_cache=None,
        )
        monkeypatch.setattr(extend, "plan", self._plan)
        monkeypatch.setattr(extend, "build", self._build)
        monkeypatch.setattr(extend, "mix", lambda *_: self.mixes)
        monkeypatch.setattr(extend, "finish_build", lambda scheduler, batch: batch)
        monkeypatch.setattr(extend, "merge_last", lambda scheduler, middle: None)
        monkeypatch.setattr(extend, "batch_room", lambda *_: 1)
        monkeypatch.setattr(passes, "release_kv_cache", lambda req, tree, checkpoint: self.released.append(req.room))
        monkeypatch.setattr(passes, "ScheduleBatch", lambda **_: Running())
        timeline = Timeline(None, "main", "")
        self.passes = Passes(self.scheduler, Counters(), timeline, self._close, self.stuck.append)

    def _close(self, room: int, why: str) -> None:
        self.closed.append((room, why))

    def _plan(self, scheduler: Any, running: Any, queue: Any) -> list[extend.Part]:
        if not self.memory or not queue:
            return []
        first = queue[0]
        end = first.req.kv.kv_committed_len + min(first.step, first.rest)
        return [extend.Part(first.req, end, first.rest <= first.step)]

    def _build(self, scheduler: Any, parts: list[extend.Part]) -> Any:
        for part in parts:
            part.req.kv.kv_committed_len = part.end
            part.req.inflight_middle_chunks += not part.last
            scheduler.waiting_queue.remove(part.req)
        self.passes_run.append([(part.req.room, part.end, part.last) for part in parts])
        return SimpleNamespace()

    def land(self, room: int, eager: int) -> Req:
        req = Req(
            room=room,
            bootstrap_room=room,
            rid=str(room),
            origin_input_ids=[1] * PROMPT,
            output_ids=[2] * eager,
            kv=SimpleNamespace(kv_committed_len=PROMPT, holds_kv=True),
            inflight_middle_chunks=0,
            extend_len=0,
            is_retracted=False,
            to_finish=None,
            finished_reason=None,
            return_logprob=False,
            time_stats=SimpleNamespace(set_completion_time=lambda: None),
        )
        self.passes.add(req, STEP)
        self.scheduler.waiting_queue.append(req)
        return req

    def other(self) -> None:
        """Somebody of SGLang's own waits, too."""
        self.scheduler.waiting_queue.append(Req(room=0))

    def step(self) -> bool:
        """One step of the scheduler. False: it ran what SGLang would have run."""
        self.passes.begin_step()
        return self.passes.next_batch(self._stock, self.running) is not STOCK  # type: ignore[arg-type]

    def _stock(self, scheduler: Any, running: Any) -> NextBatchPlan:
        self.seen.append([req.room for req in scheduler.waiting_queue])
        return STOCK

    def done(self, *reqs: Req) -> None:
        """A pass over them has been processed."""
        for req in reqs:
            req.inflight_middle_chunks -= 1
        self.passes.processed()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_passes_until_the_last_token(world: World) -> None:
    world.land(1, eager=100)
    assert world.step() and world.closed == []
    assert world.step() and world.closed == [(1, "landed")]
    assert world.passes_run == [[(1, PROMPT + STEP, False)], [(1, PROMPT + 100, True)]]
    assert not world.step()


def test_who_sits_a_pass_out_has_the_next_step(world: World) -> None:
    world.land(1, eager=1000)
    world.running = Running(2)
    assert [world.step() for _ in range(4)] == [True, False, True, False]
    world.mixes = True
    assert [world.step() for _ in range(2)] == [True, True]


def test_whoever_wants_to_get_in_has_every_other_step(world: World) -> None:
    world.land(1, eager=300)
    world.other()
    assert [world.step() for _ in range(4)] == [True, False, True, False]
    assert world.seen == [[0], [0]]
    assert sorted(req.room for req in world.scheduler.waiting_queue) == [0, 1]


def test_an_abort_during_a_middle_pass_waits_for_its_result(world: World) -> None:
    req = world.land(1, eager=100)
    assert world.step()
    req.to_finish = "abort"
    assert not world.step()
    assert world.closed == [(1, "aborted")] and req.finished() and world.released == []
    world.done(req)
    assert world.released == [1]


def test_an_answer_that_is_complete_during_a_middle_pass(world: World) -> None:
    req = world.land(1, eager=100)
    assert world.step()
    world.passes.finished(req)
    assert world.released == [] and not world.step() and world.scheduler.waiting_queue == []
    world.done(req)
    assert world.released == [1] and world.closed == []  # who says so knows


def test_an_answer_that_is_complete_before_any_pass(world: World) -> None:
    world.passes.finished(world.land(1, eager=100))
    assert world.released == [1] and world.scheduler.waiting_queue == [] and not world.step()


def test_who_is_no_longer_in_sglangs_queue_is_gone(world: World) -> None:
    world.land(1, eager=100)
    world.land(2, eager=10)
    del world.scheduler.waiting_queue[0]
    assert world.step() and world.closed == [(1, "aborted"), (2, "landed")]


def test_only_where_nothing_can_free_memory_somebody_is_stuck(world: World) -> None:
    first, last = world.land(1, eager=100), world.land(2, eager=100)
    world.memory = False
    world.running = Running(1)
    assert not world.step() and world.passes.short and world.stuck == []
    world.running = Running()
    world.scheduler.disagg_decode_transfer_queue.queue.append(None)
    assert not world.step() and world.stuck == []
    world.retracted.append(None)  # so that transfer will not land
    assert not world.step() and world.stuck == [2]
    world.passes.give_up(3)
    world.passes.give_up(2)
    assert world.closed == [(2, "aborted")] and last.finished() and world.released == [2]
    assert world.scheduler.waiting_queue == [first]
    world.memory = True
    assert world.step() and not world.passes.short
