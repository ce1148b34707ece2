"""P's seam: a request's way, the first token, the early end of the HTTP response.

What goes to a relay: `fanout.py`. Who waits for whom: `followers.py`. What nobody waits for: `unwanted.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, is_aborted
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.runtime_context import get_parallel

from sglang_pdd.actions import AnswerEarly, Command, Demote, DropRelay, Follow, KnowLandings, OpenRelay
from sglang_pdd.config import PddConfig
from sglang_pdd.drc import hit_bin, waiting_tokens
from sglang_pdd.patches import ingress, lanes, pool, streams
from sglang_pdd.patches.drain import Drain
from sglang_pdd.patches.fanout import Fanout
from sglang_pdd.patches.followers import Followers
from sglang_pdd.patches.logprobs import output_logprobs
from sglang_pdd.patches.sampling import obstacle, request_of
from sglang_pdd.patches.unwanted import Unwanted
from sglang_pdd.prefill import Job, Prefill
from sglang_pdd.protocol import Chunk
from sglang_pdd.wan.sender import Sender
from sglang_pdd.wan.tls import Identity


class PrefillSeam(ingress.Seam):
    def __init__(self, scheduler: Any, config: PddConfig) -> None:
        super().__init__(scheduler, config)
        self._requests: dict[int, Any] = {}  # by room, from MD's metadata to the end of MD's copy
        self._queued: set[int] = set()  # rooms whose last chunk is queued
        self._early: set[int] = set()  # rooms whose client need not wait for the copy
        self._relayed: set[int] = set()  # rooms that have, or have had, a relay
        self._unplanned: set[int] = set()  # rooms whose prefill has not begun
        self._copies = -1
        self._drain = Drain.open()
        self.machine = Prefill(self.counters, config, self._fingerprint)
        self._lanes = lanes.make_lanes(config, self._is_lan, self._sent)
        self._bytes_per_token = (
            self.kv_manager.kv_item_lens_sum / scheduler.token_to_kv_pool_allocator.page_size * get_parallel().tp_size
        )
        self._streams = self._make_streams() if pool.by_stream(scheduler, config) else None
        streams.streams = self._streams
        self.followers = Followers(scheduler, self._requests, self._sessions_of)
        self.unwanted = Unwanted(scheduler, self._streams is not None, self.counters, self.timeline)
        size, ended, waits = self._bytes_per_token, self._copy_ended, self.followers.waits
        self.fanout = Fanout(scheduler, self._lanes, size, self.counters, self.timeline, ended, waits)
        if self.rank == 0:
            self.connect(self.machine, listen=True)

    def _make_streams(self) -> streams.Streams:
        rate, keys = self.config.wan_rate_limit, self.config.keys
        sender = Sender(
            self.node_id,
            pool.memory(self.scheduler, self.kv_manager.kv_args),
            self.counters,
            identity=Identity(keys) if keys else None,
            rate=rate / get_parallel().tp_size if rate else None,
            landed=self._landed,
        )
        return streams.Streams(sender, self.kv_manager)

    @property
    def kv_manager(self) -> Any:
        return self._queue.kv_manager

    @property
    def _queue(self) -> Any:
        return self.scheduler.disagg_prefill_bootstrap_queue

    def open_rooms(self) -> int:
        return len(self.scheduler.disagg_prefill_inflight_queue) + len(self._queue.queue)

    def relays(self) -> int:
        return len(self.fanout)

    def run(self, command: Command) -> None:
        if isinstance(command, AnswerEarly):
            self._answer_early(command.room)
        elif isinstance(command, OpenRelay):
            self._open(command)
        elif isinstance(command, KnowLandings) and self._streams is not None:
            self._streams.know(command.sessions, command.landings)
        elif isinstance(command, Demote):
            self._demote(command)
        elif isinstance(command, Follow):
            self._follow(command)
        elif isinstance(command, DropRelay):
            self.fanout.drop(command.relay_room, command.why)

    # --- a request's way ---

    def bootstrapped(self, req: Any) -> None:
        """MD's metadata is here: what it holds is known, so is where to send the rest."""
        room = req.bootstrap_room
        self._requests[room] = req
        sessions = self._sessions_of(room)
        prompt_tokens = len(req.origin_input_ids)
        missing = prompt_tokens - req.disagg_decode_prefix_len
        leaders = self.followers.leaders(req)
        self.unwanted.rooms -= leaders.keys()
        own, ahead = self._bytes_of_rank(missing), sum(leaders.values())
        together = self._bytes_of_rank(self._together(missing))
        self._unplanned.add(room)
        landing_ms = self._streams.open(room, own, leaders, together) if self._streams is not None else None
        if self._streams is not None and (tokens := waiting_tokens(req.rid)) is not None:
            self._streams.urge(room, self._bytes_of_rank(tokens))
        elsewhere = self.followers.come(room, leaders)
        if self.node is None:
            return
        if landing_ms is None:
            landing_ms = self._lanes.link(sessions).landing_ms(own + self._bytes_of_rank(ahead))
        landing_ms = max(landing_ms, self._landing_ms(room, elsewhere))
        self.timeline.event(
            "bootstrapped",
            room,
            prompt_tokens=prompt_tokens,
            hit=req.disagg_decode_prefix_len,
            missing=missing,
            ahead=ahead,
            elsewhere=elsewhere,
            predicted_ms=round(landing_ms, 1),
        )
        self.do(self.machine.bootstrapped(self._job(req, landing_ms)))

    def planned(self, batch: Any) -> None:
        """What SGLang runs next, or None."""
        self.unwanted.planned(batch)
        if batch is not None and self._unplanned:
            self._unplanned -= {req.bootstrap_room for req in batch.reqs}

    def _together(self, missing: int) -> int:
        """Tokens of others that are prefilled in the same pass as a request that comes now, about."""
        waiting = (self._requests[room] for room in self._unplanned)
        tokens = sum(len(req.origin_input_ids) - req.disagg_decode_prefix_len for req in waiting)
        most = self.scheduler.chunked_prefill_size or self.scheduler.max_prefill_tokens
        return max(0, min(tokens, most - missing))

    def _job(self, req: Any, landing_ms: float) -> Job:
        sessions = self._sessions_of(req.bootstrap_room)
        return Job(req.bootstrap_room, sessions, request_of(req), landing_ms, obstacle(req))

    def _follow(self, command: Follow) -> None:
        """A request waits for others, of which some, or itself, are another prefill's."""
        room = command.room
        for leader, _ in command.leaders:
            if self.followers.is_theirs(leader, command.sessions):
                self.unwanted.rooms.discard(leader)
                if self._streams is not None:
                    self._streams.urge(leader, self._bytes_of_rank(command.own))
        if self.followers.hear(command) and self.node is not None and room not in self._relayed:
            landing_ms = self._landing_ms(room, self.followers.elsewhere(command))
            self.timeline.event("reconsidered", room, predicted_ms=round(landing_ms, 1))
            self.do(self.machine.reconsidered(self._job(self._requests[room], landing_ms)))

    def _landing_ms(self, room: int, tokens: int) -> float:
        """Until so many tokens more would have landed, if they went from here: other prefills' links are not known."""
        if tokens == 0:
            return 0.0
        size = self._bytes_of_rank(tokens)
        by_stream = self._streams.landing_ms(room, size) if self._streams is not None else None
        return self._lanes.link(self._sessions_of(room)).landing_ms(size) if by_stream is None else by_stream

    def _demote(self, command: Demote) -> None:
        """MD's request has ended before its KV landed; or others have come who want that."""
        room = command.room
        if not self.followers.is_theirs(room, command.sessions):
            return
        (self.unwanted.rooms.add if command.demoted else self.unwanted.rooms.discard)(room)
        if self._streams is not None and self._streams.demote(room, command.demoted):
            self.counters.inc("wan.demoted", int(command.demoted))
            self.timeline.event("demoted" if command.demoted else "promoted", room)

    def _bytes_of_rank(self, tokens: int) -> int:
        return int(tokens * self._bytes_per_token / get_parallel().tp_size)

    def prefilled(self, req: Any) -> None:
        """The first token is sampled: it is MD's before any KV is."""
        if self.node is None:
            return
        self._count_hit(req)
        cached = (req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage)
        chunk = Chunk(req.bootstrap_room, 0, (req.output_ids[0],), output_logprobs(req, 0, 1), cached=cached)
        self.do(self.machine.first_token(self._sessions_of(req.bootstrap_room), chunk))
        self.timeline.event("first_token", req.bootstrap_room)

    def _count_hit(self, req: Any) -> None:
        """How well MD's cache keeps up with P's."""
        if waiting_tokens(req.rid) is not None:
            return
        page, tokens = self.scheduler.token_to_kv_pool_allocator.page_size, len(req.origin_input_ids)
        name = hit_bin(req.cached_tokens, (tokens - 1) // page * page)
        self.counters.inc("drc.requests", bin=name)
        self.counters.inc("drc.prompt", tokens, bin=name)
        self.counters.inc("drc.missed", max(0, req.cached_tokens - req.disagg_decode_prefix_len), bin=name)

    def queued(self, req: Any) -> None:
        """The last chunk is on its way: nothing is left for P's client to wait for."""
        self.timeline.event("queued", req.bootstrap_room)
        self._queued.add(req.bootstrap_room)
        self._finish_response(req)

    def _answer_early(self, room: int) -> None:
        if room in self._requests:
            self._early.add(room)
            self._finish_response(self._requests[room])

    def _finish_response(self, req: Any) -> None:
        """All ranks in the same step: what rank 0 knows of MD has come as a command."""
        room = req.bootstrap_room
        if room not in self._early or room not in self._queued or req.finished():
            return
        self._count_copies()  # before the response ends: from then on only this keeps P from exiting
        req.finished_reason = FINISH_LENGTH(length=0)
        self.scheduler.output_streamer.stream_output([req], req.return_logprob)

    def concluded(self, done: list[Any]) -> None:
        """These requests' copies to MD have ended, well or badly."""
        for req in done:
            if self._forget(req.bootstrap_room):
                self.timeline.event("copied", req.bootstrap_room, ok=not is_aborted(req))
            self.fanout.landed(req)
        for room in [room for room, req in self._requests.items() if is_aborted(req)]:
            self._forget(room)
        self._count_copies()
        self.fanout.sweep()

    def _forget(self, room: int) -> bool:
        """False: it was none of ours."""
        self._early.discard(room)
        self._queued.discard(room)
        self.unwanted.rooms.discard(room)
        self.followers.forget(room)
        self._relayed.discard(room)
        self._unplanned.discard(room)
        if self._requests.pop(room, None) is None:
            return False
        self._lanes.forget(room)
        if self._streams is not None:
            self._streams.close(room)
        return True

    def _count_copies(self) -> None:
        copies = len(self.scheduler.disagg_prefill_inflight_queue) + len(self.fanout)
        if self._drain is not None and copies != self._copies:
            self._copies = copies
            self._drain.set(copies, self.rank)

    def released(self, req: Any) -> None:
        """SGLang has aborted this request before it was in flight."""
        self._forget(req.bootstrap_room)

    def _open(self, command: OpenRelay) -> None:
        req = self._requests.get(command.room)
        if req is None:
            self._copy_ended(command.relay_room, "aborted")
        else:
            self._relayed.add(command.room)
            self.fanout.open(req, command.relay_room)

    def _copy_ended(self, relay_room: int, why: str | None) -> None:
        self.do(self.machine.copied(relay_room) if why is None else self.machine.gave_up(relay_room, why))

    # --- peers ---

    def _sessions_of(self, room: int) -> tuple[str, ...]:
        """Sorted: SGLang has them in the order in which they came."""
        return tuple(sorted(self.kv_manager.transfer_infos.get(room, ())))

    def _is_lan(self, session: str) -> bool:
        return session in self.fanout.sessions

    def _landed(self, name: int, size: int, seconds: float) -> None:
        assert self._streams is not None
        self._sent(self._streams.room(name), size, seconds)

    def _sent(self, room: int | None, size: int, seconds: float) -> None:
        """``room``: None if it is over meanwhile."""
        size *= get_parallel().tp_size  # each rank sends as much, rank 0 counts
        self.counters.inc("wan.bytes", size)
        if room is not None:
            self.timeline.event("wan_sent", room, bytes=size, seconds=round(seconds, 4))


# --- hooks ------------------------------------------------------------------------------------------------------


def _seam() -> PrefillSeam | None:
    return ingress.seam if isinstance(ingress.seam, PrefillSeam) else None


def keep_sampling(queue: Any, req: Any) -> None:
    """Before ``PrefillBootstrapQueue._process_req`` sets max_new_tokens to 1: keep what was asked for."""
    req.pdd_sampling = copy.copy(req.sampling_params)


def after_bootstrap(done: bool, queue: Any, req: Any) -> None:
    """After ``PrefillBootstrapQueue.finalize_bootstrap``."""
    if done and (seam := _seam()) and req.bootstrap_host != FAKE_BOOTSTRAP_HOST:
        seam.bootstrapped(req)


def after_planning(plan: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``get_next_disagg_prefill_batch_to_run``."""
    if seam := _seam():
        seam.planned(plan.batch_to_run)


def send_kv_chunk(
    original: Callable[..., None], scheduler: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None
) -> None:
    """Around ``_send_kv_chunk``: the first token first, then MD's copy, then the relay's."""
    seam = _seam()
    if seam is None or req.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        return original(scheduler, req, last_chunk, end_idx)
    if last_chunk:
        seam.prefilled(req)
    end = end_idx if end_idx is not None else min(req.extend_end, len(req.origin_input_ids))
    written = req.disagg_kv_sender._early_send_wait_event  # taken by the send
    original(scheduler, req, last_chunk, end_idx)
    seam.fanout.computed(original, req, end, last_chunk, written)
    if last_chunk:
        seam.queued(req)


def inflight_queue(
    original: Callable[..., list[Any]], scheduler: Any, rids_to_check: list[str] | None = None
) -> list[Any]:
    """Around ``process_disagg_prefill_inflight_queue``: once a step, also when it is empty."""
    seam = _seam()
    if seam is None:
        return original(scheduler, rids_to_check)
    seam.unwanted.make_room()
    seam.fanout.pump(_stock_send)
    with seam.fanout.keeping():
        done = original(scheduler, rids_to_check)
    seam.concluded(done)
    return done


def aborted_released(result: None, scheduler: Any, req: Any) -> None:
    """After ``Scheduler._release_aborted_request``."""
    if seam := _seam():
        seam.released(req)


def _stock_send(scheduler: Any, req: Any, last_chunk: bool, end_idx: int | None) -> None:
    """SGLang's ``_send_kv_chunk`` without our hook."""
    type(scheduler)._send_kv_chunk.__wrapped__(scheduler, req, last_chunk, end_idx)
