"""What a prefill's launcher does for PDD: it publishes the PDD endpoint, and it outlives the KV copies in flight.

Both hooks run in the launcher, where SGLang's TokenizerManager and, in a thread, its bootstrap server live.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sglang_pdd.config import PddConfig
from sglang_pdd.keys import Keys
from sglang_pdd.protocol import PROTOCOL

logger = logging.getLogger(__name__)

_DRAIN_FILE = "PDD_DRAIN_FILE"
_DRAIN_SECONDS = "PDD_DRAIN_SECONDS"
_RANKS = 512
_COUNT = struct.Struct("=q")
_POLL = 0.25  # seconds


class Drain:
    """How many KV copies are in flight, told by the schedulers to the launcher through a small shared file.

    A file and no lock: each rank writes a number of its own, and an aligned 8-byte store does not tear.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RANKS * _COUNT.size)

    @staticmethod
    def create() -> None:
        """In the launcher, before it starts the schedulers: they find the file through the environment."""
        handle, path = tempfile.mkstemp(prefix="sglang-pdd-", suffix=".drain")
        os.truncate(handle, _RANKS * _COUNT.size)
        os.close(handle)
        atexit.register(Path(path).unlink, missing_ok=True)
        os.environ[_DRAIN_FILE] = path

    @staticmethod
    def open() -> Drain | None:
        """The launcher's file, or None if there is none."""
        try:
            return Drain(os.environ[_DRAIN_FILE])
        except (KeyError, OSError):
            return None

    def set(self, copies: int, rank: int = 0) -> None:
        """In a scheduler: ``copies`` are in flight on tensor-parallel ``rank``."""
        _COUNT.pack_into(self._memory, rank * _COUNT.size, copies)

    def get(self) -> int:
        """In the launcher: copies in flight on the rank that has most."""
        return max(count for (count,) in _COUNT.iter_unpack(self._memory[:]))


def add_route(_: None, server: Any) -> None:
    """After ``CommonKVBootstrapServer._setup_routes``: GET /pdd tells relays and main servers where to say Hello."""
    from aiohttp import web

    config = PddConfig.from_env()
    answer = {
        "protocol": PROTOCOL,
        "endpoint": config.endpoint,
        "public_key": Keys.load(config.keys).public if config.keys else "",
    }

    async def get_pdd(request: web.Request) -> web.Response:
        return web.json_response(answer)

    server.app.router.add_get("/pdd", get_pdd)


async def finish_copies(original: Callable[[Any], Awaitable[None]], manager: Any) -> None:
    """Around ``TokenizerManager.sigterm_watchdog``: wait, bounded, until no KV copy is in flight.

    A PDD prefill ends its HTTP response before the copy has left, so stock SGLang, which waits for HTTP requests only,
    would cut copies off on a rolling restart. Everything else is left to ``original``, which finds nothing to wait for.
    """
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    while not manager.gracefully_exit:
        await asyncio.sleep(_POLL)
    drain = Drain.open()
    limit = _drain_seconds()
    deadline: float | None = None  # starts when the last HTTP request has ended
    while drain is not None and not _forced() and manager.server_status != ServerStatus.UnHealthy:
        copies = drain.get()
        if not manager.rid_to_state:
            if copies <= 0:
                break
            if deadline is None:
                deadline = time.monotonic() + limit
                logger.info("pdd: shutting down once %d KV copies have left, in at most %.0f s", copies, limit)
            elif time.monotonic() >= deadline:
                logger.warning("pdd: cutting off %d KV copies, still in flight after %.0f s", copies, limit)
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
