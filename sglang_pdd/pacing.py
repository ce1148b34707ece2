"""How fast the WAN may be used: rates, a token bucket, and pieces small enough to pace, preempt and cancel."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

SLICE_S = 0.05  # a cancelled sender notices within this time

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kKmMgGtT]?)(i?)(bit|BIT|Bit|B|)")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_rate(text: str) -> float:
    """A rate in bytes/s from ``1gbit``, ``200mbit``, ``25MB`` or ``1000000``.

    As in tc, ``bit`` units and a bare number are bits per second, prefixes are powers of 1000, and ``ki mi gi ti`` are
    powers of 1024. ``B`` (capital) is bytes per second. tc's ``mbps`` (which means megabytes) and ``mb`` are refused,
    because half of all people read them as bits.

    Raises:
        ValueError: not a positive rate in these units.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or (match[2] and not match[4]) or (match[3] and not match[2]):
        raise ValueError(f"bad rate {text!r}: write e.g. 1gbit or 200mbit (bits/s), 25MB (bytes/s), 1000000 (bits/s)")
    rate: float = float(match[1]) * (1024 if match[3] else 1000) ** _POWER[match[2].lower()]
    if not 0 < rate < math.inf:
        raise ValueError(f"bad rate {text!r}: must be positive and finite")
    return rate if match[4] == "B" else rate / 8


class TokenBucket:
    """Lets ``rate`` bytes/s through, and at most ``burst`` bytes at once after a pause.

    Thread-safe; first come, first served.
    """

    def __init__(
        self,
        rate_bytes_per_s: float,
        burst_bytes: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (0 < rate_bytes_per_s < math.inf and 0 < burst_bytes < math.inf):
            raise ValueError(f"rate {rate_bytes_per_s} and burst {burst_bytes} must be positive and finite")
        self.rate = float(rate_bytes_per_s)
        self.burst = float(burst_bytes)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tokens = self.burst  # negative: a debt, left by a piece larger than the burst
        self._filled_at = clock()
        self._queue: dict[object, int] = {}  # who waits, in order, and for how many bytes

    def take(self, n: int, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Wait until ``n`` bytes may be sent; False if cancelled first, which takes nothing.

        ``n`` may exceed the burst: it then waits for a full bucket and leaves a debt.

        Raises:
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} bytes")
        ticket = object()
        with self._lock:
            self._queue[ticket] = n
        try:
            while not cancelled():
                wait = self._try(ticket, n)
                if wait <= 0:
                    return True
                self._sleep(min(max(wait, 1e-4), SLICE_S))  # a shorter sleep need not advance the clock
            return False
        finally:
            with self._lock:
                self._queue.pop(ticket, None)

    def _try(self, ticket: object, n: int) -> float:
        """Seconds to wait for this ticket; 0 if it has been served."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self.burst, self._tokens + (now - self._filled_at) * self.rate)
            self._filled_at = now
            need = min(n, self.burst)
            for other, bytes_ahead in self._queue.items():
                if other is ticket:
                    break
                need += bytes_ahead
            if self._tokens >= need:
                self._tokens -= n
                del self._queue[ticket]
                return 0.0
            return max((need - self._tokens) / self.rate, 1e-4)


def segments(lengths: Sequence[int], limit: int, most: int = 1 << 30) -> Iterator[list[tuple[int, int, int]]]:
    """Cut blocks, in order, into segments of at most ``limit`` bytes and ``most`` pieces: (block, offset, length) each.

    A block that fits into a segment is never split. Empty blocks are left out.

    Raises:
        ValueError: ``limit`` or ``most`` < 1, or a negative length.
    """
    if limit < 1 or most < 1 or any(length < 0 for length in lengths):
        raise ValueError(f"limit {limit}, most {most} and all lengths must be positive")
    segment: list[tuple[int, int, int]] = []
    room = limit
    for block, length in enumerate(lengths):
        offset = 0
        while offset < length:
            if segment and (room == 0 or room < length - offset or len(segment) == most):
                yield segment
                segment, room = [], limit
            piece = min(length - offset, room)
            segment.append((block, offset, piece))
            offset += piece
            room -= piece
    if segment:
        yield segment
