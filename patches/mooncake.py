"""P's sending by Mooncake: a call for each segment, since a call cannot be paced or cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.base import KVPoll

from sglang_pdd.pacing import segments
from sglang_pdd.patches import streams
from sglang_pdd.patches.lanes import Lanes, get_lanes

Block = tuple[int, int, int]  # source address, destination address, bytes

MOST_BLOCKS = 1024  # in one call: of a few thousand at once Mooncake's TCP refuses all


def transfer(lanes: Lanes, send: Callable[[list[Block]], int], session: str, blocks: list[Block]) -> int:
    """Send blocks in segments. Returns 0 also when the room was cancelled: nothing is in flight then."""
    lane = lanes.wan(session)
    if lane is None:
        parts = range(0, len(blocks), MOST_BLOCKS)
        return next((status for i in parts if (status := send(blocks[i : i + MOST_BLOCKS])) != 0), 0)
    for part in segments([length for _, _, length in blocks], lanes.segment, MOST_BLOCKS):
        size = sum(length for _, _, length in part)
        if not lanes.allow(lane, size):
            return 0
        started = time.monotonic()
        status = send([(blocks[i][0] + offset, blocks[i][1] + offset, n) for i, offset, n in part])
        if status != 0:
            lane.forget(lane.in_hand.room)
            return status
        lanes.landed(lane, size, time.monotonic() - started)
    return 0


# --- hooks ------------------------------------------------------------------------------------------------------


def batch_transfer(
    original: Callable[..., int],
    engine: Any,
    session_id: str,
    buffers: list[int],
    peer_buffer_addresses: list[int],
    lengths: list[int],
) -> int:
    """Around ``MooncakeTransferEngine.batch_transfer_sync``: by stream, or paced and cancellable on the WAN."""

    if not lengths:
        return 0
    if (lane := streams.lane_here()) is not None:
        lane.note(buffers, peer_buffer_addresses, lengths)
        return 0

    def send(blocks: list[Block]) -> int:
        sources, destinations, sizes = zip(*blocks, strict=True)
        return original(engine, session_id, list(sources), list(destinations), list(sizes))

    return transfer(get_lanes(), send, session_id, list(zip(buffers, peer_buffer_addresses, lengths, strict=True)))


def check_status(original: Callable[..., Any], manager: Any, bootstrap_room: int) -> Any:
    """Around ``CommonKVManager.check_status``: a room that is cleared while a worker asks for it is over.

    The worker looks whether the room is known, and then at its status; between the two the scheduler may clear it, and
    the exception would end the worker, and with it whatever is queued there.
    """
    try:
        return original(manager, bootstrap_room)
    except KeyError:
        if threading.current_thread() is threading.main_thread():
            raise
        return KVPoll.Success
