"""Which requests share an extend pass, how far it goes, and how a catch-up converges."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pdd.config import MAX_PASS
from sglang_pdd.patches import extend
from sglang_pdd.patches.passes import Takeover

PROMPT = 100


@dataclass
class Running:
    """What is asked of a running batch."""

    requests: int = 0
    next_step: int = 0

    def is_empty(self) -> bool:
        return not self.requests

    def batch_size(self) -> int:
        return self.requests

    def new_tokens_required_next_decode(self) -> int:
        return self.next_step


class Req(SimpleNamespace):
    """A request, which SGLang compares by identity, or a batch, to which it holds weak references."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@dataclass(eq=False)
class Waiting:
    """A landed request with so many output tokens, of which ``done`` have their KV."""

    outputs: int
    step: int = MAX_PASS
    done: int = 0
    priority: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.req = Req(
            origin_input_ids=[1] * PROMPT,
            output_ids=[2] * self.outputs,
            kv=SimpleNamespace(kv_committed_len=PROMPT + self.done),
            sampling_params=SamplingParams(**self.sampling),
            priority=self.priority,
        )


def scheduler(free: int = 10_000, page: int = 1, room: int = 64, priorities: bool = False) -> Any:
    def calc_priority(reqs: list[Any], running: Any) -> None:
        reqs.sort(key=lambda req: -req.priority)

    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page, available_size=lambda: free),
        tree_cache=SimpleNamespace(evictable_size=lambda: 0),
        req_to_token_pool=SimpleNamespace(size=room),
        max_running_requests=room,
        is_mixed_chunk=True,
        enable_priority_scheduling=priorities,
        policy=SimpleNamespace(calc_priority=calc_priority),
    )


def shares(waiting: list[Waiting], running: Running | None = None, **kwargs: Any) -> list[tuple[int, int, bool]]:
    """(which request, tokens recomputed, last) of each part."""
    parts = extend.plan(scheduler(**kwargs), running or Running(), waiting)
    index = {id(w.req): i for i, w in enumerate(waiting)}
    return [(index[id(p.req)], p.end - p.req.kv.kv_committed_len, p.last) for p in parts]


def test_all_that_is_left_of_all_that_wait() -> None:
    assert shares([Waiting(5), Waiting(300), Waiting(2)]) == [(0, 5, True), (1, 300, True), (2, 2, True)]


def test_a_pass_is_no_longer_than_a_step() -> None:
    assert shares([Waiting(200, step=64), Waiting(5, step=64)]) == [(0, 64, False)]
    assert shares([Waiting(40, step=64), Waiting(40, step=64)]) == [(0, 40, True), (1, 24, False)]
    assert shares([Waiting(64, step=64), Waiting(40, step=64)]) == [(0, 64, True)]
    assert shares([Waiting(3000)]) == [(0, MAX_PASS, False)]
    assert shares([Waiting(3000, done=MAX_PASS)]) == [(0, 3000 - MAX_PASS, True)]


def test_steps_of_both_modes_in_one_pass() -> None:
    assert shares([Waiting(30, step=64), Waiting(500)]) == [(0, 30, True), (1, 500, True)]
    assert shares([Waiting(500), Waiting(30, step=64)]) == [(0, 500, True)]


@pytest.mark.parametrize("page", [1, 16])
def test_memory_is_found_first(page: int) -> None:
    enough = {1: 31, 16: 48}[page]  # pages 7..8 for 30 tokens after 100 (104 is a boundary), and one for the next step
    assert shares([Waiting(30)], free=enough, page=page) == [(0, 30, True)]
    assert shares([Waiting(30)], free=enough - 1, page=page) == []
    assert shares([Waiting(30)], Running(1, next_step=1), free=enough, page=page) == []


def test_batch_room_is_found_first() -> None:
    assert shares([Waiting(5), Waiting(5)], Running(1), room=2) == [(0, 5, True)]
    assert shares([Waiting(5)], Running(2), room=2) == []


@pytest.mark.parametrize("history", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}, {"min_new_tokens": 9}])
def test_who_has_a_history_has_the_last_pass_alone(history: dict[str, Any]) -> None:
    special = Waiting(5, sampling=history)
    assert shares([special, Waiting(5)]) == [(0, 5, True)]
    assert shares([Waiting(5), special, Waiting(5)]) == [(0, 5, True)]
    assert shares([Waiting(5), Waiting(100, step=64, sampling=history)]) == [(0, 5, True), (1, 59, False)]


def test_the_order_follows_priorities() -> None:
    waiting = [Waiting(40, step=64), Waiting(40, step=64, priority=1)]
    assert shares(waiting, priorities=True) == [(1, 40, True), (0, 24, False)]


def test_a_relay_that_is_as_fast_as_the_passes_is_caught() -> None:
    req = Waiting(400).req
    takeover = Takeover(req, step=64)
    passes = 0
    while takeover.rest > takeover.step:
        req.kv.kv_committed_len += takeover.step
        takeover.left = takeover.rest
        req.output_ids += [2] * 60
        takeover.aim()
        passes += 1
        assert passes < 10
    assert takeover.step == 128


def test_steps_grow_while_decodes_sit_passes_out() -> None:
    takeover = Takeover(Waiting(400).req, step=64)
    takeover.left, takeover.apart = takeover.rest, True
    takeover.aim()
    assert takeover.step == 128


def test_decodes_that_ride_are_part_of_the_pass() -> None:
    assert shares([Waiting(3000)], Running(48), room=64) == [(0, MAX_PASS - 48, False)]


def test_a_slow_relay_is_caught_in_small_steps() -> None:
    req = Waiting(400).req
    takeover = Takeover(req, step=64)
    while takeover.rest > takeover.step:
        req.kv.kv_committed_len += takeover.step
        takeover.left = takeover.rest
        req.output_ids += [2] * 3
        takeover.aim()
    assert takeover.step == 64


def orchestrator(req: Any) -> Any:
    """SGLang's penalizers for a batch of this request."""
    batch = Req(reqs=[req], device="cpu")
    made = BatchedPenalizerOrchestrator(50, batch, set(extend._FEED))
    made.kept = batch  # it holds a weak reference only
    return made


@pytest.mark.parametrize("overlap", [True, False])
def test_history_is_what_as_many_steps_would_have_made_it(overlap: bool) -> None:
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.4, "min_new_tokens": 9}
    req = Waiting(0, sampling=penalties).req
    req.origin_input_ids, req.output_ids = [7, 8], [3, 4, 3, 3, 9]
    req.eos_token_ids, req.tokenizer = {1}, SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)
    at_once, stepwise = orchestrator(req), orchestrator(req)
    batch = SimpleNamespace(device="cpu", sampling_info=SimpleNamespace(penalizer_orchestrator=at_once))
    extend._feed_history(SimpleNamespace(enable_overlap=overlap), batch, req)  # type: ignore[arg-type]
    for token in [8, 3, 4, 3, 3] if overlap else [3, 4, 3, 3, 9]:
        stepwise.cumulate_output_tokens(torch.tensor([token]))
    logits = [torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    for made, row in zip((at_once, stepwise), logits, strict=True):
        made.apply(row)
    torch.testing.assert_close(logits[0], logits[1])
