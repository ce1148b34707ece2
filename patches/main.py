"""MD's seam: eager tokens become output at once; when the KV lands, one forward pass catches up with them.

A request's way here: metadata goes out (`opened`), eager tokens come in (`_emit`), its KV lands (`commit`). With at
most one token by then, SGLang's own path goes on. With more, it is taken over by extend passes (`passes.py`), until the
last of which tokens go on coming in.
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

from sglang_pdd.actions import Command, Emit, GiveUp
from sglang_pdd.config import MAX_PASS, PddConfig
from sglang_pdd.main import Main
from sglang_pdd.patches import extend, ingress, pool
from sglang_pdd.patches.landing import Landings, listen
from sglang_pdd.patches.late import Late
from sglang_pdd.patches.logprobs import append_output_logprob
from sglang_pdd.patches.passes import Passes
from sglang_pdd.patches.prefixes import Prefixes
from sglang_pdd.protocol import Message

BUSY = 50  # percent of its relays, from which on a relay is handed over from in one shot


@dataclass(slots=True)
class _Session:
    """A request from its metadata until MD goes on by itself."""

    req: Any
    transfer: Any  # SGLang's DecodeRequest; None once landed
    by: dict[str, int] = field(default_factory=lambda: {"P": 0, "RLD": 0})
    load: int = 0  # percent of its relays that RLD has in use
    mode: str = "stock"  # how it is taken over

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
        self.passes = Passes(scheduler, self.counters, self.timeline, self._close, self._stuck)
        self.landings: Landings | None = None
        if pool.by_stream(scheduler, config):
            memory = pool.memory(scheduler, self.kv_manager.kv_args)
            receiver, place = listen(memory, config, self.rank, self.counters)
            self.landings = Landings(receiver)
            self._places = ingress.all_ranks(place)
        self.machine = Main(self.counters, scheduler.model_config.vocab_size)
        ignore, tell = self.machine.ignore, self._tell
        self.prefixes = Prefixes(scheduler, self.counters, self.timeline, self.landings, ignore, tell)
        self.late = Late(scheduler, self.prefixes, self._client_gone, self._tell)
        if self.rank == 0:
            self.connect(self.machine, listen=True)

    @property
    def kv_manager(self) -> Any:
        return self.scheduler.disagg_decode_prealloc_queue.kv_manager

    def open_rooms(self) -> int:
        return len(self._sessions) + len(self.late) + len(self.prefixes.refetches)

    def _written(self, room: int) -> None:
        """Nothing is to be written for this room any more."""
        if self.landings is not None:
            self.landings.end(room)

    def relays(self) -> int:
        return sum(s.by["RLD"] > 0 for s in self._sessions.values())

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pending": len(self.prefixes.cache.pending)}

    def run(self, command: Command) -> None:
        if isinstance(command, Emit):
            self._emit(command)
        elif isinstance(command, GiveUp):
            self.passes.give_up(command.room)

    # --- a request's way ---

    def opened(self, transfer: Any, hit: int) -> None:
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
            hit=hit,
        )

    def _emit(self, command: Emit) -> None:
        session = self._sessions.get(command.room)
        paused = self.scheduler._engine_paused  # its weights may change, and RLD's do not
        if session is None or session.gone or paused or len(session.req.output_ids) != command.start:
            self.counters.inc("tokens.wasted", len(command.ids))
            return
        req = session.req
        if command.load is not None:
            session.load = command.load
        if command.cached and len(command.cached) >= 4 and command.source == "P":
            _set_cached(req, command.cached)
        if not command.ids:
            return
        for i, token in enumerate(command.ids):
            if not self._append(req, token, command, i):
                self.counters.inc("tokens.mismatch")
                break  # and with it whatever follows: the answer goes on once its KV is here
            if req.finished():
                break
        taken = len(req.output_ids) - command.start
        session.by[command.source] += taken
        self.counters.inc("tokens.emitted", taken, source=command.source)
        self.timeline.event("emit", command.room, start=command.start, n=taken, source=command.source)
        self.scheduler.output_streamer.stream_output([req], req.return_logprob)
        if req.finished():
            self._finished_early(session)

    def _append(self, req: Any, token: int, command: Emit, i: int) -> bool:
        """False: the grammar does not accept this token of a relay's."""
        grammar = req.grammar
        ended = grammar is not None and grammar.is_terminated()
        if grammar is not None:
            try:
                grammar.accept_token(token)
                grammar.current_token = token  # SGLang's sign that it must not do so again; not all backends set it
            except Exception as error:  # each backend raises its own
                message = f"grammar does not accept token {token} of {command.source}: {error}"
                ingress.logger.error("PDD: %s: %s", req.rid, message)
                if command.source != "P":
                    return False
                req.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR)
        req.output_ids.append(token)
        append_output_logprob(req, token, command.logprobs, i)
        self.scheduler.batch_result_processor._maybe_update_reasoning_tokens(req, token)
        # SGLang looks for the end of a grammar before it accepts the token.
        req.grammar = grammar if ended else None
        req.update_finish_state()
        req.grammar = grammar
        return True

    def _finished_early(self, session: _Session) -> None:
        """The answer is complete and MD has not decoded yet."""
        req = session.req
        self.counters.inc("finished_before_landing")
        self._close(req.bootstrap_room, "finished")
        req.time_stats.set_completion_time()
        if session.transfer is None:  # landed
            self.passes.finished(req)
        else:
            self.late.keep(session.transfer)

    def _tell(self, req: Any, message: Message) -> None:
        """Say this to the prefill of a request."""
        if self.node is not None:
            self.node.tell(f"{req.bootstrap_host}:{req.bootstrap_port}", message)

    def _client_gone(self, transfer: Any) -> None:
        room = transfer.req.bootstrap_room
        if (session := self._sessions.get(room)) and session.transfer is transfer:
            self._close(room, "aborted")

    def commit(self, original: Callable[..., None], queue: Any, transfer: Any) -> None:
        """The KV is here. SGLang's commit appends the first token; if MD has that already, it must not do so again."""
        req = transfer.req
        self._written(req.bootstrap_room)
        if req.finished():  # SGLang lets go of it; its prompt stays in the tree
            transfer.kv_receiver.clear()
            transfer.kv_receiver = None
            return
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
            return
        session.mode = self.config.handoff
        if session.mode == "auto":
            session.mode = "one-shot" if session.load >= BUSY else "catch-up"
        self.passes.add(req, self.config.handoff_threshold if session.mode == "catch-up" else MAX_PASS)

    def after_transfers(self, queue: Any, landed: list[Any]) -> list[Any]:
        """SGLang has looked at its transfers. Returns whose requests go on."""
        self._sweep(queue)
        self.prefixes.refetches.pump()
        ended = [req for req in landed if req.finished()]
        for req in ended:
            self.counters.inc("drc.kept")
            self.timeline.event("kept", req.bootstrap_room)
            release_kv_cache(req, self.scheduler.tree_cache, checkpoint=True)
        return [req for req in landed if not req.finished()] if ended else landed

    def _sweep(self, queue: Any) -> None:
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
            self.counters.inc("handoffs", mode=session.mode)
        if why == "aborted":
            self._credits.pop(session.req.rid, None)
        self.timeline.event("closed", room, why=why, n=kept)

    # --- the extend passes ---

    def begin_step(self) -> None:
        """Requests have been received, nothing else has happened yet in this step."""
        if len(self.late) or len(self.prefixes.refetches):
            self.late.step(short=self.passes.short)
        self.passes.begin_step()

    def _stuck(self, room: int) -> None:
        if not len(self.prefixes.refetches):
            self.do(self.machine.stuck(room, time.monotonic()))

    # --- who made which tokens ---

    def extended(self, batch: ScheduleBatch) -> None:
        """Results of an extend pass have been processed: MD has tokens of its own."""
        self.passes.processed()
        riding = set(batch.decoding_reqs or ())
        for req in batch.reqs:
            session = self._credits.get(req.rid)
            if session and req.bootstrap_room not in self._sessions and req not in riding:
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


def _set_cached(req: Any, cached: tuple[int, ...]) -> None:
    req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = cached[:4]
    req.already_computed = req.cached_tokens
    extend.count_own_hit(req)


# --- hooks ------------------------------------------------------------------------------------------------------


def _seam() -> MainSeam | None:
    return ingress.seam if isinstance(ingress.seam, MainSeam) else None


def send_metadata(original: Callable[..., None], queue: Any, decode_req: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``DecodePreallocQueue._send_kv_metadata``."""
    seam = _seam()
    if seam is not None:
        seam.prefixes.admitted(decode_req, kwargs["decode_prefix_len"])
    original(queue, decode_req, *args, **kwargs)
    if seam is not None:
        seam.opened(decode_req, kwargs["decode_prefix_len"])


def before_admission(queue: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``DecodePreallocQueue.pop_preallocated``."""
    if seam := _seam():
        seam.prefixes.refetches.ask()


def poll_transfers(original: Callable[..., list[int]], queue: Any) -> list[int]:
    """Around ``DecodeTransferQueue._poll_with_metadata_gate``."""
    polls, seam = original(queue), _seam()
    if seam is None:
        return polls
    seam.late.hush(polls)
    return seam.prefixes.polled(polls)


def release_request(original: Callable[..., None], queue: Any, decode_req: Any) -> None:
    """Around ``DecodeTransferQueue._release_request``: whatever the reason, even a time-out of SGLang's."""
    seam = _seam()
    if seam is not None:
        seam._written(decode_req.req.bootstrap_room)
    original(queue, decode_req)
    if seam is not None:
        seam.prefixes.released(decode_req)


def commit_transfer(original: Callable[..., None], queue: Any, decode_req: Any) -> None:
    """Around ``DecodeTransferQueue._commit_transfer_to_req``."""
    seam = _seam()
    if seam is None:
        return original(queue, decode_req)
    seam.commit(original, queue, decode_req)


def after_transfers(result: list[Any], queue: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """After ``DecodeTransferQueue.pop_transferred``."""
    seam = _seam()
    return result if seam is None else seam.after_transfers(queue, result)


def is_idle(idle: bool, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """After ``Scheduler.is_fully_idle``: a flush must not give pages away that are being fetched again."""
    seam = _seam()
    return idle and (seam is None or not len(seam.prefixes.refetches))


def step_begins(scheduler: Any) -> None:
    """Before ``process_decode_queue``: before SGLang judges how much memory the running batch needs."""
    if seam := _seam():
        seam.begin_step()


def next_batch(original: Callable[..., NextBatchPlan], scheduler: Any, running_batch: ScheduleBatch) -> NextBatchPlan:
    """Around ``get_next_disagg_decode_batch_to_run``."""
    seam = _seam()
    if seam is None:
        return original(scheduler, running_batch)
    return seam.passes.next_batch(original, running_batch)


def extend_processed(result: Any, processor: Any, batch: ScheduleBatch, output: Any) -> None:
    """After ``process_batch_result_prefill``, which on MD sees extend passes only."""
    if seam := _seam():
        seam.extended(batch)


def abort_sent(result: Any, scheduler: Any, abort_req: Any, req: Any) -> None:
    """After ``Scheduler.send_abort_output``."""
    if seam := _seam():
        seam._credits.pop(req.rid, None)


def output_streamed(result: Any, streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
    """After ``SchedulerOutputStreamer.stream_output``."""
    seam = _seam()
    if seam is not None and seam._credits:
        seam.streamed(reqs)
