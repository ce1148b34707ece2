"""When will a prompt's KV have landed, is that too late, and who could hide the wait."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal

RelayPolicy = Literal["auto", "always", "never"]

DEFAULT_BANDWIDTH = 125e6  # bytes/s (1 Gbit/s), assumed until something has been measured: low, so that relays open
MEMORY_S = 5.0  # sending time after which a measurement weighs half


class LinkEstimate:
    """Bandwidth and backlog of the link from P to the main decodes. Thread-safe.

    The bandwidth is what was measured, but no more than the configured limit; before any measurement it is the limit,
    or `DEFAULT_BANDWIDTH`.
    """

    def __init__(self, limit_bytes_per_s: float | None = None, rtt_s: float = 0.0) -> None:
        self._limit = limit_bytes_per_s
        self._rtt = rtt_s
        self._lock = threading.Lock()
        self._backlog = 0
        self._bytes = 0.0  # decayed sums: their ratio is a mean in which a long send weighs more than a short one
        self._seconds = 0.0

    def queued(self, n: int) -> None:
        """``n`` bytes wait to be sent."""
        with self._lock:
            self._backlog += n

    def sent(self, n: int, seconds: float, queued: int | None = None) -> None:
        """``n`` bytes were sent, which kept the link busy for ``seconds`` (not counting idle time).

        ``queued`` of them (default: all) were in the backlog until now.
        """
        with self._lock:
            self._backlog = max(0, self._backlog - (n if queued is None else queued))
            if n > 0 and seconds > 0:
                decay = 0.5 ** (seconds / MEMORY_S)
                self._bytes = self._bytes * decay + n
                self._seconds = self._seconds * decay + seconds

    def dropped(self, n: int) -> None:
        """``n`` of the queued bytes will not be sent."""
        with self._lock:
            self._backlog = max(0, self._backlog - n)

    @property
    def backlog(self) -> int:
        """Bytes queued and not sent."""
        with self._lock:
            return self._backlog

    @property
    def bandwidth(self) -> float:
        """Bytes/s."""
        with self._lock:
            return self._bandwidth()

    def landing_ms(self, missing_bytes: int) -> float:
        """Milliseconds until ``missing_bytes`` more, queued now behind the backlog, have arrived."""
        with self._lock:
            return ((self._backlog + missing_bytes) / self._bandwidth() + self._rtt / 2) * 1000

    def _bandwidth(self) -> float:
        if self._seconds > 0:
            measured = self._bytes / self._seconds
            return measured if self._limit is None else min(measured, self._limit)
        return DEFAULT_BANDWIDTH if self._limit is None else self._limit


class Hysteresis:
    """Is a noisy number above a threshold? Says so again and again as long as it stays within a band around it."""

    def __init__(self, threshold: float, band: float = 0.2) -> None:
        """``band``: how far, as a share of the threshold, the number must be on the other side to change the answer."""
        if threshold < 0 or not 0 <= band < 1:
            raise ValueError(f"threshold {threshold} must not be negative, band {band} must be in [0, 1)")
        self._low, self._high = threshold * (1 - band), threshold * (1 + band)
        self._threshold = threshold
        self._above: bool | None = None

    def above(self, value: float) -> bool:
        if self._above is None:
            self._above = value > self._threshold
        elif self._above:
            self._above = value > self._low
        else:
            self._above = value > self._high
        return self._above


def relay_wanted(policy: RelayPolicy, late: bool) -> bool:
    """Is a relay worth opening? ``late``: the KV is predicted to land late.

    Raises:
        ValueError: an unknown policy.
    """
    if policy == "auto":
        return late
    if policy not in ("always", "never"):
        raise ValueError(f"relay policy {policy!r}: expected auto, always or never")
    return policy == "always"


def choose_relay(candidates: Mapping[str, tuple[int, int]]) -> str | None:
    """The least loaded of ``node -> (load, capacity)``, or None if all are full.

    A tie goes to the smaller load, then to the smaller id.
    """
    free = [(load / capacity, load, node) for node, (load, capacity) in candidates.items() if load < capacity]
    return min(free)[2] if free else None
