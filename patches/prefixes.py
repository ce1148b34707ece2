"""MD's queues meet its cache: whose prompt is on its way, and who runs when. What is fetched again: `refetch.py`.

SGLang has reduced the polls over all ranks when they come here, so that all ranks decide alike, in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from sglang_pdd.metrics import Counters
from sglang_pdd.patches.drc import DecodeCache
from sglang_pdd.patches.landing import Landings
from sglang_pdd.patches.refetch import Refetches, keep_landed
from sglang_pdd.protocol import Follows
from sglang_pdd.timeline import Timeline


class Prefixes:
    """Args:
    landings: of the streams; None: all KV comes by engine, and of that nothing is known before its end.
    unknown: called with a room for whose tokens nobody waits.
    tell: says a message to the prefill of a request.
    """

    def __init__(
        self,
        scheduler: Any,
        counters: Counters,
        timeline: Timeline,
        landings: Landings | None,
        unknown: Callable[[int], None],
        tell: Callable[[Any, Follows], None],
    ) -> None:
        self._landings = landings
        self._tell = tell
        self._scheduler = scheduler
        self._counters = counters
        self._timeline = timeline
        self._transfers: dict[int, Any] = {}  # room -> SGLang's DecodeRequest
        self.refetches = Refetches(scheduler, counters, timeline, self._transfers, landings, unknown, self._waits_anew)
        assert isinstance(self.cache, DecodeCache), "--radix-cache-backend was lost"

    @property
    def cache(self) -> DecodeCache:
        cache: DecodeCache = self._scheduler.tree_cache
        return cache

    @property
    def _queue(self) -> Any:
        return self._scheduler.disagg_decode_transfer_queue

    def followed(self, transfer: Any, besides: Set[int] = frozenset()) -> bool:
        """Does anybody wait for what this transfer brings, besides these rooms?"""
        return self._knows(transfer) and self.awaited(transfer.req.bootstrap_room, besides)

    def awaited(self, room: int, besides: Set[int]) -> bool:
        """Does anybody wait for what comes under this room, besides these?"""
        return not self.cache.pending.followers(room).keys() <= besides

    # --- a transfer's way ---

    def admitted(self, transfer: Any, prefix_len: int) -> None:
        """It has its memory, and P is about to hear that MD has the first ``prefix_len`` tokens (or will have)."""
        req = transfer.req
        if req.bootstrap_host == FAKE_BOOTSTRAP_HOST or transfer.is_rebootstrap or transfer.host_staged:
            return
        cache, room = self.cache, req.bootstrap_room
        if room in cache.pending:
            transfer.kv_receiver.abort()  # nobody could tell the two transfers apart
            transfer.kv_receiver.send_metadata = _unsaid  # or P would write the other one's KV to this one's pages
            return
        row = cache.row(req, len(req.origin_input_ids))
        shared, refetches = cache.pending.begin(room, row, prefix_len // cache.page_size)
        cache.publish(req)
        self._transfers[room] = transfer
        if shared:
            self._counters.inc("drc.followers")
            self._counters.inc("drc.shared", shared * cache.page_size)
            self._timeline.event("follows", room, shared=shared * cache.page_size)
        self.refetches.begin(refetches)
        if shared and not refetches:
            self._announce(room)

    def polled(self, polls: list[int]) -> list[int]:
        """What SGLang's queue is told of its transfers: who waits for others has not landed either."""
        pending = self.cache.pending
        mine = [(i, t.req.bootstrap_room) for i, t in enumerate(self._queue.queue) if self._knows(t)]
        failed = [self._queue.queue[i].kv_receiver for i, _ in mine if polls[i] == KVPoll.Failed]
        keep_landed(pending, self._landings, failed, self._queue.gloo_group)
        for i, room in mine:
            if polls[i] == KVPoll.Success:
                pending.progress(room)
            elif polls[i] == KVPoll.Failed:
                pending.failed(room)
        for i, room in mine:
            if polls[i] == KVPoll.Success:
                if pending.ready(room):
                    pending.end(room)
                    del self._transfers[room]
                else:
                    polls[i] = KVPoll.Transferring
        return polls

    def released(self, transfer: Any) -> None:
        """A failed transfer's pages were let go of: nobody writes them any more."""
        if not self._knows(transfer):
            return
        cache, room = self.cache, transfer.req.bootstrap_room
        del self._transfers[room]
        row, start = cache.pending.row(room), cache.pending.start(room)
        self.refetches.begin(cache.pending.released(room))
        kept = min(cache.pending.readable(row), len(transfer.req.origin_input_ids) // cache.page_size) - start
        if kept > 0:
            self._counters.inc("drc.salvaged", kept * cache.page_size)
            self._timeline.event("salvaged", room, tokens=kept * cache.page_size)
        cache.cut(transfer.req, row)

    def all_aborted(self) -> None:
        """SGLang is about to abort all transfers: nobody waits for anything any more."""
        for room in self._transfers:
            self.cache.pending.failed(room)
        self.refetches.give_up()

    def _knows(self, transfer: Any) -> bool:
        room = transfer.req.bootstrap_room
        return self._transfers.get(room) is transfer and room in self.cache.pending

    def _waits_anew(self, room: int) -> None:
        self._announce(room, again=True)

    def _announce(self, room: int, again: bool = False) -> None:
        """Prefills know their own requests only: tell them for what this one waits.

        Args:
            again: it did not wait for that before; else P sees by itself what requests of its own have in common.
        """
        page, leaders = self.cache.page_size, self.cache.pending.leaders(room)
        follower = self._transfers[room].req
        reqs = [follower, *(self._req_of(leader) for leader in leaders)]
        places = {(req.bootstrap_host, req.bootstrap_port): req for req in reqs}
        if len(places) == 1 and not again:
            return
        missing = {leader: pages - self._so_far(leader) for leader, pages in leaders.items()}
        own = self.cache.pending.row(room).size - self.cache.pending.start(room)
        said = Follows(room, own * page, tuple((leader, max(0, pages) * page) for leader, pages in missing.items()))
        for req in places.values():
            self._tell(req, said)

    def _req_of(self, room: int) -> Any:
        """A request to the P that writes under this room."""
        known = self._transfers.get(room)
        return known.req if known is not None else self.refetches.req_of(room)

    def _so_far(self, room: int) -> int:
        return self._landings.so_far(room) if self._landings is not None else 0


def _unsaid(*args: Any, **kwargs: Any) -> None:
    """Instead of a receiver's ``send_metadata``."""
