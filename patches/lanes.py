"""P's sending by SGLang's own engine: a lane for each destination, pacing, and cancellation.

This is what relays get, and main decodes to which there are no streams (`streams.py`). How segments go out is the
engine's: `mooncake.py`, `nixl.py`.

Stock SGLang shards destinations over a few queues with one serial worker each, so a WAN copy can hold a LAN copy up
for seconds. Here every destination has its own queue and worker; both are SGLang's own code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.runtime_context import get_parallel

from sglang_pdd.config import PddConfig
from sglang_pdd.pacing import TokenBucket
from sglang_pdd.patches import engines, streams
from sglang_pdd.policy import LinkEstimate

SEGMENT_SECONDS = 0.02  # what one paced segment takes
MIN_SEGMENT = 64 << 10  # bytes
FREE_SEGMENT = 8 << 20  # bytes; without a rate limit, only cancellation needs segments
IDLE_LANE = 600.0  # seconds until the worker of an unused lane ends


class Lane(FastQueue):
    """SGLang's transfer queue of one destination; remembers which chunk its worker has in hand, and what is left."""

    def __init__(self, manager: Any, link: LinkEstimate) -> None:
        super().__init__()
        self.manager = manager
        self.link = link
        self.used = time.monotonic()
        self.in_hand: Any = None
        self.worker: threading.Thread | None = None
        self._left: dict[int, int] = {}  # room -> bytes queued and not sent
        self._lock = threading.Lock()  # the scheduler queues and forgets, the worker sends

    def get(self) -> Any:
        self.in_hand = None
        self.in_hand = super().get()
        return self.in_hand

    @property
    def idle(self) -> bool:
        return not self._left and self.in_hand is None

    def queued(self, room: int, size: int) -> None:
        with self._lock:
            self._left[room] = self._left.get(room, 0) + size
        self.link.queued(size)

    def sent(self, room: int, size: int, seconds: float) -> None:
        with self._lock:
            left = self._left.pop(room, 0)  # nothing, if it was forgotten meanwhile
            known = min(size, left)
            if left > known:
                self._left[room] = left - known
        self.link.sent(size, seconds, known)

    def forget(self, room: int) -> None:
        """Whatever is left of this room will not be sent."""
        with self._lock:
            left = self._left.pop(room, 0)
        self.link.dropped(left)


class Lanes:
    """All lanes of one KV manager.

    Args:
        rate: bytes/s that all WAN destinations of this rank share; None: no limit.
        is_lan: whether an engine session belongs to a relay beside P.
        sent: called from a worker with (room, bytes, seconds) after each WAN segment.
    """

    def __init__(
        self, rate: float | None, is_lan: Callable[[str], bool], sent: Callable[[int, int, float], None]
    ) -> None:
        self.rate = rate
        self.is_lan = is_lan
        self.sent = sent
        self.segment = FREE_SEGMENT if rate is None else max(MIN_SEGMENT, int(rate * SEGMENT_SECONDS))
        self._bucket = None if rate is None else TokenBucket(rate, self.segment)
        self._lanes: dict[tuple[str, ...], Lane] = {}
        self._by_session: dict[str, Lane] = {}

    def link(self, sessions: Iterable[str]) -> LinkEstimate:
        """What is known of the way to this destination."""
        lane = self._lanes.get(tuple(sorted(sessions)))
        return lane.link if lane else LinkEstimate(self.rate)

    def of(self, manager: Any, sessions: Iterable[str]) -> Lane:
        key = tuple(sorted(sessions))
        lane = self._lanes.get(key)
        if lane is None or not (lane.worker and lane.worker.is_alive()):  # SGLang's worker ends when it raises
            self._retire()
            lane = self._lanes[key] = Lane(manager, LinkEstimate(self.rate))
            self._by_session.update(dict.fromkeys(key, lane))
            lane.worker = threading.Thread(
                target=engines.work, args=(manager, lane, ThreadPoolExecutor(4)), daemon=True
            )
            lane.worker.start()
        lane.used = time.monotonic()
        return lane

    def forget(self, room: int) -> None:
        """A room is over: nothing of it weighs on the links any more."""
        for lane in self._lanes.values():
            lane.forget(room)

    def wan(self, session: str) -> Lane | None:
        """The lane of a session beyond the WAN whose worker has a chunk in hand; None: neither cut nor paced."""
        lane = self._by_session.get(session)
        return None if lane is None or lane.in_hand is None or self.is_lan(session) else lane

    def allow(self, lane: Lane, size: int) -> bool:
        """Wait until a segment of ``size`` bytes of what the lane has in hand may go; False: its room is over."""
        room, status_of = lane.in_hand.room, lane.manager.request_status

        def cancelled() -> bool:
            return status_of.get(room, KVPoll.Failed) == KVPoll.Failed

        if cancelled() or (self._bucket is not None and not self._bucket.take(size, cancelled)):
            lane.forget(room)
            return False
        return True

    def landed(self, lane: Lane, size: int, seconds: float) -> None:
        """A segment of what the lane has in hand has landed, in so many seconds."""
        lane.sent(lane.in_hand.room, size, seconds)
        self.sent(lane.in_hand.room, size, seconds)

    def _retire(self) -> None:
        now = time.monotonic()
        for key, lane in list(self._lanes.items()):
            if lane.idle and now - lane.used > IDLE_LANE:
                lane.put(None)  # ends SGLang's worker
                del self._lanes[key]
                for session in key:
                    if self._by_session.get(session) is lane:
                        del self._by_session[session]


lanes: Lanes | None = None  # of this process


def get_lanes() -> Lanes:
    """The process's lanes; made on first use when P has no role but a rate limit."""
    global lanes
    if lanes is None:
        lanes = make_lanes(PddConfig.from_env(), lambda session: False, lambda room, size, seconds: None)
    return lanes


def make_lanes(config: PddConfig, is_lan: Callable[[str], bool], sent: Callable[[int, int, float], None]) -> Lanes:
    global lanes
    rate = config.wan_rate_limit
    lanes = Lanes(rate / get_parallel().tp_size if rate else None, is_lan, sent)
    return lanes


# --- hooks ------------------------------------------------------------------------------------------------------


def add_transfer_request(
    original: Callable[..., None],
    manager: Any,
    bootstrap_room: int,
    kv_indices: Any,
    index_slice: slice,
    is_last_chunk: bool,
    **more: Any,
) -> None:
    """Around an engine's ``add_transfer_request``: into the lane of the room, or of the destination."""
    if streams.over(bootstrap_room):  # given up while its prefill went on
        manager.conclude_failure(bootstrap_room=bootstrap_room, failure_reason="the room is over")
        return
    lane: streams.Lane | Lane | None = streams.lane_of(bootstrap_room)
    if lane is None and (sessions := tuple(manager.transfer_infos.get(bootstrap_room, ()))):
        lane = get_lanes().of(manager, sessions)
        lane.queued(bootstrap_room, len(kv_indices) * manager.kv_item_lens_sum)
    stock = manager.transfer_queues
    manager.transfer_queues = stock if lane is None else [lane]  # only the scheduler's thread reads it
    if lane is not None and (event := more.get("wait_event")) is not None:
        engines.wait_for(manager, lane, event)
    try:
        original(manager, bootstrap_room, kv_indices, index_slice, is_last_chunk, **more)
    finally:
        manager.transfer_queues = stock
    if isinstance(lane, streams.Lane):
        lane.begin(last=is_last_chunk)
