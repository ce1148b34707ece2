"""`Finder`: from a prefill's bootstrap address to its PDD endpoint, over HTTP, in the background."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from sglang_pdd.metrics import Counters, LogLimit
from sglang_pdd.protocol import MAX_TEXT, PROTOCOL

PATH = "/pdd"
TIMEOUT_S = 2.0
RETRY_S = (0.25, 5.0)  # first, and doubled up to
ABSENT_S = 30.0  # that prefill answers, but not with a PDD endpoint that we can use
MAX_ANSWER = 4096  # bytes
MAX_WANTED = 256  # addresses come with requests: a client must not make us ask without bound
WORKERS = 4  # so that one address that swallows packets does not hold up the others

_IN_PROGRESS = float("inf")
_log = logging.getLogger(__name__)


class DiscoveryError(Exception):
    """An answer that is of no use; ``cause`` is its label in the counters."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Found:
    bootstrap: str  # host:port
    endpoint: str  # tcp://host:port of the prefill's ROUTER
    public_key: str  # CURVE, "" without keys


class Finder:
    """Asks wanted addresses until each has answered. All methods return at once and may be called by any thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._limit = LogLimit(_log)
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._targets: dict[str, _Target] = {}
        self._workers: list[threading.Thread] = []
        self._closed = False

    def want(self, bootstrap: str) -> None:
        """Look for the prefill at ``host:port`` until it is found. Idempotent."""
        with self._change:
            if bootstrap in self._targets or self._closed:
                return
            if len(self._targets) >= MAX_WANTED and not self._make_room():
                self._counters.inc("discovery.errors", cause="too_many")
                self._limit.warning("too_many", f"prefill {bootstrap:.200}: {MAX_WANTED} others are known already")
                return
            self._targets[bootstrap] = _Target(due=time.monotonic())
            if len(self._workers) < WORKERS:
                worker = threading.Thread(target=self._work, name="pdd-finder", daemon=True)
                self._workers.append(worker)
                worker.start()
            self._change.notify()

    def found(self) -> list[Found]:
        """What was found since the last call."""
        results: list[Found] = []
        while True:
            try:
                results.append(self._found.get_nowait())
            except queue.Empty:
                return results

    def forget(self, bootstrap: str) -> None:
        """What was found is no longer true: look again. Nothing, if it was not found or never wanted."""
        with self._change:
            target = self._targets.get(bootstrap)
            if target is not None and target.found:
                self._targets[bootstrap] = _Target(due=time.monotonic())
                self._change.notify()

    def close(self) -> None:
        """End the background threads; waits no longer than one look-up takes. Idempotent."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for worker in self._workers:
            worker.join(2 * TIMEOUT_S)

    # --- the background -----------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        for bootstrap, target in self._targets.items():
            if not target.found:  # the longest sought; whoever still needs it wants it again
                del self._targets[bootstrap]
                return True
        return False

    def _work(self) -> None:
        while (due := self._next()) is not None:
            bootstrap, target = due
            try:
                found = look_up(bootstrap)
            except DiscoveryError as error:
                self._failed(bootstrap, error)
                absent = error.cause in ("absent", "version")
                self._again(target, ABSENT_S if absent else None)
            else:
                with self._change:
                    target.found = True
                self._found.put(found)

    def _next(self) -> tuple[str, _Target] | None:
        with self._change:
            while not self._closed:
                now = time.monotonic()
                bootstrap, target = min(self._targets.items(), key=lambda item: item[1].due)
                if target.due <= now:
                    target.due = _IN_PROGRESS
                    return bootstrap, target
                self._change.wait(None if target.due == _IN_PROGRESS else target.due - now)
            return None

    def _again(self, target: _Target, delay: float | None) -> None:
        with self._change:
            if delay is None:
                delay = target.retry_s
                target.retry_s = min(2 * delay, RETRY_S[1])
            target.due = time.monotonic() + delay
            self._change.notify()

    def _failed(self, bootstrap: str, error: DiscoveryError) -> None:
        self._counters.inc("discovery.errors", cause=error.cause)
        self._limit.warning(f"{bootstrap} {error.cause}", f"prefill {bootstrap:.200}: {error}")


@dataclass(slots=True)
class _Target:
    due: float  # when to ask (monotonic); infinite while being asked, and once found
    retry_s: float = field(default_factory=lambda: RETRY_S[0])
    found: bool = False


def look_up(bootstrap: str) -> Found:
    """Ask one prefill, once. Blocks for a few seconds at most.

    Raises:
        DiscoveryError: no answer, or none that is of use.
    """
    try:
        host, separator, port = bootstrap.rpartition(":")
        if not separator or not host or not 0 < int(port) < 65536:
            raise ValueError("expected host:port")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_S)
        try:
            connection.request("GET", PATH, headers={"Accept": "application/json"})
            response = connection.getresponse()
            body = response.read(MAX_ANSWER + 1)
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DiscoveryError("unreachable", f"{type(error).__name__}: {error}") from None
    if response.status == 404:
        raise DiscoveryError("absent", f"runs without PDD (no {PATH}); its requests are ordinary PD")
    if response.status != 200:
        raise DiscoveryError("bad_answer", f"GET {PATH} answered {response.status}")
    if len(body) > MAX_ANSWER:
        raise DiscoveryError("bad_answer", f"GET {PATH} answered more than {MAX_ANSWER} bytes")
    return _parse(bootstrap, body)


def _parse(bootstrap: str, body: bytes) -> Found:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise DiscoveryError("bad_answer", f"GET {PATH} did not answer JSON") from None
    if not isinstance(answer, dict):
        raise DiscoveryError("bad_answer", f"GET {PATH} did not answer an object")
    protocol, endpoint, public_key = (answer.get(key) for key in ("protocol", "endpoint", "public_key"))
    if type(protocol) is not int:
        raise DiscoveryError("bad_answer", f"GET {PATH} named no protocol version")
    if protocol != PROTOCOL:
        raise DiscoveryError(
            "version", f"protocol version {protocol}, expected {PROTOCOL}: run the same sglang-pdd on all roles"
        )
    if not isinstance(endpoint, str) or not isinstance(public_key, str) or len(endpoint + public_key) > MAX_TEXT:
        raise DiscoveryError("bad_answer", f"GET {PATH} answered without a usable endpoint and public_key")
    return Found(bootstrap, endpoint, public_key)
