"""RLD's seam: requests come from P instead of HTTP, tokens go to MD instead of a detokenizer.

Everything between is a stock decode server.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_pdd.actions import Command, StartDecode, StopDecode
from sglang_pdd.config import PddConfig
from sglang_pdd.patches import ingress
from sglang_pdd.patches.drain import Drain
from sglang_pdd.patches.logprobs import output_logprobs
from sglang_pdd.patches.sampling import sampling_from_wire
from sglang_pdd.protocol import Chunk
from sglang_pdd.relay import Relay

DEFAULT_RELAYS = 64  # at most, where the pool is large


class RelaySeam(ingress.Seam):
    def __init__(self, scheduler: Any, config: PddConfig) -> None:
        super().__init__(scheduler, config)
        self._rooms: dict[str, int] = {}  # rid -> relay room
        capacity = min(config.max_relays or DEFAULT_RELAYS, scheduler.max_running_requests)
        self._drain = Drain.open()
        pool = scheduler.max_total_num_tokens
        self.machine = Relay(self.counters, capacity, pool, self.trusted, self._draining)
        if self.rank == 0:
            self.connect(self.machine, listen=False, capacity=lambda: self.machine.capacity)

    @property
    def kv_manager(self) -> Any:
        return self.scheduler.disagg_decode_prealloc_queue.kv_manager

    def open_rooms(self) -> int:
        return len(self._rooms)

    def relays(self) -> int:
        return len(self.machine)

    def _draining(self) -> bool:
        return self._drain is not None and self._drain.begun

    def _count(self) -> None:
        """Tell the launcher how many relays it must wait for when it is to end."""
        if self._drain is not None:
            self._drain.set(len(self._rooms), self.rank)

    def run(self, command: Command) -> None:
        if isinstance(command, StartDecode):
            self._start(command)
        elif isinstance(command, StopDecode):
            self.timeline.event("relay_stop", command.relay_room, why=command.why)
            self.scheduler.abort_request(AbortReq(rid=relay_rid(command.relay_room)))

    def _start(self, command: StartDecode) -> None:
        request = command.request
        host, _, port = command.bootstrap.rpartition(":")
        try:
            sampling = sampling_from_wire(dict(request.sampling))
            sampling.verify(self.scheduler.model_config.vocab_size)
            if max((*request.prompt, *request.named_ids)) >= self.scheduler.model_config.vocab_size:
                raise ValueError("a token is not in the vocabulary")
        except Exception as error:  # msgspec raises kinds of its own
            self.counters.inc("relay.refused", reason="malformed")
            ingress.logger.error("PDD: cannot start relay %d: %s", command.relay_room, error)
            self.do(self.machine.ended(command.relay_room))
            return
        rid = relay_rid(command.relay_room)
        self._rooms[rid] = command.relay_room
        self._count()
        self.timeline.event("relay_start", command.relay_room, prompt_tokens=len(request.prompt))
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text="",
                input_ids=array("q", request.prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=request.return_logprob,
                logprob_start_len=-1,
                top_logprobs_num=request.top_logprobs,
                token_ids_logprob=list(request.named_ids) or None,
                custom_logit_processor=request.logit_processor or None,
                require_reasoning=request.reasoning,
                extra_key=request.extra_key or None,
                cache_salt=request.cache_salt or None,
                stream=True,
                bootstrap_host=host,
                bootstrap_port=int(port),
                bootstrap_room=command.relay_room,
            )
        )

    def streamed(self, reqs: list[Any], skip_req: Any) -> list[Any]:
        """Take relayed requests out of an output batch; their new tokens go to MD. Returns the others."""
        others, chunks, ended = [], [], []
        for req in reqs:
            relay_room = self._rooms.get(req.rid)
            if relay_room is None:
                others.append(req)
                continue
            if req is skip_req or (req.finished() and req.finished_output):
                continue
            if chunk := self._chunk(req, relay_room):
                chunks.append(chunk)
            if req.finished():
                req.finished_output = True
                ended.append(req.rid)
        if chunks and self.node is not None:
            self.do(self.machine.produced(chunks))
        for rid in ended:
            self.ended(rid)
        return others

    def ended(self, rid: str) -> bool:
        """The engine has let go of a request. False: it was not a relay's."""
        relay_room = self._rooms.pop(rid, None)
        if relay_room is None:
            return False
        self._count()
        self.timeline.event("relay_end", relay_room)
        self.do(self.machine.ended(relay_room))
        return True

    def _chunk(self, req: Any, relay_room: int) -> Chunk | None:
        finished = None
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            finished = req.finished_reason.to_json()["type"]
        ids = req.output_ids_through_stop
        start = req.send_token_offset
        if isinstance(req.finished_reason, FINISH_ABORT) or (len(ids) == start and not finished):
            return None
        if start == 0 and ids:
            self.timeline.event("relay_landed", relay_room)
        req.send_token_offset = len(ids)
        self.timeline.event("relay_token", relay_room, start=start, n=len(ids) - start)
        return Chunk(relay_room, start, tuple(ids[start:]), output_logprobs(req, start, len(ids)), finished)


def relay_rid(relay_room: int) -> str:
    """Fixed width: SGLang aborts by prefix of the rid, so none may be another's prefix."""
    return f"pdd-relay-{relay_room:019d}"


# --- hooks ------------------------------------------------------------------------------------------------------


def _seam() -> RelaySeam | None:
    return ingress.seam if isinstance(ingress.seam, RelaySeam) else None


def stream_output(
    original: Callable[..., None], streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None
) -> None:
    """Around ``SchedulerOutputStreamer.stream_output``."""
    seam = _seam()
    if seam is not None and seam.open_rooms():
        others = seam.streamed(reqs, skip_req)
        if len(others) < len(reqs):
            if not others:
                return
            return_logprob = any(req.return_logprob for req in others)
        reqs = others
    original(streamer, reqs, return_logprob, skip_req)


def abort_output(original: Callable[..., None], scheduler: Any, abort_req: AbortReq, req: Any) -> None:
    """Around ``Scheduler.send_abort_output``: nobody waits for a relay's."""
    seam = _seam()
    if seam is None or not seam.ended(req.rid):
        original(scheduler, abort_req, req)
