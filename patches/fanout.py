"""P's second copies: what goes to a relay.

A relay is a second stock sender for the same request, under a room of its own. It gets what the first sender gets, as
soon as RLD is ready for it, from wherever RLD's own cache ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, get_kv_class, poll_and_all_reduce_attn_cp_tp_group

from sglang_pdd.metrics import Counters
from sglang_pdd.patches.lanes import Lanes
from sglang_pdd.timeline import Timeline

LATE = 60.0  # seconds after which nothing more is expected for a relay that has ended


@dataclass(slots=True)
class _Relay:
    """The second copy of one request."""

    req: Any
    room: int
    relay_room: int
    sender: Any
    primary: Any  # the request's own sender
    ready: bool = False  # RLD's metadata has come
    sent: int = 0  # tokens handed to the sender, counted from the start of the prompt
    prefix: int = 0  # tokens that RLD had cached
    computed: int = 0  # tokens whose KV exists
    complete: bool = False  # the last chunk exists
    queued_last: bool = False
    kept: bool = False  # the request's own copy may be over, its pages are kept
    metadata: int = -1
    written: Any = None  # event after which the KV up to ``computed`` can be read; None: already


class Fanout:
    """All second copies of this P. Its methods are called on all ranks, in the same step.

    Args:
        bytes_per_token: of KV, on all ranks together.
        lanes: what SGLang's engine has to send, also to relays.
        ended: called with a relay's room when its copy is over of itself, and why it was given up (None: complete).
        waits: does a request wait at MD for more than its own copy?
    """

    def __init__(
        self,
        scheduler: Any,
        lanes: Lanes,
        bytes_per_token: float,
        counters: Counters,
        timeline: Timeline,
        ended: Callable[[int, str | None], None],
        waits: Callable[[Any], bool],
    ) -> None:
        self._scheduler = scheduler
        self._lanes = lanes
        self._bytes_per_token = bytes_per_token
        self._counters = counters
        self._timeline = timeline
        self._ended = ended
        self._waits = waits
        self._relays: dict[int, _Relay] = {}
        self._over: deque[tuple[float, int]] = deque()  # relay rooms that are over, and since when
        self.sessions: set[str] = set()  # relays' engines

    def __len__(self) -> int:
        return len(self._relays)

    @property
    def _queue(self) -> Any:
        return self._scheduler.disagg_prefill_bootstrap_queue

    @property
    def _manager(self) -> Any:
        return self._queue.kv_manager

    @property
    def _slots(self) -> Any:
        return self._scheduler.req_to_metadata_buffer_idx_allocator

    # --- what the seam says ---

    def open(self, req: Any, relay_room: int) -> None:
        """Begin a request's second copy; whatever there was under this room ends."""
        self.drop(relay_room, "room taken")
        sender = get_kv_class(self._queue.transfer_backend, KVClassType.SENDER)(
            mgr=self._manager,
            bootstrap_addr=f"{req.bootstrap_host}:{self._queue.bootstrap_port}",
            bootstrap_room=relay_room,
            req_has_disagg_prefill_dp_rank=True,
        )
        relay = _Relay(req, req.bootstrap_room, relay_room, sender, req.disagg_kv_sender)
        if req.output_ids:  # prefill was faster than the decision
            relay.computed, relay.complete = len(req.origin_input_ids), True
        elif not req.pending_bootstrap:
            relay.computed = req.start_send_idx if req.start_send_idx > req.disagg_decode_prefix_len else 0
        self._relays[relay_room] = relay
        self._timeline.event("relay_open", req.bootstrap_room, relay_room=relay_room)

    def drop(self, relay_room: int, why: str) -> None:
        """End this copy, if there is one."""
        if (relay := self._relays.get(relay_room)) is not None:
            self._end(relay, "relay_dropped", why=why)

    def computed(self, original: Callable[..., None], req: Any, end: int, complete: bool, written: Any) -> None:
        """KV exists up to ``end``, or will once the event ``written`` has come to pass."""
        for relay in self._relays.values():
            if relay.req is req:
                relay.computed, relay.complete, relay.written = end, complete, written
                self._send(original, relay)

    def landed(self, req: Any) -> None:
        """Its copy to MD has ended. In this very step: its pages are free, and RLD must not take what comes from them
        for good."""
        for relay in [r for r in self._relays.values() if r.req is req]:
            self._give_up(relay, "landed")

    def pump(self, original: Callable[..., None]) -> None:
        """Each step: what has changed with the relays? All ranks agree."""
        if not self._relays:
            return
        relays = list(self._relays.values())
        polls = poll_and_all_reduce_attn_cp_tp_group(
            [sender for relay in relays for sender in (relay.sender, relay.primary)],
            self._scheduler.attn_cp_cpu_group,
            self._scheduler.attn_tp_cpu_group,
        )
        for relay, copy_poll, primary_poll in zip(relays, polls[::2], polls[1::2], strict=True):
            relay.kept = primary_poll != KVPoll.Failed and self._waits(relay.req)
            if copy_poll == KVPoll.Success:
                size = (len(relay.req.origin_input_ids) - relay.prefix) * self._bytes_per_token
                self._counters.inc("lan.bytes", int(size))
                self._end(relay, "relay_copied", bytes=int(size))
                self._ended(relay.relay_room, None)
            elif copy_poll == KVPoll.Failed:
                self._give_up(relay, "copy_failed")
            elif primary_poll == KVPoll.Failed:
                self._give_up(relay, "aborted")
            elif primary_poll == KVPoll.Success and not relay.kept:
                self._give_up(relay, "landed")
            elif copy_poll == KVPoll.WaitingForInput and not relay.ready:
                self._ready(original, relay)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """While SGLang ends requests whose copies to MD are complete: it does not see those whose pages relays want."""
        kept = {id(relay.req) for relay in self._relays.values() if relay.kept}
        queue, stays = self._scheduler.disagg_prefill_inflight_queue, []
        if kept:
            stays = [req for req in queue if id(req) in kept]
            self._scheduler.disagg_prefill_inflight_queue = [req for req in queue if id(req) not in kept]
        try:
            yield
        finally:
            if stays:
                self._scheduler.disagg_prefill_inflight_queue[:0] = stays

    def sweep(self) -> None:
        """Metadata of RLD's that came after its relay had ended: SGLang keeps it for a sender that will never be."""
        while self._over and time.monotonic() - self._over[0][0] > LATE:
            _, room = self._over.popleft()
            if room not in self._relays:
                for table in ("transfer_infos", "request_status", "req_to_decode_prefix_len"):
                    getattr(self._manager, table).pop(room, None)

    # --- one copy ---

    def _ready(self, original: Callable[..., None], relay: _Relay) -> None:
        if self._slots.available_size() == 0:
            return  # next step
        relay.metadata = self._slots.alloc()
        self.sessions.update(self._manager.transfer_infos.get(relay.relay_room, ()))
        relay.prefix = relay.sent = relay.sender.pop_decode_prefix_len()
        relay.sender.init(self._queue._num_pages_to_send(relay.req, relay.prefix), relay.metadata)
        relay.ready = True
        self._send(original, relay)

    def _send(self, original: Callable[..., None], relay: _Relay) -> None:
        if not relay.ready or relay.queued_last or (relay.computed <= relay.sent and not relay.complete):
            return
        relay.sender._early_send_wait_event = relay.written
        with _as_relay(relay):
            original(self._scheduler, relay.req, relay.complete, relay.computed)
        relay.queued_last = relay.complete

    def _give_up(self, relay: _Relay, why: str) -> None:
        self._end(relay, "relay_dropped", why=why)
        self._ended(relay.relay_room, why)

    def _end(self, relay: _Relay, event: str, **fields: Any) -> None:
        del self._relays[relay.relay_room]
        if event != "relay_copied":
            relay.sender.abort()
        relay.sender.clear()
        self._lanes.forget(relay.relay_room)
        self._over.append((time.monotonic(), relay.relay_room))
        self._manager.failure_records.pop(relay.relay_room, None)
        if relay.metadata >= 0:
            self._slots.free(relay.metadata)
        self._timeline.event(event, relay.room, relay_room=relay.relay_room, **fields)


@contextmanager
def _as_relay(relay: _Relay) -> Iterator[None]:
    """While the stock code sends to RLD, the request shows RLD's side of itself."""
    req = relay.req
    stock = (
        req.disagg_kv_sender,
        req.start_send_idx,
        req.disagg_decode_prefix_len,
        req.metadata_buffer_index,
        req.bootstrap_room,
    )
    req.disagg_kv_sender = relay.sender
    req.start_send_idx = relay.sent
    req.disagg_decode_prefix_len = relay.prefix
    req.metadata_buffer_index = relay.metadata
    req.bootstrap_room = relay.relay_room
    try:
        yield
        relay.sent = req.start_send_idx
    finally:
        (
            req.disagg_kv_sender,
            req.start_send_idx,
            req.disagg_decode_prefix_len,
            req.metadata_buffer_index,
            req.bootstrap_room,
        ) = stock
