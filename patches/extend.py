"""The extend pass: one forward pass of MD over tokens that another role has sampled, to get their KV.

A pass ends at a request's last token (and then samples the next one), or, if that is too far away, before it, like a
middle chunk of a chunked prefill. At most the last request of a pass is such a one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.observability.req_time_stats import set_schedule_time_batch, set_time_batch
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer

from sglang_pdd.config import MAX_PASS


class Landed(Protocol):
    """A request whose prompt's KV is here."""

    @property
    def req(self) -> Any: ...
    @property
    def step(self) -> int:
        """Tokens that one pass may recompute."""


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a pass: the tokens in [kv_committed_len, end)."""

    req: Any
    end: int
    last: bool  # nothing is left after it


def batch_room(scheduler: Any, running_batch: ScheduleBatch) -> int:
    """Requests that may run beside those that do."""
    return int(min(scheduler.req_to_token_pool.size, scheduler.max_running_requests) - running_batch.batch_size())


def plan(scheduler: Any, running_batch: ScheduleBatch, queue: Sequence[Landed]) -> list[Part]:
    """As many as there is memory and batch room for, beside the running batch's next step."""
    page = scheduler.token_to_kv_pool_allocator.page_size
    room = batch_room(scheduler, running_batch)
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    if not running_batch.is_empty():
        free -= running_batch.new_tokens_required_next_decode()
    parts: list[Part] = []
    tokens = 0
    for landed in _by_priority(scheduler, running_batch, queue)[: max(0, room)]:
        req, step = landed.req, landed.step
        if scheduler.is_mixed_chunk:
            step = max(1, min(step, MAX_PASS - running_batch.batch_size()))  # decodes that ride are part of the pass
        start, goal = req.kv.kv_committed_len, len(req.origin_input_ids) + len(req.output_ids)
        end = min(goal, start + step - tokens)
        alone = end == goal and _has_history(req)
        # One page more than the pass itself: the next decode step may need it.
        need = (-(-end // page) - -(-start // page) + 1) * page
        if end <= start or need > free or (alone and parts):
            break
        free -= need
        tokens += end - start
        parts.append(Part(req, end, end == goal))
        if alone or end < goal:
            break
    return parts


def build(scheduler: Any, parts: list[Part]) -> ScheduleBatch:
    """The batch of this pass; its memory is allocated."""
    for part in parts:
        _prepare(part)
    reqs = [part.req for part in parts]
    scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r not in reqs]
    set_time_batch(reqs, "set_forward_entry_time")
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_extend()
    if parts[-1].last and _has_history(parts[-1].req):
        _feed_history(scheduler, batch, parts[-1].req)
    if scheduler.enable_overlap:
        # As for SGLang's own prebuilt batches: a finished request's last forward may still use a reused row.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
    return batch


def mix(scheduler: Any, batch: ScheduleBatch, running_batch: ScheduleBatch) -> bool:
    """Let the running decodes ride in this pass, under the conditions under which SGLang mixes.

    False: they can't, and sit this step out. True: ``running_batch`` is in ``batch`` and must be forgotten.
    """
    if (
        not scheduler.is_mixed_chunk
        or running_batch.is_empty()
        or batch.return_logprob
        or running_batch.return_logprob
        or batch.return_hidden_states
        or running_batch.return_hidden_states
        or any(req.beam_group is not None for req in running_batch.reqs)
    ):
        return False
    ending = scheduler._reqs_finishing_inflight(running_batch)
    running_batch.filter_batch(reqs_to_exclude=ending)
    if ending:
        running_batch.batch_is_full = False
    if running_batch.is_empty() or not running_batch.check_decode_mem():
        return False
    running_batch.prepare_for_decode()
    batch.mix_with_running(running_batch)
    batch.decoding_reqs = running_batch.reqs
    return True


def finish_build(scheduler: Any, batch: ScheduleBatch) -> ScheduleBatch:
    batch = scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
    set_schedule_time_batch(batch)
    return batch


def merge_last(scheduler: Any, middle: Any | None) -> None:
    """Requests of the last pass join the running batch, but for the one that has only passed its middle."""
    last = scheduler.last_batch
    if last is None or not last.forward_mode.is_extend():
        return
    last.filter_batch(reqs_to_exclude=middle)
    if last.is_empty():
        return
    if scheduler.running_batch.is_empty():
        scheduler.running_batch = last
    elif scheduler.running_batch is not last:
        scheduler.running_batch.merge_batch(last)


def count_own_hit(req: Any) -> None:
    """As SGLang does for a batch that is prebuilt: what MD found cached beyond P counts too."""
    if not req.retracted_stain:
        more = max(0, req.prefix_len - req.already_computed)
        req.cached_tokens += more
        req.cached_tokens_device += more


def _by_priority(scheduler: Any, running_batch: ScheduleBatch, queue: Sequence[Landed]) -> Sequence[Landed]:
    if not scheduler.enable_priority_scheduling or len(queue) < 2:
        return queue
    by_req = {landed.req: landed for landed in queue}
    reqs = list(by_req)
    scheduler.policy.calc_priority(reqs, running_batch)
    return [by_req[req] for req in reqs]


def _prepare(part: Part) -> None:
    req = part.req
    count_own_hit(req)
    req.init_next_round_input(None)
    done = req.kv.kv_committed_len
    req.prefix_len, req.extend_end = done, part.end
    # P has counted the cached tokens; and input logprobs are P's, output tokens have none to compute here.
    req.already_computed = done
    req._cache_breakdown_computed = True
    req.logprob_start_len = -1
    if not part.last:
        req.inflight_middle_chunks += 1


def _has_history(req: Any) -> bool:
    """Does sampling depend on the earlier output tokens, beyond the KV?"""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _feed_history(scheduler: Any, batch: ScheduleBatch, req: Any) -> None:
    """SGLang feeds its penalizers one token a decode step; the steps of these tokens were another role's.

    All of them at once: a step for each would keep the scheduler busy for many milliseconds. The batch has one row.

    With overlap scheduling a step is prepared before the one before it is processed, so SGLang feeds each token a step
    late and the prompt's last token first; what a single server samples depends on it.
    """
    fed = [req.origin_input_ids[-1], *req.output_ids[:-1]] if scheduler.enable_overlap else list(req.output_ids)
    tokens = torch.tensor([fed], dtype=torch.int64).to(batch.device, non_blocking=True)
    for kind, penalizer in batch.sampling_info.penalizer_orchestrator.penalizers.items():
        if penalizer.is_prepared():
            _FEED[kind](penalizer, tokens)


def _feed_frequency(penalizer: Any, tokens: torch.Tensor) -> None:
    penalties = penalizer.frequency_penalties.expand(tokens.shape)
    penalizer.cumulated_frequency_penalties.scatter_add_(1, tokens, penalties)


def _feed_presence(penalizer: Any, tokens: torch.Tensor) -> None:
    penalizer.cumulated_presence_penalties.scatter_(1, tokens, penalizer.presence_penalties.expand(tokens.shape))


def _feed_repetition(penalizer: Any, tokens: torch.Tensor) -> None:
    penalizer.cumulated_repetition_penalties.scatter_(1, tokens, penalizer.repetition_penalties.expand(tokens.shape))


def _feed_length(penalizer: Any, tokens: torch.Tensor) -> None:
    penalizer.len_output_tokens += tokens.shape[1]


_FEED = {
    BatchedFrequencyPenalizer: _feed_frequency,
    BatchedPresencePenalizer: _feed_presence,
    BatchedRepetitionPenalizer: _feed_repetition,
    BatchedMinNewTokensPenalizer: _feed_length,
}


# --- hooks ------------------------------------------------------------------------------------------------------


def first_history(original: Any, batch: ScheduleBatch) -> None:
    """Around ``ScheduleBatch.cumulate_penalty_output_tokens``: the first decode step after a prebuilt batch.

    With overlap scheduling a single server feeds the prompt's last token there and P's token in the next step; a stock
    decode server would feed P's token in both.
    """
    fresh = [req for req in batch.reqs if len(req.output_ids) == 1 and req.decode_batch_idx == 0]
    if not fresh or not batch.enable_overlap:
        return original(batch)
    tokens = [req.output_ids.pop() for req in fresh]
    try:
        original(batch)
    finally:
        for req, token in zip(fresh, tokens, strict=True):
            req.output_ids.append(token)
