"""MD's queues meet its cache: whose prompt is on its way, who runs when, and what is fetched again.

SGLang has reduced the polls over all ranks when they come here, so that all ranks decide alike, in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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

from sglang_pdd.drc import REFETCH, Pages, Refetch
from sglang_pdd.metrics import Counters
from sglang_pdd.patches.drc import DecodeCache
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
    deadline: float | None = None  # it has failed; until then its writer may take to end


class Prefixes:
    """Args:
    unknown: called with a room for whose tokens nobody waits.
    over: called with a room into which nothing is to be written any more.
    landed: how many of a room's pages, from the first on, so many ranks of P have brought completely to this rank;
        called when nothing more is wanted of it.
    """

    def __init__(
        self,
        scheduler: Any,
        counters: Counters,
        timeline: Timeline,
        unknown: Callable[[int], None],
        over: Callable[[int], None],
        landed: Callable[[int, int], int],
    ) -> None:
        self._over = over
        self._landed = landed
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

    def followed(self, transfer: Any) -> bool:
        """Does anybody wait for what this transfer brings?"""
        return self._knows(transfer) and self.cache.pending.followed(transfer.req.bootstrap_room)

    # --- a transfer's way ---

    def admitted(self, transfer: Any, prefix_len: int) -> None:
        """It has its memory, and P is about to hear that MD has the first ``prefix_len`` tokens (or will have)."""
        req = transfer.req
        if req.bootstrap_host == FAKE_BOOTSTRAP_HOST or transfer.is_rebootstrap or transfer.host_staged:
            return
        cache, room = self.cache, req.bootstrap_room
        if room in cache.pending:
            transfer.kv_receiver.abort()  # nobody could tell the two transfers apart
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
        pages = [self._landed(receiver.bootstrap_room, _senders(receiver)) for receiver in receivers]
        pages = all_reduce_flags(pages, self._queue.gloo_group, torch.distributed.ReduceOp.MIN)
        for receiver, landed in zip(receivers, pages, strict=True):
            self.cache.pending.progress(receiver.bootstrap_room, landed)

    def _knows(self, transfer: Any) -> bool:
        room = transfer.req.bootstrap_room
        return self._transfers.get(room) is transfer and room in self.cache.pending

    # --- what is fetched again ---

    def ask(self) -> None:
        """Begin what could not begin for want of a metadata slot.

        Also before SGLang admits anybody: who takes the last slot may wait for what is to be fetched.
        """
        for copy in self._copies:
            if copy.metadata_buffer_index < 0:
                self._ask(copy)

    def pump(self) -> None:
        """Once a step, after SGLang has looked at its transfers."""
        if not self._copies:
            return
        self.ask()
        flying = [c for c in self._copies if c.metadata_buffer_index >= 0 and c.deadline is None]
        draining = [c for c in self._copies if c.deadline is not None]
        queue = self._queue
        receivers = [c.receiver for c in flying]
        polls = poll_and_all_reduce(receivers, queue.gloo_group, flying, queue.metadata_buffers) if flying else []
        self._keep([c.receiver for c, poll in zip(flying, polls, strict=True) if poll == KVPoll.Failed])
        for copy, poll in zip(flying, polls, strict=True):
            if poll == KVPoll.Success:
                self.cache.pending.progress(copy.refetch.room)
                self.cache.pending.end(copy.refetch.room)
                self._let_go(copy)
            elif poll == KVPoll.Failed:
                self._failed(copy)
        ended = [self._has_ended(c) for c in draining]
        for copy, over in zip(
            draining, all_reduce_flags(ended, queue.gloo_group, torch.distributed.ReduceOp.MIN), strict=True
        ):
            if over:
                refetches = self.cache.pending.released(copy.refetch.room)
                self._let_go(copy)
                self._fetch(refetches)

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
            self._copies.append(_Copy(refetch, follower.req, row, receiver, lock))
            tokens = (refetch.end - refetch.start) * self.cache.page_size
            self._counters.inc("drc.refetched", tokens)
            self._timeline.event("refetch", refetch.follower, under=refetch.room, tokens=tokens)
            self._unknown(refetch.room)

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
        copy.receiver.send_metadata(pages, copy.metadata_buffer_index, [], decode_prefix_len=refetch.start * page)
        payload = req.build_rebootstrap_payload()
        payload["input_ids"] = [int(token) for token in req.origin_input_ids[: refetch.end * page]]
        payload["rid"] = f"{REFETCH}{refetch.room:019d}"
        payload["bootstrap_room"] = refetch.room
        copy.receiver.kv_mgr.submit_prefill_recompute(copy.receiver, payload)

    def _failed(self, copy: _Copy) -> None:
        """Its follower ends as any request whose transfer fails; others try by themselves."""
        self._counters.inc("drc.refetches_failed")
        copy.receiver.ensure_abort_notified(force_arm=True)
        copy.deadline = time.monotonic() + self._queue.deferred_kv_release_timeout
        pending, room = self.cache.pending, copy.refetch.room
        pending.failed(room)
        follower = self._transfers.get(copy.refetch.follower)
        if follower is not None and self._knows(follower) and not pending.ready(copy.refetch.follower):
            pending.failed(copy.refetch.follower)
            follower.kv_receiver.abort()

    @staticmethod
    def _has_ended(copy: _Copy) -> bool:
        acks = len(copy.receiver.bootstrap_infos) if copy.receiver.abort_notified else 0
        assert copy.deadline is not None
        safe = copy.receiver.kv_mgr.is_abort_release_safe(copy.refetch.room, acks)
        return bool(safe) or time.monotonic() > copy.deadline

    def _let_go(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        room, manager = copy.refetch.room, copy.receiver.kv_mgr
        self._over(room)
        self.cache.unlock(copy.lock)
        self.cache.cut(copy.req, copy.row)
        self._queue.metadata_buffers.clear_slot(copy.metadata_buffer_index)
        self._queue.req_to_metadata_buffer_idx_allocator.free(copy.metadata_buffer_index)
        manager.clear_deferred_abort_state(room)
        copy.receiver.clear()
        manager.failure_records.pop(room, None)


def _senders(receiver: Any) -> int:
    """Ranks of P that send something to this rank; none if P was never reached."""
    return sum(not info["is_dummy"] for info in getattr(receiver, "bootstrap_infos", None) or ())
