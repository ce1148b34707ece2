"""`Late`: KV whose request has ended goes on for its prompt's sake, behind all others, until the pool is wanted."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import prepare_abort

from sglang_pdd.patches import ingress
from sglang_pdd.patches.prefixes import Prefixes
from sglang_pdd.protocol import Awaited

HEADROOM = 32  # tokens that each running request is to have room for; less, and late copies end


class Late:
    """SGLang's transfers of requests that have ended. They are still in its queue, which lets them land or fail.

    Args:
        gone: called with a transfer that goes on although its client has gone, before the client's output ends.
        tell: says a message to the prefill of a request.
    """

    def __init__(
        self,
        scheduler: Any,
        prefixes: Prefixes,
        gone: Callable[[Any], None],
        tell: Callable[[Any, Awaited], None],
    ) -> None:
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._gone = gone
        self._tell = tell
        self._transfers: list[Any] = []
        self._idle: dict[int, Any] = {}  # rooms for which nobody waits, as P knows, and requests to the same P

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def _queue(self) -> list[Any]:
        queue: list[Any] = self._scheduler.disagg_decode_transfer_queue.queue
        return queue

    def keep(self, transfer: Any) -> None:
        """Its answer is complete."""
        self._idle.pop(transfer.req.bootstrap_room, None)
        self._transfers.append(transfer)

    def aborted(self, rid: str, everybody: bool) -> list[Any]:
        """The client has gone. Returns the transfers that go on without it, since others wait for them.

        But only once P has sampled: it may be about to abort the request as well, and says nothing of that.
        """
        if everybody:
            self._prefixes.all_aborted()
            return []
        mine = [t for t in self._queue if t.req.rid.startswith(rid) and not t.req.finished()]
        kept = [t for t in mine if t.req.output_ids and self._prefixes.followed(t)]
        for transfer in kept:
            req = transfer.req
            prepare_abort(req, "Aborted by AbortReq.", HTTPStatus.INTERNAL_SERVER_ERROR)
            self._gone(transfer)
            self._scheduler.output_streamer.stream_output([req], req.return_logprob)
            self.keep(transfer)
        return kept

    def step(self, short: bool) -> None:
        """Once a step: P hears for whom nobody waits any more, or somebody again; they end if others wait for memory.

        Who has only just come may follow one of them; who waits for memory is seen waiting.

        Args:
            short: a request that has landed waits for memory.
        """
        here = {id(t) for t in self._queue}
        self._transfers = [t for t in self._transfers if id(t) in here]
        late = {t.req.bootstrap_room for t in self._transfers}
        idle = [t for t in self._transfers if not self._prefixes.followed(t, besides=late)]
        prealloc = self._scheduler.disagg_decode_prealloc_queue
        waiting = prealloc.retracted_queue or any(r.waiting_for_input for r in prealloc.queue)
        if short or waiting or self._is_tight():
            self._prefixes.refetches.give_up(besides=late)
            self._give_way(idle)
            told, self._idle = self._idle, {}
        else:
            told, self._idle = self._idle, {t.req.bootstrap_room: t.req for t in idle}
            self._idle |= self._prefixes.refetches.orphans(besides=late)
        for room in self._idle.keys() - told.keys():
            self._tell(self._idle[room], Awaited(room, False))
        for room in told.keys() - self._idle.keys():
            if self._prefixes.awaited(room, besides=late):
                self._tell(told[room], Awaited(room, True))

    def _is_tight(self) -> bool:
        """Will requests that run be retracted soon, for want of pages?"""
        pool, tree = self._scheduler.token_to_kv_pool_allocator, self._scheduler.tree_cache
        headroom = self._scheduler.running_batch.batch_size() * max(HEADROOM, pool.page_size)
        return bool(pool.available_size() + tree.evictable_size() < headroom)

    def hush(self, polls: list[int]) -> None:
        """P may have given some of these up, too: that is no error."""
        mine = {id(t) for t in self._transfers}
        for transfer, poll in zip(self._queue, polls, strict=True):
            if poll == KVPoll.Failed and id(transfer) in mine:
                transfer.kv_receiver.kv_mgr.failure_records.pop(transfer.req.bootstrap_room, None)

    def _give_way(self, idle: list[Any]) -> None:
        ended = {id(t) for t in idle}
        self._transfers = [t for t in self._transfers if id(t) not in ended]
        for transfer in idle:
            # P may still write into these pages: SGLang holds them until P acknowledges the abort.
            transfer.kv_receiver.abort()
            # With its reason taken away SGLang logs the end of this transfer as somebody else's, not as an error.
            transfer.kv_receiver.kv_mgr.failure_records.pop(transfer.req.bootstrap_room, None)


# --- hooks ------------------------------------------------------------------------------------------------------


def abort_request(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """Around ``Scheduler.abort_request``: it does not see the transfers that go on."""
    late: Late | None = getattr(ingress.seam, "late", None)
    kept = late.aborted(recv_req.rid, recv_req.abort_all) if late is not None else []
    if not kept:
        return original(scheduler, recv_req)
    transfers = scheduler.disagg_decode_transfer_queue
    spared = {id(t) for t in kept}
    queue, transfers.queue = transfers.queue, [t for t in transfers.queue if id(t) not in spared]
    try:
        original(scheduler, recv_req)
    finally:
        transfers.queue = queue
