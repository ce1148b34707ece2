"""P's copies to MD that nobody waits for: they go last, and end when they are in somebody's way."""

from __future__ import annotations

from typing import Any

from sglang_pdd.metrics import Counters
from sglang_pdd.timeline import Timeline


class Unwanted:
    """Rooms of copies that nobody waits for.

    Args:
        by_stream: the link has an order, so that these copies are in nobody's way there.
    """

    def __init__(self, scheduler: Any, by_stream: bool, counters: Counters, timeline: Timeline) -> None:
        self._scheduler, self._by_stream = scheduler, by_stream
        self._counters, self._timeline = counters, timeline
        self.rooms: set[int] = set()
        self._refused = False  # SGLang had no room for the next prompt when it last looked

    def make_room(self) -> None:
        """Each step, on all ranks alike: they end if others want this pool; or the link, if it has no order."""
        inflight = self._scheduler.disagg_prefill_inflight_queue
        rooms = [req.bootstrap_room for req in inflight if req.bootstrap_room in self.rooms] if self.rooms else []
        if not rooms or not ((not self._by_stream and len(inflight) > len(rooms)) or self._is_short()):
            return
        manager = self._scheduler.disagg_prefill_bootstrap_queue.kv_manager
        for room in rooms:
            # Unlike the sender's `abort` this tells MD.
            manager.conclude_failure(bootstrap_room=room, failure_reason="nobody waits for it")
            manager.failure_records.pop(room, None)  # so that SGLang does not log it as an error
            self.rooms.discard(room)
            self._counters.inc("wan.given_up")
            self._timeline.event("given_up", room)

    def planned(self, batch: Any) -> None:
        """What SGLang runs next, or None."""
        scheduler = self._scheduler
        self._refused = batch is None and bool(scheduler.waiting_queue) and scheduler.chunked_req is None

    def _is_short(self) -> bool:
        """Does the next prompt wait for what copies hold: pages, a row, a metadata slot?"""
        slots = self._scheduler.req_to_metadata_buffer_idx_allocator.available_size()
        return self._refused or (slots == 0 and bool(self._scheduler.disagg_prefill_bootstrap_queue.queue))
