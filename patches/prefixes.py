"""MD's queues meet its cache: whose prompt is on its way, who runs when, and what is fetched again.

SGLang has reduced the polls over all ranks when they come here, so that all ranks decide alike, in the same step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import (
    FAKE_BOOTSTRAP_HOST,
    KVClassType,
    all_reduce_flags,
    get_kv_class,
    poll_and_all_reduce,
)

from sglang_pdd.drc import Pages, Refetch, refetch_rid
from sglang_pdd.metrics import Counters
from sglang_pdd.patches.drc import DecodeCache
from sglang_pdd.patches.landing import Landings
from sglang_pdd.protocol import Follows
from sglang_pdd.timeline import Timeline


@dataclass(slots=True, eq=False)
class _Copy:
    """A part of a prompt that is fetched again; SGLang's poll looks at it as at a transfer of its own."""

    refetch: Refetch
    req: Any  # the follower's
    row: Pages
    receiver: Any
    lock: Any
    metadata_buffer_index: int = -1
    asked: float | None = None  # when P was told where to write
    deadline: float | None = None  # it has failed; until then its writer may take to end
    given_up: bool = False  # nobody wants it any more
    unanswered: bool = False  # P's HTTP port has said nothing
    over: bool = False  # SGLang has forgotten its room

    @property
    def flying(self) -> bool:
        return self.metadata_buffer_index >= 0 and self.deadline is None

    def forget(self) -> None:
        """Of SGLang's tables, what a room leaves in them whose end was not seen by SGLang's queue."""
        self.receiver.kv_mgr.clear_deferred_abort_state(self.refetch.room)
        self.receiver.kv_mgr.failure_records.pop(self.refetch.room, None)


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
        self._unknown = unknown
        self._transfers: dict[int, Any] = {}  # room -> SGLang's DecodeRequest
        self._copies: list[_Copy] = []
        assert isinstance(self.cache, DecodeCache), "--radix-cache-backend was lost"

    def __len__(self) -> int:
        """Parts of prompts that are fetched again."""
        return len(self._copies)

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
        self._fetch(refetches)
        if shared and not refetches:
            self._announce(room)

    def polled(self, polls: list[int]) -> list[int]:
        """What SGLang's queue is told of its transfers: who waits for others has not landed either."""
        pending = self.cache.pending
        mine = [(i, t.req.bootstrap_room) for i, t in enumerate(self._queue.queue) if self._knows(t)]
        self._keep([self._queue.queue[i].kv_receiver for i, _ in mine if polls[i] == KVPoll.Failed])
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
        self._fetch(cache.pending.released(room))
        kept = min(cache.pending.readable(row), len(transfer.req.origin_input_ids) // cache.page_size) - start
        if kept > 0:
            self._counters.inc("drc.salvaged", kept * cache.page_size)
            self._timeline.event("salvaged", room, tokens=kept * cache.page_size)
        cache.cut(transfer.req, row)

    def _keep(self, receivers: list[Any]) -> None:
        """These have failed, on all ranks: what has landed of them on all ranks stays."""
        if not receivers:
            return
        room_of = self._landings
        pages = [room_of.pages(r.bootstrap_room, _senders(r)) if room_of else 0 for r in receivers]
        pages = all_reduce_flags(pages, self._queue.gloo_group, torch.distributed.ReduceOp.MIN)
        for receiver, landed in zip(receivers, pages, strict=True):
            self.cache.pending.progress(receiver.bootstrap_room, landed)

    def _knows(self, transfer: Any) -> bool:
        room = transfer.req.bootstrap_room
        return self._transfers.get(room) is transfer and room in self.cache.pending

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
        return known.req if known is not None else next(c.req for c in self._copies if c.refetch.room == room)

    def _so_far(self, room: int) -> int:
        return self._landings.so_far(room) if self._landings is not None else 0

    # --- what is fetched again ---

    def ask(self) -> None:
        """Begin what could not begin for want of a metadata slot, if anybody waits for it still.

        Also before SGLang admits anybody: who takes the last slot may wait for what is to be fetched.
        """
        for copy in [c for c in self._copies if c.metadata_buffer_index < 0]:
            if not self.cache.pending.followed(copy.refetch.room):
                self.cache.pending.failed(copy.refetch.room)
                self._release(copy)
            else:
                self._ask(copy)

    def orphans(self, besides: Set[int] = frozenset()) -> dict[int, Any]:
        """What is fetched again although nobody waits for it any more, besides these rooms.

        Returns rooms, and requests to the same P.
        """
        flying = [c for c in self._copies if c.flying]
        return {c.refetch.room: c.req for c in flying if not self.awaited(c.refetch.room, besides)}

    def give_up(self, besides: Set[int] = frozenset()) -> None:
        """Others want the pool: what nobody waits for ends."""
        orphans = self.orphans(besides)
        for copy in [c for c in self._copies if c.refetch.room in orphans]:
            copy.given_up = True
            copy.receiver.abort()

    def all_aborted(self) -> None:
        """SGLang is about to abort all transfers: nobody waits for anything any more."""
        for room in self._transfers:
            self.cache.pending.failed(room)
        self.give_up()

    def pump(self) -> None:
        """Once a step, after SGLang has looked at its transfers."""
        if not self._copies:
            return
        self.ask()
        flying = [c for c in self._copies if c.flying]
        draining = [c for c in self._copies if c.deadline is not None]
        queue = self._queue
        receivers = [c.receiver for c in flying]
        polls = poll_and_all_reduce(receivers, queue.gloo_group, flying, queue.metadata_buffers) if flying else []
        self._keep([c.receiver for c, poll in zip(flying, polls, strict=True) if poll == KVPoll.Failed])
        for copy in [c for c, poll in zip(flying, polls, strict=True) if poll == KVPoll.Success]:
            self.cache.pending.progress(copy.refetch.room)
            self.cache.pending.end(copy.refetch.room)
            self._let_go(copy)
        failed = [c for c, poll in zip(flying, polls, strict=True) if poll == KVPoll.Failed]
        silent = [self._is_silent(c) for c in failed]
        for copy, all_fail in zip(
            failed, all_reduce_flags(silent, queue.gloo_group, torch.distributed.ReduceOp.MAX), strict=True
        ):
            self._failed(copy, all_fail)
        ended = [self._has_ended(c) for c in draining]
        for copy, over in zip(
            draining, all_reduce_flags(ended, queue.gloo_group, torch.distributed.ReduceOp.MIN), strict=True
        ):
            if over:
                self._release(copy)

    def _fetch(self, refetches: tuple[Refetch, ...]) -> None:
        """Begin these: they hold the tree's nodes themselves, since their followers may leave before they land."""
        prealloc = self._scheduler.disagg_decode_prealloc_queue
        kind = get_kv_class(prealloc.transfer_backend, KVClassType.RECEIVER)
        for refetch in refetches:
            follower = self._transfers[refetch.follower]
            known = follower.kv_receiver
            receiver = kind(mgr=prealloc.kv_manager, bootstrap_addr=known.bootstrap_addr, bootstrap_room=refetch.room)
            receiver.init(known.prefill_dp_rank)
            row = self.cache.pending.row(refetch.room)
            lock = self.cache.hold(follower.req, refetch.end)
            receiver.pdd_copy = copy = _Copy(refetch, follower.req, row, receiver, lock)
            self._copies.append(copy)
            tokens = (refetch.end - refetch.start) * self.cache.page_size
            self._counters.inc("drc.refetched", tokens)
            self._timeline.event("refetch", refetch.follower, under=refetch.room, tokens=tokens)
            self._unknown(refetch.room)
        for follower in {name: None for refetch in refetches for name in self.cache.pending.followers(refetch.room)}:
            self._announce(follower, again=True)

    def _ask(self, copy: _Copy) -> None:
        """Tell P where to, and let it prefill that much of the prompt again (it has it cached)."""
        slots = self._queue.req_to_metadata_buffer_idx_allocator
        if slots.available_size() == 0:
            return  # next step
        copy.metadata_buffer_index = slots.alloc()
        page, refetch, req = self.cache.page_size, copy.refetch, copy.req
        pages = copy.row[refetch.start :].astype(np.int32)
        if copy.receiver.conclude_state == KVPoll.Failed:
            return  # P is not there; the poll will say so on all ranks
        copy.asked = time.monotonic()
        copy.receiver.send_metadata(pages, copy.metadata_buffer_index, [], decode_prefix_len=refetch.start * page)
        payload = req.build_rebootstrap_payload()
        payload["input_ids"] = [int(token) for token in req.origin_input_ids[: refetch.end * page]]
        least = min(self.cache.pending.followers(refetch.room).values())
        payload["rid"] = refetch_rid(refetch.room, least * page)
        payload["bootstrap_room"] = refetch.room
        copy.receiver.kv_mgr.submit_prefill_recompute(copy.receiver, payload)

    def _failed(self, copy: _Copy, silent: bool) -> None:
        """Its follower ends as any request whose transfer fails; others try by themselves.

        Args:
            silent: P has not answered in all the time there is, so it need not be asked for the others.
        """
        self._counters.inc("drc.refetches_failed", int(not copy.given_up))
        copy.receiver.ensure_abort_notified(force_arm=True)
        copy.deadline = time.monotonic() + self._queue.deferred_kv_release_timeout
        pending, room = self.cache.pending, copy.refetch.room
        pending.failed(room)
        asked = (copy.refetch.follower, *(pending.followers(room) if silent else ()))
        for name in dict.fromkeys(asked):
            follower = self._transfers.get(name)
            if follower is None or not self._knows(follower) or pending.ready(name):
                continue
            if follower.kv_receiver.bootstrap_addr == copy.receiver.bootstrap_addr:
                pending.failed(name)
                follower.kv_receiver.abort()

    @staticmethod
    def _is_silent(copy: _Copy) -> bool:
        if copy.given_up or copy.asked is None:
            return False
        return copy.unanswered or time.monotonic() - copy.asked >= copy.receiver.kv_mgr.waiting_timeout

    @staticmethod
    def _has_ended(copy: _Copy) -> bool:
        if copy.asked is None:
            return True  # P knows of nothing to write to
        acks = len(copy.receiver.bootstrap_infos) if copy.receiver.abort_notified else 0
        assert copy.deadline is not None
        safe = copy.receiver.kv_mgr.is_abort_release_safe(copy.refetch.room, acks)
        return bool(safe) or time.monotonic() > copy.deadline

    def _release(self, copy: _Copy) -> None:
        """It has failed, and nobody writes its pages any more."""
        refetches = self.cache.pending.released(copy.refetch.room)
        self._let_go(copy)
        self._fetch(refetches)

    def _let_go(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if self._landings is not None:
            self._landings.end(copy.refetch.room)
        self.cache.unlock(copy.lock)
        self.cache.cut(copy.req, copy.row)
        if copy.metadata_buffer_index >= 0:
            self._queue.metadata_buffers.clear_slot(copy.metadata_buffer_index)
            self._queue.req_to_metadata_buffer_idx_allocator.free(copy.metadata_buffer_index)
        copy.receiver.clear()
        copy.over = True  # first: the answer to its HTTP request may come at any time, see `recompute_failed`
        copy.forget()


def _senders(receiver: Any) -> int:
    """Ranks of P that send something to this rank; none if P was never reached."""
    return sum(not info["is_dummy"] for info in getattr(receiver, "bootstrap_infos", None) or ())


def _unsaid(*args: Any, **kwargs: Any) -> None:
    """Instead of a receiver's ``send_metadata``."""


# --- hooks ------------------------------------------------------------------------------------------------------


def recompute_failed(original: Callable[..., None], manager: Any, kv_receiver: Any, reason: str) -> None:
    """Around ``CommonKVManager._fail_prefill_recompute``, in a thread of SGLang's: an HTTP request has failed.

    Its refetch may be long over by then, well or badly; SGLang would note the room down again and keep it for good.
    """
    copy: _Copy | None = getattr(kv_receiver, "pdd_copy", None)
    if copy is None:
        return original(manager, kv_receiver, reason)
    copy.unanswered = sys.exc_info()[0] is not None  # SGLang handles an exception: there was no answer
    if not copy.over:
        original(manager, kv_receiver, reason)
    if copy.over:
        copy.forget()
