"""A prefill outlives the KV copies in flight, a relay the relays it has.

The launcher has SGLang's TokenizerManager, which ends the server; the schedulers know what is left to do.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

_DRAIN_FILE = "PDD_DRAIN_FILE"
_DRAIN_SECONDS = "PDD_DRAIN_SECONDS"
_RANKS = 512
_SLOTS = _RANKS + 1
_COUNT = struct.Struct("=q")
_POLL = 0.25  # seconds


class Drain:
    """Memory that the launcher and its schedulers share: how much work is left, and whether the end is asked for.

    No lock: each writes numbers of its own, and an aligned 8-byte store does not tear.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SLOTS * _COUNT.size)

    @staticmethod
    def create() -> None:
        """In the launcher, before it starts the schedulers: they find it through the environment.

        A file of no folder: nothing is left of it, however the launcher ends.
        """
        handle = os.memfd_create("pdd-drain")
        os.truncate(handle, _SLOTS * _COUNT.size)
        os.environ[_DRAIN_FILE] = f"/proc/{os.getpid()}/fd/{handle}"

    @staticmethod
    def open() -> Drain | None:
        """The launcher's file, or None if there is none."""
        try:
            return Drain(os.environ[_DRAIN_FILE])
        except (KeyError, OSError):
            return None

    def set(self, work: int, rank: int = 0) -> None:
        """In a scheduler: so many copies or relays are left on tensor-parallel ``rank``."""
        _COUNT.pack_into(self._memory, rank * _COUNT.size, work)

    def get(self) -> int:
        """In the launcher: what is left on the rank that has most."""
        return max(count for (count,) in _COUNT.iter_unpack(self._memory[: _RANKS * _COUNT.size]))

    def begin(self) -> None:
        """In the launcher: nothing new is to be taken in."""
        _COUNT.pack_into(self._memory, _RANKS * _COUNT.size, 1)

    @property
    def begun(self) -> bool:
        """In a scheduler."""
        return bool(_COUNT.unpack_from(self._memory, _RANKS * _COUNT.size)[0])


async def finish_work(original: Callable[[Any], Awaitable[None]], manager: Any) -> None:
    """Around ``TokenizerManager.sigterm_watchdog``: wait, bounded, until no KV copy and no relay is left.

    A PDD prefill ends its HTTP response before the copy has left, and a relay has no HTTP requests at all, so stock
    SGLang, which waits for those only, would cut both off on a rolling restart. Everything else is left to
    ``original``, which finds nothing to wait for.
    """
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    while not manager.gracefully_exit:
        await asyncio.sleep(_POLL)
    drain = Drain.open()
    if drain is not None:
        drain.begin()
        await asyncio.sleep(_POLL)  # what the schedulers are taking in is not counted yet
    limit = _drain_seconds()
    deadline: float | None = None  # starts when the last HTTP request has ended
    while drain is not None and not _forced() and manager.server_status != ServerStatus.UnHealthy:
        left = drain.get()
        if not manager.rid_to_state:
            if left <= 0:
                break
            if deadline is None:
                deadline = time.monotonic() + limit
                logger.info("pdd: shutting down once %d KV copies or relays are done, in at most %.0f s", left, limit)
            elif time.monotonic() >= deadline:
                logger.warning("pdd: cutting off %d KV copies or relays, not done after %.0f s", left, limit)
                break
        await asyncio.sleep(_POLL)
    await original(manager)


def _drain_seconds() -> float:
    try:
        return max(0.0, float(os.environ.get(_DRAIN_SECONDS) or 60))
    except ValueError:
        logger.warning("pdd: %s=%s is no number of seconds: using 60", _DRAIN_SECONDS, os.environ[_DRAIN_SECONDS])
        return 60.0


def _forced() -> bool:
    return os.environ.get("SGL_FORCE_SHUTDOWN", "").lower() in ("1", "true")
