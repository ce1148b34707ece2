import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_pdd import discovery
from sglang_pdd.discovery import DiscoveryError, Finder, Found, look_up
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import PROTOCOL

GOOD = {"protocol": PROTOCOL, "endpoint": "tcp://p:9310", "public_key": "k"}


class Prefill:
    """A bootstrap server whose answer can be changed."""

    def __init__(self) -> None:
        self.status, self.body = 200, json.dumps(GOOD).encode()
        self.asked: list[str] = []
        self.asked_at: list[float] = []
        prefill = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                prefill.asked_at.append(time.monotonic())
                prefill.asked.append(self.path)
                self.send_response(prefill.status)
                self.send_header("Content-Length", str(len(prefill.body)))
                self.send_header("Location", "/pdd")
                self.end_headers()
                self.wfile.write(prefill.body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.bootstrap = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    one = Prefill()
    yield one
    one.close()


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Finder]:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(discovery, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(discovery, "ABSENT_S", 0.15)
    one = Finder(Counters())
    yield one
    one.close()
    assert not any(worker.is_alive() for worker in one._workers)


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def gather(finder: Finder, n: int = 1, timeout_s: float = 5.0) -> list[Found]:
    got: list[Found] = []
    until(lambda: got.extend(finder.found()) or len(got) >= n, timeout_s)
    return got


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_found_once(finder: Finder, prefill: Prefill) -> None:
    assert finder.found() == []
    finder.want(prefill.bootstrap)
    finder.want(prefill.bootstrap)
    assert gather(finder) == [Found(prefill.bootstrap, "tcp://p:9310", "k")]
    finder.want(prefill.bootstrap)
    assert gather(finder, timeout_s=0.2) == []
    assert prefill.asked == ["/pdd"]


def test_forget_asks_again(finder: Finder, prefill: Prefill) -> None:
    finder.forget(prefill.bootstrap)  # never wanted
    finder.want(prefill.bootstrap)
    gather(finder)
    prefill.body = json.dumps({**GOOD, "endpoint": "tcp://p:9999"}).encode()
    finder.forget(prefill.bootstrap)
    assert gather(finder) == [Found(prefill.bootstrap, "tcp://p:9999", "k")]


def test_one_that_starts_later_is_found(finder: Finder) -> None:
    late = f"127.0.0.1:{closed_port()}"
    finder.want(late)
    assert until(lambda: finder._counters.get("discovery.errors", cause="unreachable") >= 3)
    before = finder._targets[late]
    finder.forget(late)  # nothing to forget: the wait between attempts stays
    assert finder._targets[late] is before
    prefill = Prefill()  # on another port: two are sought at the same time
    try:
        finder.want(prefill.bootstrap)
        assert [f.bootstrap for f in gather(finder)] == [prefill.bootstrap]
    finally:
        prefill.close()


def test_one_that_fails_is_asked_again_until_it_answers(finder: Finder, prefill: Prefill) -> None:
    prefill.status = 503
    finder.want(prefill.bootstrap)
    assert until(lambda: len(prefill.asked) >= 4)
    prefill.status = 200
    assert len(gather(finder)) == 1


def test_the_wait_doubles_up_to_its_cap(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    target = discovery._Target(due=0.0, retry_s=1.0)
    monkeypatch.setattr(discovery, "RETRY_S", (1.0, 5.0))
    waits = []
    for _ in range(5):
        finder._again(target, None)
        waits.append(round(target.due - time.monotonic(), 1))
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_one_without_pdd_is_asked_slowly(finder: Finder, prefill: Prefill, caplog: pytest.LogCaptureFixture) -> None:
    prefill.status = 404
    finder.want(prefill.bootstrap)
    assert until(lambda: len(prefill.asked) >= 3)
    assert prefill.asked_at[1] - prefill.asked_at[0] >= discovery.ABSENT_S
    prefill.status = 200
    assert len(gather(finder)) == 1
    assert len(caplog.messages) == 1 and "without PDD" in caplog.messages[0]
    assert finder._counters.get("discovery.errors", cause="absent") >= 2


def test_another_version_is_named_and_asked_slowly(
    finder: Finder, prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.body = json.dumps({"protocol": PROTOCOL + 1}).encode()
    finder.want(prefill.bootstrap)
    assert until(lambda: len(prefill.asked) >= 2)
    assert prefill.asked_at[1] - prefill.asked_at[0] >= discovery.ABSENT_S
    assert f"protocol version {PROTOCOL + 1}, expected {PROTOCOL}" in caplog.messages[0]
    assert finder.found() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff",
        b"[]",
        b"[" * 4000,
        b"{}",
        json.dumps({**GOOD, "protocol": "1"}).encode(),
        json.dumps({**GOOD, "protocol": True}).encode(),
        json.dumps({**GOOD, "endpoint": None}).encode(),
        json.dumps({**GOOD, "endpoint": "x" * 2000}).encode(),
        json.dumps({**GOOD, "public_key": 5}).encode(),
        json.dumps({**GOOD, "more": "x" * 5000}).encode(),
    ],
    ids=range(12),
)
def test_bad_answers(prefill: Prefill, body: bytes) -> None:
    prefill.body = body
    with pytest.raises(DiscoveryError) as caught:
        look_up(prefill.bootstrap)
    assert caught.value.cause == "bad_answer" and "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_redirects_are_not_followed(prefill: Prefill) -> None:
    prefill.status = 302
    with pytest.raises(DiscoveryError, match="302"):
        look_up(prefill.bootstrap)
    assert len(prefill.asked) == 1


@pytest.mark.parametrize(
    "bad", ["", "host", ":80", "h:x", "h:0", "h:99999", "h:-1", "a b:80", "h\r\nX: y:80", "ä" * 99 + ":8"]
)
def test_bad_addresses(bad: str) -> None:
    with pytest.raises(DiscoveryError) as caught:
        look_up(bad)
    assert caught.value.cause == "unreachable"


def test_one_that_accepts_and_says_nothing_does_not_hold_up_others(
    finder: Finder, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for host in ("127.0.0.1", "localhost"):
            finder.want(f"{host}:{silent.getsockname()[1]}")
        finder.want(prefill.bootstrap)
        began = time.monotonic()
        assert len(gather(finder)) == 1 and time.monotonic() - began < 0.6
        assert until(lambda: finder._counters.get("discovery.errors", cause="unreachable"))


def test_wanted_addresses_are_bounded(finder: Finder, prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_WANTED", 2)
    other = Prefill()
    try:
        finder.want(prefill.bootstrap)
        assert gather(finder)
        finder.want(f"127.0.0.1:{closed_port()}")
        finder.want(other.bootstrap)  # takes the place of the one that does not answer
        assert gather(finder) == [Found(other.bootstrap, "tcp://p:9310", "k")]
        finder.want("127.0.0.1:1")
        assert len(finder._targets) == 2
        assert finder._counters.get("discovery.errors", cause="too_many") == 1
    finally:
        other.close()


def test_a_closed_finder_starts_nothing() -> None:
    finder = Finder(Counters())
    finder.close()
    finder.close()
    finder.want("127.0.0.1:1")
    assert finder._workers == [] and finder.found() == []
