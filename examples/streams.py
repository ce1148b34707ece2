"""Many streaming requests at once, each with the times at which its tokens arrived.

What comes is stamped and kept as it is, and parsed when all is over, so that a crowd of streams does not delay the
stamps of the one that is looked at.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

SILENCE_S = 120.0

Arrival = tuple[float, int]
"""Unix time, and how many tokens came at once."""


class StreamError(RuntimeError):
    """The server answered with an error, or ended the stream early."""


def session() -> aiohttp.ClientSession:
    """Connections without a limit, one for each stream."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=1 << 20)


@dataclass
class Stream:
    """One greedy request to ``/generate``, which ends after ``max_new_tokens`` and not before."""

    rid: str
    prompt: str
    max_new_tokens: int
    sent: float = 0.0
    """Unix time."""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """What was read, and when."""

    async def run(self, client: aiohttp.ClientSession, url: str) -> None:
        """Send it and read the answer to its end. Cancelling hangs up.

        Raises:
            StreamError: the server answered with an error, or is silent.
        """
        sampling = {"temperature": 0, "max_new_tokens": self.max_new_tokens, "ignore_eos": True}
        body = {"rid": self.rid, "text": self.prompt, "sampling_params": sampling, "stream": True}
        self.sent = time.time()
        try:
            async with client.post(f"{url}/generate", json=body) as response:
                if response.status != 200:
                    raise StreamError(f"{self.rid}: {response.status}: {(await response.text())[:500]}")
                async for chunk in response.content.iter_any():
                    self.chunks.append((time.time(), chunk))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StreamError(f"{self.rid}: {type(error).__name__} {error}") from None

    def arrivals(self) -> list[Arrival]:
        """When tokens came, and how many at once."""
        return arrivals(self.chunks)


def arrivals(chunks: Iterable[tuple[float, bytes]]) -> list[Arrival]:
    """Arrivals from what was read of a stream of server-sent events. Events that were read together are one arrival.

    Raises:
        StreamError: an event is an error.
    """
    found: list[Arrival] = []
    rest, total = b"", 0
    for at, chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        known = total
        for event in events:
            if event.startswith(b"data: {"):
                total = max(total, _tokens(json.loads(event[len(b"data: ") :])))
        if total > known:
            found.append((at, total - known))
    return found


def _tokens(reply: dict[str, Any]) -> int:
    """Tokens of the answer so far."""
    if "error" in reply:
        raise StreamError(str(reply["error"]))
    return int(reply["meta_info"]["completion_tokens"])
