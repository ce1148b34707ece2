"""What is fetched again: parts of prompts whose transfer has failed while others wait for them.

SGLang has reduced the polls over all ranks when they come here, so that all ranks decide alike, in the same step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, all_reduce_flags, get_kv_class, poll_and_all_reduce

from sglang_pdd.drc import Pages, Pending, Refetch, refetch_rid
from sglang_pdd.metrics import Counters
from sglang_pdd.patches.drc import DecodeCache
from sglang_pdd.patches.landing import Landings
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


class Refetches:
    """Args:
    transfers: SGLang's, by room: followers are among them.
    landings: of the streams; None: all KV comes by engine, and of that nothing is known before its end.
    unknown: called with a room for whose tokens nobody waits.
    waits: called with a follower's room, when it waits for what it did not wait for before.
    """

    def __init__(
        self,
        scheduler: Any,
        counters: Counters,
        timeline: Timeline,
        transfers: Mapping[int, Any],
        landings: Landings | None,
        unknown: Callable[[int], None],
        waits: Callable[[int], None],
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._timeline = timeline
        self._transfers = transfers
        self._landings = landings
        self._unknown = unknown
        self._waits = waits
        self._copies: list[_Copy] = []

    def __len__(self) -> int:
        """Parts of prompts that are on their way again, or about to be."""
        return len(self._copies)

    @property
    def _cache(self) -> DecodeCache:
        cache: DecodeCache = self._scheduler.tree_cache
        return cache

    @property
    def _queue(self) -> Any:
        return self._scheduler.disagg_decode_transfer_queue

    def req_of(self, room: int) -> Any:
        """A request to the P that brings this part."""
        return next(copy.req for copy in self._copies if copy.refetch.room == room)

    def begin(self, refetches: tuple[Refetch, ...]) -> None:
        """Begin these: they hold the tree's nodes themselves, since their followers may leave before they land."""
        prealloc = self._scheduler.disagg_decode_prealloc_queue
        kind = get_kv_class(prealloc.transfer_backend, KVClassType.RECEIVER)
        for refetch in refetches:
            follower = self._transfers[refetch.follower]
            known = follower.kv_receiver
            receiver = kind(mgr=prealloc.kv_manager, bootstrap_addr=known.bootstrap_addr, bootstrap_room=refetch.room)
            receiver.init(known.prefill_dp_rank)
            row = self._cache.pending.row(refetch.room)
            lock = self._cache.hold(follower.req, refetch.end)
            receiver.pdd_copy = copy = _Copy(refetch, follower.req, row, receiver, lock)
            self._copies.append(copy)
            tokens = (refetch.end - refetch.start) * self._cache.page_size
            self._counters.inc("drc.refetched", tokens)
            self._timeline.event("refetch", refetch.follower, under=refetch.room, tokens=tokens)
            self._unknown(refetch.room)
        for follower in {name: None for refetch in refetches for name in self._cache.pending.followers(refetch.room)}:
            self._waits(follower)

    def ask(self) -> None:
        """Begin what could not begin for want of a metadata slot, if anybody waits for it still.

        Also before SGLang admits anybody: who takes the last slot may wait for what is to be fetched.
        """
        for copy in [c for c in self._copies if c.metadata_buffer_index < 0]:
            if not self._cache.pending.followed(copy.refetch.room):
                self._cache.pending.failed(copy.refetch.room)
                self._release(copy)
            else:
                self._ask(copy)

    def orphans(self, besides: Set[int] = frozenset()) -> dict[int, Any]:
        """What is fetched again although nobody waits for it any more, besides these rooms.

        Returns rooms, and requests to the same P.
        """
        followers = self._cache.pending.followers
        flying = [c for c in self._copies if c.flying]
        return {c.refetch.room: c.req for c in flying if followers(c.refetch.room).keys() <= besides}

    def give_up(self, besides: Set[int] = frozenset()) -> None:
        """Others want the pool: what nobody waits for ends."""
        orphans = self.orphans(besides)
        for copy in [c for c in self._copies if c.refetch.room in orphans]:
            copy.given_up = True
            copy.receiver.abort()

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
        self._keep_landed([c.receiver for c, poll in zip(flying, polls, strict=True) if poll == KVPoll.Failed])
        for copy in [c for c, poll in zip(flying, polls, strict=True) if poll == KVPoll.Success]:
            self._cache.pending.progress(copy.refetch.room)
            self._cache.pending.end(copy.refetch.room)
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

    def _ask(self, copy: _Copy) -> None:
        """Tell P where to, and let it prefill that much of the prompt again (it has it cached)."""
        slots = self._queue.req_to_metadata_buffer_idx_allocator
        if slots.available_size() == 0:
            return  # next step
        copy.metadata_buffer_index = slots.alloc()
        page, refetch, req = self._cache.page_size, copy.refetch, copy.req
        pages = copy.row[refetch.start :].astype(np.int32)
        if copy.receiver.conclude_state == KVPoll.Failed:
            return  # P is not there; the poll will say so on all ranks
        copy.asked = time.monotonic()
        copy.receiver.send_metadata(pages, copy.metadata_buffer_index, [], decode_prefix_len=refetch.start * page)
        payload = req.build_rebootstrap_payload()
        payload["input_ids"] = [int(token) for token in req.origin_input_ids[: refetch.end * page]]
        least = min(self._cache.pending.followers(refetch.room).values())
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
        pending, room = self._cache.pending, copy.refetch.room
        pending.failed(room)
        asked = (copy.refetch.follower, *(pending.followers(room) if silent else ()))
        for name in dict.fromkeys(asked):
            follower = self._transfers.get(name)
            if follower is None or name not in pending or pending.ready(name):
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
        refetches = self._cache.pending.released(copy.refetch.room)
        self._let_go(copy)
        self.begin(refetches)

    def _let_go(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if self._landings is not None:
            self._landings.end(copy.refetch.room)
        self._cache.unlock(copy.lock)
        self._cache.cut(copy.req, copy.row)
        if copy.metadata_buffer_index >= 0:
            self._queue.metadata_buffers.clear_slot(copy.metadata_buffer_index)
            self._queue.req_to_metadata_buffer_idx_allocator.free(copy.metadata_buffer_index)
        copy.receiver.clear()
        copy.over = True  # first: the answer to its HTTP request may come at any time, see `recompute_failed`
        copy.forget()

    def _keep_landed(self, receivers: list[Any]) -> None:
        keep_landed(self._cache.pending, self._landings, receivers, self._queue.gloo_group)


def keep_landed(pending: Pending, landings: Landings | None, receivers: list[Any], group: Any) -> None:
    """These have failed, on all ranks: what has landed of them on all ranks stays."""
    if landings is None or not receivers:
        return
    pages = [landings.pages(receiver.bootstrap_room, _senders(receiver)) for receiver in receivers]
    pages = all_reduce_flags(pages, group, torch.distributed.ReduceOp.MIN)
    for receiver, landed in zip(receivers, pages, strict=True):
        pending.progress(receiver.bootstrap_room, landed)


def _senders(receiver: Any) -> int:
    """Ranks of P that send something to this rank; none if P was never reached."""
    return sum(not info["is_dummy"] for info in getattr(receiver, "bootstrap_infos", None) or ())


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
