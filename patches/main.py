"""MD's seam: eager tokens become output at once; when the KV lands, one forward pass catches up with them.

A request's way here: metadata goes out (`opened`), eager tokens come in (`emit`), its KV lands (`landed`). With at most
one token by then, SGLang's own path goes on. With more, the request waits in SGLang's waiting queue until `extend`
has memory for a pass over all of them, and then joins the running batch as after any prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import FINISH_ABORT, NextBatchPlan, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.observability.req_time_stats import set_schedule_time_batch, set_time_batch

from sglang_pdd.actions import Command, Emit, GiveUp
from sglang_pdd.config import PddConfig
from sglang_pdd.main import MAX_EAGER_TOKENS, Main
from sglang_pdd.patches import ingress
from sglang_pdd.patches.logprobs import append_output_logprob


@dataclass(slots=True)
class _Session:
    """A request from its metadata until MD goes on by itself."""

    req: Any
    transfer: Any  # SGLang's DecodeRequest; None once landed
    by: dict[str, int] = field(default_factory=lambda: {"P": 0, "RLD": 0})

    @property
    def gone(self) -> bool:
        """Finished, or aborted and not yet swept."""
        return self.req.finished() or (
            self.transfer is not None
            and (self.transfer.kv_receiver is None or self.transfer.kv_receiver.conclude_state == KVPoll.Failed)
        )


class MainSeam(ingress.Seam):
    def __init__(self, scheduler: Any, config: PddConfig) -> None:
        super().__init__(scheduler, config)
        self._sessions: dict[int, _Session] = {}
        self._credits: dict[str, _Session] = {}  # rid -> who made which tokens, until the answer is complete
        self.machine = Main(self.counters, scheduler.model_config.vocab_size)
        if self.rank == 0:
            self.connect(self.machine, listen=True)

    @property
    def kv_manager(self) -> Any:
        return self.scheduler.disagg_decode_prealloc_queue.kv_manager

    def open_rooms(self) -> int:
        return len(self._sessions)

    def relays(self) -> int:
        return sum(s.by["RLD"] > 0 for s in self._sessions.values())

    def run(self, command: Command) -> None:
        if isinstance(command, Emit):
            self._emit(command)
        elif isinstance(command, GiveUp):
            self._give_up(command.room)

    # --- a request's way ---

    def opened(self, transfer: Any) -> None:
        """The transfer's metadata is out: from now on there may be tokens."""
        req = transfer.req
        if req.bootstrap_host == FAKE_BOOTSTRAP_HOST or transfer.is_rebootstrap or transfer.host_staged:
            return
        if req.return_sampling_mask or req.bootstrap_room in self._sessions:
            return  # the mask of the first token comes with its KV only; a room that is taken is the client's mistake
        session = _Session(req, transfer)
        self._sessions[req.bootstrap_room] = self._credits[req.rid] = session
        if self.node is not None:
            self.node.want(f"{req.bootstrap_host}:{req.bootstrap_port}")
            self.machine.opened(req.bootstrap_room)
        self.timeline.event(
            "opened",
            req.bootstrap_room,
            rid=req.rid,
            prompt_tokens=len(req.origin_input_ids),
            hit=req.kv.cache_protected_len,
        )

    def _emit(self, command: Emit) -> None:
        session = self._sessions.get(command.room)
        paused = self.scheduler._engine_paused  # its weights may change, and RLD's do not
        if session is None or session.gone or paused or len(session.req.output_ids) != command.start:
            self.counters.inc("tokens.wasted", len(command.ids))
            return
        req = session.req
        if command.cached and len(command.cached) >= 4 and command.source == "P":
            _set_cached(req, command.cached)
        if not command.ids:
            return
        for i, token in enumerate(command.ids):
            self._append(req, token, command, i)
            if req.finished():
                break
        taken = len(req.output_ids) - command.start
        session.by[command.source] += taken
        self.counters.inc("tokens.emitted", taken, source=command.source)
        self.timeline.event("emit", command.room, start=command.start, n=taken, source=command.source)
        self.scheduler.output_streamer.stream_output([req], req.return_logprob)
        if req.finished():
            self._finished_early(session)

    def _append(self, req: Any, token: int, command: Emit, i: int) -> None:
        req.output_ids.append(token)
        append_output_logprob(req, token, command.logprobs, i)
        self.scheduler.batch_result_processor._maybe_update_reasoning_tokens(req, token)
        if req.grammar is not None:
            try:
                req.grammar.accept_token(token)
                req.grammar.current_token = token  # SGLang's sign that it must not do so again; not all backends set it
            except ValueError as error:
                message = f"grammar does not accept token {token} of {command.source}: {error}"
                req.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR)
        req.update_finish_state()

    def _finished_early(self, session: _Session) -> None:
        """The answer is complete and MD has not decoded yet."""
        req = session.req
        self.counters.inc("finished_before_landing")
        self._close(req.bootstrap_room, "finished")
        req.time_stats.set_completion_time()
        if session.transfer is None:  # landed, and waiting for memory
            self.scheduler.waiting_queue.remove(req)
            release_kv_cache(req, self.scheduler.tree_cache, checkpoint=True)
            return
        # P may still write into these pages: SGLang holds them until P acknowledges the abort.
        receiver = session.transfer.kv_receiver
        receiver.abort()
        # With its reason taken away SGLang logs the end of this transfer as somebody else's, not as an error.
        receiver.kv_mgr.failure_records.pop(req.bootstrap_room, None)

    def commit(self, original: Callable[..., None], queue: Any, transfer: Any) -> None:
        """The KV is here. SGLang's commit appends the first token; if MD has that already, it must not do so again."""
        req = transfer.req
        session = self._sessions.get(req.bootstrap_room)
        if session is not None and session.transfer is not transfer:
            session = None
        if session is None or not req.output_ids:
            original(queue, transfer)
            if session is not None:
                self._close(req.bootstrap_room, "landed")
            return
        # SGLang can replay the last token of a request that it had paused: it appends it and counts it nowhere.
        transfer.is_rebootstrap = True
        req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        original(queue, transfer)
        session.transfer = None
        accepted = len(req.output_ids)
        self.timeline.event("landed", req.bootstrap_room, n=accepted)
        if req.finished() or accepted < 2:
            self._close(req.bootstrap_room, "landed")

    def swept(self, queue: Any) -> None:
        """Sessions whose transfer SGLang has given up are over."""
        if not self._sessions:
            return
        alive = {id(t) for t in queue.queue}
        for room, session in list(self._sessions.items()):
            if session.transfer is not None and id(session.transfer) not in alive:
                self._close(room, "aborted")

    def _close(self, room: int, why: str) -> None:
        session = self._sessions.pop(room)
        kept = len(session.req.output_ids)
        self.do(self.machine.cut(room, kept, why))
        if why == "landed":
            self.counters.inc("handoff.stock" if kept < 2 else "handoff.extend")
        if why == "aborted":
            self._credits.pop(session.req.rid, None)
        self.timeline.event("closed", room, why=why, n=kept)

    # --- the extend pass ---

    def next_batch(
        self, original: Callable[..., NextBatchPlan], scheduler: Any, running_batch: ScheduleBatch
    ) -> NextBatchPlan:
        """Merge the last extend pass into the running batch; run the next one, if anybody waits for it."""
        last = scheduler.last_batch
        if last is not None and last.forward_mode.is_extend():
            last.filter_batch()
            if not last.is_empty():
                if running_batch.is_empty():
                    running_batch = last
                else:
                    running_batch.merge_batch(last)
        if not self._sessions:
            return original(scheduler, running_batch)
        landed = [s.req for s in self._sessions.values() if s.transfer is None]
        here = set(landed).intersection(scheduler.waiting_queue)
        for req in landed:
            if req not in here:
                self._close(req.bootstrap_room, "aborted")  # SGLang took it out of its queue
        queued = [r for r in scheduler.waiting_queue if r in here]
        if batch := self._extend(scheduler, running_batch, queued):
            return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
        if not queued:
            return original(scheduler, running_batch)
        scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r not in here]
        try:
            return original(scheduler, running_batch)
        finally:
            scheduler.waiting_queue.extend(queued)

    def _extend(self, scheduler: Any, running_batch: ScheduleBatch, queued: list[Any]) -> ScheduleBatch | None:
        fits = self._that_fit(scheduler, running_batch, queued)
        if not fits:
            return None
        for req in fits:
            _prepare(req)
        chosen = set(fits)
        scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r not in chosen]
        set_time_batch(fits, "set_forward_entry_time")
        batch = ScheduleBatch.init_new(
            fits,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_extend()
        if scheduler.enable_overlap:
            # As for SGLang's own prebuilt batches: a finished request's last forward may still use a reused row.
            scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        for req in fits:
            self.counters.inc("handoff.extend_tokens", req.extend_len)
            self.timeline.event("extend", req.bootstrap_room, n=req.extend_len)
            self._close(req.bootstrap_room, "landed")
        batch = scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
        set_schedule_time_batch(batch)
        return batch

    def _that_fit(self, scheduler: Any, running_batch: ScheduleBatch, queued: list[Any]) -> list[Any]:
        """As many as there is memory and batch room for, beside the running batch's next step."""
        if not queued:
            return []
        page = scheduler.token_to_kv_pool_allocator.page_size
        room = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests) - running_batch.batch_size()
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        if not running_batch.is_empty():
            free -= running_batch.new_tokens_required_next_decode()
        fits: list[Any] = []
        tokens = 0
        for req in queued[: max(0, room)]:
            end = len(req.origin_input_ids) + len(req.output_ids)
            # One page more than the pass itself: the next decode step may need it.
            need = (-(-end // page) - -(-req.kv.kv_committed_len // page) + 1) * page
            tokens += end - req.kv.kv_committed_len
            if need > free or (fits and tokens > MAX_EAGER_TOKENS):
                break
            free -= need
            fits.append(req)
        if not fits and self._stuck(scheduler, running_batch, queued):
            self.do(self.machine.stuck(queued[-1].bootstrap_room, time.monotonic()))
        return fits

    def _stuck(self, scheduler: Any, running_batch: ScheduleBatch, queued: list[Any]) -> bool:
        """Nothing runs, lands or drains that could ever free memory. (With retracted requests nothing is let land.)"""
        transfers = scheduler.disagg_decode_transfer_queue
        return (
            running_batch.is_empty()
            and (not transfers.queue or bool(scheduler.disagg_decode_prealloc_queue.retracted_queue))
            and not transfers.has_pending_deferred_releases()
            and len(scheduler.waiting_queue) == len(queued)
        )

    def _give_up(self, room: int) -> None:
        session = self._sessions.get(room)
        if session is None or session.transfer is not None or session.req not in self.scheduler.waiting_queue:
            return
        req = session.req
        message = "the KV pool is too small for this request's prompt and output"
        ingress.logger.error("PDD: %s: %s", req.rid, message)
        req.finished_reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE)
        self._close(req.bootstrap_room, "aborted")
        self.scheduler.waiting_queue.remove(req)
        self.scheduler.output_streamer.stream_output([req], req.return_logprob)
        release_kv_cache(req, self.scheduler.tree_cache, checkpoint=True)

    # --- who made which tokens ---

    def extended(self, reqs: list[Any]) -> None:
        """Results of an extend pass have been processed: MD's own first tokens."""
        for req in reqs:
            if session := self._credits.get(req.rid):
                self.timeline.event("own", req.bootstrap_room, start=sum(session.by.values()))

    def streamed(self, reqs: list[Any]) -> None:
        for req in reqs:
            if req.finished() and (session := self._credits.pop(req.rid, None)):
                own = max(0, len(req.output_ids_through_stop) - sum(session.by.values()))
                self.counters.inc("tokens.emitted", own, source="MD")
                self.timeline.event(
                    "finish",
                    req.bootstrap_room,
                    n=len(req.output_ids_through_stop),
                    reason=req.finished_reason.to_json()["type"],
                    by={**session.by, "MD": own},
                )


def _prepare(req: Any) -> None:
    """Set a landed request up for a forward pass over its output tokens."""
    _count_own_hit(req)
    req.init_next_round_input(None)
    landed = req.kv.kv_committed_len
    req.prefix_len = landed
    req.extend_end = len(req.full_untruncated_fill_ids)
    # P has counted the cached tokens; and input logprobs are P's, output tokens have none to compute here.
    req.already_computed = landed
    req._cache_breakdown_computed = True
    req.logprob_start_len = -1


def _set_cached(req: Any, cached: tuple[int, ...]) -> None:
    req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = cached[:4]
    req.already_computed = req.cached_tokens
    _count_own_hit(req)


def _count_own_hit(req: Any) -> None:
    """As SGLang does for a batch that is prebuilt: what MD found cached beyond P counts too."""
    if not req.retracted_stain:
        more = max(0, req.prefix_len - req.already_computed)
        req.cached_tokens += more
        req.cached_tokens_device += more


# --- hooks ------------------------------------------------------------------------------------------------------


def _seam() -> MainSeam | None:
    return ingress.seam if isinstance(ingress.seam, MainSeam) else None


def metadata_sent(result: Any, queue: Any, decode_req: Any, *args: Any, **kwargs: Any) -> None:
    """After ``DecodePreallocQueue._send_kv_metadata``."""
    if seam := _seam():
        seam.opened(decode_req)


def commit_transfer(original: Callable[..., None], queue: Any, decode_req: Any) -> None:
    """Around ``DecodeTransferQueue._commit_transfer_to_req``."""
    seam = _seam()
    if seam is None:
        return original(queue, decode_req)
    seam.commit(original, queue, decode_req)


def after_transfers(result: Any, queue: Any, *args: Any, **kwargs: Any) -> None:
    """After ``DecodeTransferQueue.pop_transferred``."""
    if seam := _seam():
        seam.swept(queue)


def next_batch(original: Callable[..., NextBatchPlan], scheduler: Any, running_batch: ScheduleBatch) -> NextBatchPlan:
    """Around ``get_next_disagg_decode_batch_to_run``."""
    seam = _seam()
    if seam is None:
        return original(scheduler, running_batch)
    return seam.next_batch(original, scheduler, running_batch)


def extend_processed(result: Any, processor: Any, batch: ScheduleBatch, output: Any) -> None:
    """After ``process_batch_result_prefill``, which on MD sees extend passes only."""
    if seam := _seam():
        seam.extended(batch.reqs)


def abort_sent(result: Any, scheduler: Any, abort_req: Any, req: Any) -> None:
    """After ``Scheduler.send_abort_output``."""
    if seam := _seam():
        seam._credits.pop(req.rid, None)


def output_streamed(result: Any, streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
    """After ``SchedulerOutputStreamer.stream_output``."""
    seam = _seam()
    if seam is not None and seam._credits:
        seam.streamed(reqs)
