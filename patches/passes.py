"""MD's extend passes: who has landed catches up with the tokens that others have made, and joins the running batch.

A request waits in SGLang's waiting queue until there is memory for a pass over its tokens (`extend.py`). A pass that
does not reach the last token is like a middle chunk of a chunked prefill: tokens go on coming in, and the request waits
for its next pass. The last pass samples, and the request joins the running batch as after any prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, NextBatchPlan, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_pdd.config import MAX_PASS
from sglang_pdd.metrics import Counters
from sglang_pdd.patches import extend, ingress
from sglang_pdd.timeline import Timeline


@dataclass(slots=True)
class Takeover:
    """A request from its landing until its last pass is built."""

    req: Any
    step: int  # tokens that one extend pass may recompute
    left: int | None = None  # tokens that its last pass has left over
    apart: bool = False  # the running decodes sat that pass out

    @property
    def rest(self) -> int:
        """Tokens whose KV is missing."""
        return len(self.req.origin_input_ids) + len(self.req.output_ids) - self.req.kv.kv_committed_len

    def aim(self) -> None:
        """Take larger steps if a relay is half as fast as the passes, or if decodes have to sit the passes out."""
        if self.left is not None and (self.apart or self.rest - self.left > self.step // 2):
            self.step = min(MAX_PASS, 2 * self.step)
        self.left = None


class Passes:
    """All requests that are being taken over. Its methods are called on all ranks, in the same step.

    Args:
        close: called with a room whose takeover is over, and why: "landed", the last pass is built; "aborted".
        stuck: called, every so often, with a room that waits for memory which nothing of SGLang's will ever free.
    """

    def __init__(
        self,
        scheduler: Any,
        counters: Counters,
        timeline: Timeline,
        close: Callable[[int, str], None],
        stuck: Callable[[int], None],
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._timeline = timeline
        self._close = close
        self._stuck = stuck
        self._takeovers: dict[int, Takeover] = {}  # by room, in the order of their landing
        self._middle: Any = None  # the request that the last pass did not bring to its last token
        self._leaving: list[Any] = []  # finished while a pass over them was in flight
        self._passed = False  # the last step was an extend pass
        self._sat_out = False  # and the running decodes were not in it
        self.short = False  # there was no memory for one

    # --- a request's way ---

    def add(self, req: Any, step: int) -> None:
        """It has landed and is in SGLang's waiting queue, or about to be."""
        self._takeovers[req.bootstrap_room] = Takeover(req, step)

    def finished(self, req: Any) -> None:
        """Its answer is complete before its last pass."""
        del self._takeovers[req.bootstrap_room]
        if req is self._middle:
            self._middle = None
        else:
            self._scheduler.waiting_queue.remove(req)
        self._leave(req)

    def give_up(self, room: int) -> None:
        """It can never go on."""
        takeover = self._takeovers.get(room)
        if takeover is None or takeover.req not in self._scheduler.waiting_queue:
            return
        req = takeover.req
        message = "the KV pool is too small for this request's prompt and output"
        ingress.logger.error("PDD: %s: %s", req.rid, message)
        req.finished_reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE)
        self._end(req, "aborted")
        self._scheduler.waiting_queue.remove(req)
        self._scheduler.output_streamer.stream_output([req], req.return_logprob)
        release_kv_cache(req, self._scheduler.tree_cache, checkpoint=True)

    def _end(self, req: Any, why: str) -> None:
        del self._takeovers[req.bootstrap_room]
        self._close(req.bootstrap_room, why)

    def _leave(self, req: Any) -> None:
        """Give a finished request's KV back, as soon as no pass writes it any more."""
        if req.inflight_middle_chunks > 0:
            self._leaving.append(req)
        else:
            release_kv_cache(req, self._scheduler.tree_cache, checkpoint=True)

    # --- a step ---

    def begin_step(self) -> None:
        """Requests have been received, nothing else has happened yet in this step."""
        scheduler, req = self._scheduler, self._middle
        extend.merge_last(scheduler, req)
        self._middle = None
        if req is not None and req.kv.holds_kv and not req.is_retracted:
            if req.to_finish is not None:  # aborted while the pass was in flight
                req.update_finish_state()
                req.time_stats.set_completion_time()
                self._end(req, "aborted")
                scheduler.output_streamer.stream_output([req], req.return_logprob)
                self._leave(req)
            else:
                scheduler.waiting_queue.insert(0, req)

    def next_batch(self, original: Callable[..., NextBatchPlan], running_batch: ScheduleBatch) -> NextBatchPlan:
        """Run an extend pass if anybody waits for one; else what SGLang would run without those who wait."""
        scheduler = self._scheduler
        passed, self._passed = self._passed, False
        if not self._takeovers:
            self.short = False
            return original(scheduler, running_batch)
        waiting = set(scheduler.waiting_queue)
        for req in [t.req for t in self._takeovers.values() if t.req not in waiting]:
            self._end(req, "aborted")  # SGLang took it out of its queue
        queue = list(self._takeovers.values())
        # After a pass it is the turn of those who sat it out, and of whoever else wants to get in.
        others = len(scheduler.waiting_queue) > len(queue) or scheduler.grammar_manager.has_waiting_grammars()
        turn = not passed or not (others or (self._sat_out and not running_batch.is_empty()))
        if turn:
            for takeover in queue:
                takeover.aim()
        if turn and (parts := extend.plan(scheduler, running_batch, queue)):
            self.short = False
            return self._extend(running_batch, parts)
        if turn:
            self.short = bool(queue) and extend.batch_room(scheduler, running_batch) > 0
        if turn and queue and self._nothing_frees(running_batch):
            self._stuck(queue[-1].req.bootstrap_room)
        here = {t.req for t in queue}
        scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r not in here]
        try:
            return original(scheduler, running_batch)
        finally:
            scheduler.waiting_queue.extend(t.req for t in queue)

    def processed(self) -> None:
        """A pass's results have been processed: what waited for that can go."""
        for left in [r for r in self._leaving if r.inflight_middle_chunks == 0]:
            self._leaving.remove(left)
            self._leave(left)

    def _extend(self, running_batch: ScheduleBatch, parts: list[extend.Part]) -> NextBatchPlan:
        scheduler = self._scheduler
        batch = extend.build(scheduler, parts)
        for part in parts:
            self._counters.inc("handoff.tokens", part.req.extend_len)
            self._timeline.event("extend", part.req.bootstrap_room, n=part.req.extend_len, last=part.last)
            if part.last:
                self._end(part.req, "landed")
            else:
                self._middle = part.req
        self._passed, self._sat_out = True, not extend.mix(scheduler, batch, running_batch)
        self._counters.inc("handoff.passes", kind="own" if self._sat_out else "mixed")
        if self._middle is not None:
            takeover = self._takeovers[self._middle.bootstrap_room]
            takeover.left, takeover.apart = takeover.rest, self._sat_out
        if not self._sat_out:
            running_batch = ScheduleBatch(reqs=[], batch_is_full=running_batch.batch_is_full)
        return NextBatchPlan(batch_to_run=extend.finish_build(scheduler, batch), running_batch=running_batch)

    def _nothing_frees(self, running_batch: ScheduleBatch) -> bool:
        """Nothing runs, lands or drains that could ever free memory. (With retracted requests nothing is let land.)"""
        scheduler = self._scheduler
        transfers = scheduler.disagg_decode_transfer_queue
        return (
            running_batch.is_empty()
            and not self._leaving
            and (not transfers.queue or bool(scheduler.disagg_decode_prealloc_queue.retracted_queue))
            and not transfers.has_pending_deferred_releases()
            and len(scheduler.waiting_queue) == len(self._takeovers)
        )
