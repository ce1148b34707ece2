"""Counters and gauges of one node, with an optional mirror in Prometheus."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

CATALOG: dict[str, str] = {
    "messages.sent": "Messages handed to a connection, by kind",
    "messages.received": "Well-formed messages received, by kind",
    "messages.dropped": "Messages dropped, by cause "
    "(malformed, oversized, version, unknown_room, stale, held, no_route, full, unwelcome)",
    "connections.refused": "Handshakes refused because the client's key is not in the allow-list",
    "requests": "Requests prefilled, by pipeline (stock, P-MD, P-RLD-MD)",
    "relay.opened": "Relays opened",
    "relay.opened_late": "Of those, for requests that wait for another prefill, or for KV that is fetched again",
    "relay.refused": "Relays refused or not asked for, by reason",
    "relay.dropped": "Relays that ended before RLD had its copy, by why (landed: MD was faster)",
    "relay.active": "Relays open now (main decode: requests that wait for their KV)",
    "tokens.emitted": "Tokens emitted by main decode that another role computed, by source",
    "tokens.wasted": "Relayed tokens that main decode did not take (past the cut-off, of a paused engine, too late)",
    "tokens.duplicate": "Tokens received for a position already filled",
    "tokens.mismatch": "Tokens received that contradict the one already accepted",
    "tokens.held": "Tokens held back because an earlier position was missing",
    "handoffs": "Requests taken over, by mode (stock: at most one token to recompute, one-shot, catch-up)",
    "handoff.passes": "Extend passes, by kind (own; mixed: together with the running decodes)",
    "handoff.tokens": "Tokens recomputed in extend passes",
    "finished_before_landing": "Requests that finished from eager tokens before their KV landed",
    "drc.requests": "Requests by the share of their prompt that prefill had cached, by bin (percent; full: all it can)",
    "drc.prompt": "Tokens of these prompts, by bin",
    "drc.missed": "Tokens of these prompts that prefill had cached and main decode had not, by bin",
    "drc.followers": "Requests that share KV which is still on its way",
    "drc.shared": "Tokens of KV on its way that they share",
    "drc.refetched": "Tokens fetched again because the transfer that was to bring them failed",
    "drc.refetches_failed": "Transfers of such tokens that failed too",
    "drc.salvaged": "Tokens that had landed of transfers that were cut off, and stayed",
    "drc.kept": "Prompts that landed after their answer had ended, and were kept",
    "wan.bytes": "KV bytes sent over the WAN",
    "wan.demoted": "Copies to main decode that dropped behind all others because nobody waits for them",
    "wan.given_up": "Such copies that P ended, because others wanted its pool, or a link without streams",
    "wan.landings": "Transfers that landed whole",
    "wan.landing_error_ms": "Milliseconds by which they missed the prediction made when all was queued, summed",
    "stream.frames": "Frames sent, by peer and stream",
    "stream.bytes": "Payload bytes sent in frames, by peer and stream",
    "stream.retransmitted": "Frames sent again after their stream broke, by peer and stream",
    "stream.reconnects": "Streams that broke and were made anew, by peer and stream",
    "stream.unreachable": "Attempts to make a stream that failed, by peer and stream",
    "stream.rtt_ms": "Round-trip time, says the kernel, by peer and stream",
    "stream.segments_retransmitted": "TCP segments sent again on the present connection, by peer and stream",
    "stream.pacing": "Bytes/s to which the kernel paces a stream (0: no limit), by peer and stream",
    "stream.skipped": "Frames received and not written, by cause (duplicate, closed)",
    "stream.refused": "Streams refused or ended by a receiver, by cause (malformed, token, handshake, lost, bug)",
    "lan.bytes": "KV bytes sent over the LAN",
    "hooks.errors": "Exceptions caught in a hook, by hook",
    "peers": "Connected peers, by role",
    "discovery.errors": "Failed look-ups of a prefill's PDD endpoint, by cause",
    "timeline.errors": "Timeline events that could not be written",
}

Labels = tuple[tuple[str, str], ...]
Snapshot = dict[str, int | float]

# A misspelt name is an error where it can be fixed; a server must not die of it.
_STRICT = "pytest" in sys.modules

_log = logging.getLogger(__name__)


class Counters:
    """Monotonic counters and gauges under dotted names with optional labels. Thread-safe.

    With ``prometheus`` the counter ``a.b`` is mirrored as ``pdd_a_b_total`` and the gauge ``a.b`` as ``pdd_a_b`` in
    prometheus_client's default registry, if prometheus_client can be imported. It is imported at the first use,
    because its multiprocess mode is decided at import by ``PROMETHEUS_MULTIPROC_DIR``.
    """

    def __init__(self, *, prometheus: bool = False) -> None:
        self._values: dict[tuple[str, Labels], int | float] = {}
        self._lock = threading.Lock()
        self._mirrored = prometheus
        self._limit = LogLimit(_log, interval_s=3600.0)

    def inc(self, name: str, n: int | float = 1, /, **labels: str) -> None:
        """Add ``n`` >= 0 to a counter."""
        _check(name)
        key = (name, _sorted(labels))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + n
        if self._mirrored:
            self._mirror("counter", key, n)

    def set(self, name: str, value: int | float, /, **labels: str) -> None:
        """Set a gauge."""
        _check(name)
        key = (name, _sorted(labels))
        with self._lock:
            self._values[key] = value
        if self._mirrored:
            self._mirror("gauge", key, value)

    def get(self, name: str, /, **labels: str) -> int | float:
        """The present value, 0 if there is none."""
        _check(name)
        with self._lock:
            return self._values.get((name, _sorted(labels)), 0)

    def snapshot(self) -> Snapshot:
        """All values, under ``name`` or ``name{label=value,...}``."""
        with self._lock:
            items = list(self._values.items())
        return {_flat(name, labels): value for (name, labels), value in sorted(items)}

    def _mirror(self, kind: Literal["counter", "gauge"], key: tuple[str, Labels], value: int | float) -> None:
        name, labels = key
        try:
            metric = _prometheus(kind, name, tuple(k for k, _ in labels))
            child = metric.labels(*(v for _, v in labels)) if labels else metric
            child.inc(value) if kind == "counter" else child.set(value)
        except Exception as error:  # metrics must never stop the scheduler
            self._limit.warning(name, f"PDD metric {name} cannot be mirrored in Prometheus: {error}")


class LogLimit:
    """A logger for what a peer can cause at will: of each kind, one line at once, then at most one per interval."""

    def __init__(
        self, log: logging.Logger, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._interval = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (last logged, suppressed since)

    def warning(self, kind: str, text: str) -> None:
        """Log ``text``, or count it as suppressed and say so in the next line of its kind."""
        now = self._clock()
        with self._lock:
            last, suppressed = self._kinds.get(kind, (float("-inf"), 0))
            if now - last < self._interval:
                self._kinds[kind] = (last, suppressed + 1)
                return
            if len(self._kinds) >= 1024:  # kinds may name peers, and those come and go
                self._kinds.clear()
            self._kinds[kind] = (now, 0)
        self._log.warning("%s%s", text, f" ({suppressed} more of this kind suppressed)" if suppressed else "")


def _check(name: str) -> None:
    if _STRICT and name not in CATALOG:
        raise AssertionError(f"{name!r} is not in metrics.CATALOG")


def _sorted(labels: dict[str, str]) -> Labels:
    return tuple(labels.items()) if len(labels) < 2 else tuple(sorted(labels.items()))


def _flat(name: str, labels: Labels) -> str:
    return f"{name}{{{','.join(f'{k}={v}' for k, v in labels)}}}" if labels else name


@functools.cache  # a registry refuses a second metric of the same name, and there may be several Counters
def _prometheus(kind: Literal["counter", "gauge"], name: str, labels: tuple[str, ...]) -> Any:
    import prometheus_client

    flat, text = "pdd_" + name.replace(".", "_"), CATALOG.get(name, name)
    if kind == "counter":
        return prometheus_client.Counter(flat, text, labels)
    return prometheus_client.Gauge(flat, text, labels, multiprocess_mode="mostrecent")
