"""P's sending by NIXL: what SGLang asks of the agent goes by stream, or in segments that can be paced and cancelled.

NIXL cannot take back what was posted. So of what goes over the WAN only a few segments are posted at a time: enough to
fill the round trip, and few enough to wait for when the room is cancelled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pdd.patches import streams
from sglang_pdd.patches.lanes import FREE_SEGMENT, Lane, get_lanes

IN_FLIGHT = 4  # segments
POLL = 0.0005  # seconds between two looks at a segment
SETTLE_S = 5.0  # as long as SGLang waits for the rest of what has failed

Ints = NDArray[np.int64]
Make = Callable[[slice], Any]


@dataclass(frozen=True, slots=True)
class _Places:
    """A list of NIXL's, and which addresses it means: rows of (address, length, device, stride, count)."""

    raw: Any
    runs: NDArray[np.uint64]
    peer: str = ""

    @staticmethod
    def of(raw: Any, rows: Any, peer: str = "") -> _Places:
        """``rows`` may also be of (address, length, device)."""
        table = np.asarray(rows, np.uint64)
        if table.shape[1] == 3:
            table = np.column_stack((table, np.zeros(len(table), np.uint64), np.ones(len(table), np.uint64)))
        return _Places(raw, table, peer)

    def at(self, indices: Any) -> tuple[Ints, Ints, Ints]:
        """(run, address, length) of each; ``indices`` count through all runs."""
        start, length, _, stride, count = self.runs.T.astype(np.int64)  # a wrapped address comes back as it was
        ends = np.cumsum(count)
        index = np.asarray(indices, np.int64)
        run = np.searchsorted(ends, index, side="right")
        return run, start[run] + (index - ends[run] + count[run]) * stride[run], length[run]

    def all(self) -> Ints:
        return np.arange(int(self.runs[:, 4].sum()))


@dataclass(slots=True)
class _Transfer:
    """What SGLang takes for a handle of NIXL's.

    Args:
        near, far: lists of places, and which of them.
        make: makes NIXL's own transfer of some of these.
    """

    peer: str
    near: tuple[_Places, Any]
    far: tuple[_Places, Any]
    make: Make
    whole: Any = None  # NIXL's own, of all of them
    posted: deque[tuple[Any, int]] = field(default_factory=deque)  # NIXL's own and their bytes, not known to be done
    failed: bool = False
    settled_by: float = 0.0  # it has failed; so long the rest of it has to end

    def segments(self, limit: int) -> Iterator[tuple[slice, int]]:
        """(blocks, bytes), at most ``limit`` of them if a block has not more."""
        places, indices = self.near
        ends = np.cumsum(places.at(indices)[2])
        start = sent = 0
        while start < len(ends):
            stop = max(start + 1, int(np.searchsorted(ends, sent + limit, side="right")))
            yield slice(start, stop), int(ends[stop - 1]) - sent
            start, sent = stop, int(ends[stop - 1])

    def blocks(self) -> tuple[list[int], list[int], list[int]]:
        """Source addresses, destination addresses, lengths; neighbours are one block."""
        near_run, near, length = self.near[0].at(self.near[1])
        far_run, far, _ = self.far[0].at(self.far[1])
        joined = (np.diff(near_run) == 0) & (np.diff(far_run) == 0)
        joined &= (np.diff(near) == length[:-1]) & (np.diff(far) == length[:-1])
        first = np.flatnonzero(np.append(True, ~joined)) if len(length) else np.arange(0)
        sizes = np.add.reduceat(length, first) if len(length) else length
        return near[first].tolist(), far[first].tolist(), sizes.tolist()


class Agent:
    """Stands before NIXL's agent. Only a manager's workers and its bootstrap thread call it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_xfer_descs(self, rows: Any, mem_type: str) -> _Places:
        return _Places.of(self._agent.get_xfer_descs(rows, mem_type), rows)

    def prep_xfer_dlist(self, peer: str, rows: Any, mem_type: str) -> _Places:
        """``rows``: an array of (address, length, device, stride, count), or what `get_xfer_descs` gave."""
        if isinstance(rows, _Places):
            return _Places(self._agent.prep_xfer_dlist(peer, rows.raw, mem_type), rows.runs, peer)
        return _Places.of(self._agent.prep_xfer_dlist(peer, rows, mem_type), rows, peer)

    def make_prepped_xfer(self, operation: str, near: _Places, near_at: Any, far: _Places, far_at: Any) -> _Transfer:
        def make(part: slice) -> Any:
            return self._agent.make_prepped_xfer(operation, near.raw, near_at[part], far.raw, far_at[part])

        return self._transfer(far.peer, (near, near_at), (far, far_at), make)

    def initialize_xfer(self, operation: str, near: _Places, far: _Places, peer: str) -> _Transfer:
        def make(_: slice) -> Any:
            return self._agent.initialize_xfer(operation, near.raw, far.raw, peer)

        transfer = self._transfer(peer, (near, near.all()), (far, far.all()), make)
        if transfer.whole is None and streams.lane_here() is None:
            transfer.whole = make(slice(None))  # metadata slots: too little to be cut
        return transfer

    def transfer(self, transfer: _Transfer) -> str:
        """Post it. What goes in segments has ended when this returns, well or badly, or was cancelled."""
        if (stream := streams.lane_here()) is not None:
            stream.note(*transfer.blocks())
            return "DONE"
        if transfer.whole is not None:
            state = self._agent.transfer(transfer.whole)
            transfer.posted.append((transfer.whole, 0))
            return str(state)
        lane = get_lanes().wan(transfer.peer)
        assert lane is not None, "its worker is this thread"
        self._send(lane, transfer)
        return "PROC"  # SGLang asks for more

    def check_xfer_state(self, transfer: _Transfer) -> str:
        """DONE, ERR or PROC. Raises if one segment has failed and another is still on its way after `SETTLE_S`: SGLang
        then never says that the pages are free."""
        states = [self._agent.check_xfer_state(handle) for handle, _ in transfer.posted]
        running = any(state not in ("DONE", "ERR") for state in states)
        failed = transfer.failed or "ERR" in states
        if failed and running:
            now = time.monotonic()
            transfer.settled_by = transfer.settled_by or now + SETTLE_S
            if now < transfer.settled_by:
                time.sleep(POLL)
                return "PROC"
            raise RuntimeError("a segment has failed while others are on their way")
        return "ERR" if failed else "PROC" if running else "DONE"

    def _transfer(self, peer: str, near: tuple[_Places, Any], far: tuple[_Places, Any], make: Make) -> _Transfer:
        transfer = _Transfer(peer, near, far, make)
        if streams.lane_here() is None and get_lanes().wan(peer) is None:
            transfer.whole = make(slice(None))
        return transfer

    def _send(self, lane: Lane, transfer: _Transfer) -> None:
        lanes = get_lanes()
        limit = lanes.segment if lanes.rate else FREE_SEGMENT // IN_FLIGHT
        clock = _Clock()
        for part, size in transfer.segments(limit):
            if not self._wait(lane, transfer, clock, IN_FLIGHT - 1) or not lanes.allow(lane, size):
                break
            handle = transfer.make(part)
            if not transfer.posted:
                clock.start()
            transfer.posted.append((handle, size))
            try:
                self._agent.transfer(handle)
            except Exception:
                lane.forget(lane.in_hand.room)
                raise
        if not self._wait(lane, transfer, clock, 0):
            lane.forget(lane.in_hand.room)

    def _wait(self, lane: Lane, transfer: _Transfer, clock: _Clock, most: int) -> bool:
        """Until at most so many segments are on their way; False: one has failed."""
        while len(transfer.posted) > most and not transfer.failed:
            handle, size = transfer.posted[0]
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception:
                state = "ERR"  # SGLang will see for itself
            if state == "DONE":
                transfer.posted.popleft()
                get_lanes().landed(lane, size, clock.lap())
            elif state == "ERR":
                transfer.failed = True
            else:
                time.sleep(POLL)
        return not transfer.failed


class _Clock:
    """Seconds that each of several segments in a row took of the link."""

    def start(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        last, self._last = self._last, time.monotonic()
        return self._last - last


# --- hooks ------------------------------------------------------------------------------------------------------


def stand_before(manager: Any) -> None:
    """Before ``NixlKVManager.register_buffer_to_engine``: the agent exists, and nothing was asked of it."""
    manager.agent = Agent(manager.agent)


def send_pages(original: Callable[..., Any], manager: Any, peer_name: str, *args: Any, **kwargs: Any) -> Any:
    """Around ``NixlKVManager.send_kvcache`` and ``send_kvcache_slice``."""
    handle, lane = original(manager, peer_name, *args, **kwargs), streams.lane_here()
    if lane is not None:
        lane.submit(peer_name, last=False)
    return handle


def send_metadata(original: Callable[..., Any], manager: Any, peer_name: str, *args: Any) -> Any:
    """Around ``NixlKVManager.send_aux``: the last of a room to one rank."""
    handle, lane = original(manager, peer_name, *args), streams.lane_here()
    if lane is not None:
        lane.submit(peer_name, last=True)
    return handle
