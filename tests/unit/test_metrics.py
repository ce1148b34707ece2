import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from sglang_pdd import metrics
from sglang_pdd.metrics import CATALOG, Counters, LogLimit


def test_counters_and_gauges() -> None:
    counters = Counters()
    counters.inc("tokens.emitted", 3, source="P")
    counters.inc("tokens.emitted", source="P")
    counters.inc("tokens.emitted", source="RLD")
    counters.inc("tokens.wasted", 0)
    counters.set("relay.active", 5)
    counters.set("relay.active", 2)
    counters.set("peers", 1, role="main")
    assert counters.get("tokens.emitted", source="P") == 4 and counters.get("relay.opened") == 0
    assert counters.snapshot() == {
        "peers{role=main}": 1,
        "relay.active": 2,
        "tokens.emitted{source=P}": 4,
        "tokens.emitted{source=RLD}": 1,
        "tokens.wasted": 0,
    }
    assert json.loads(json.dumps(counters.snapshot())) == counters.snapshot()


def test_the_order_of_labels_does_not_matter() -> None:
    counters = Counters()
    counters.inc("relay.refused", a="1", b="2")
    counters.inc("relay.refused", b="2", a="1")
    assert counters.snapshot() == {"relay.refused{a=1,b=2}": 2}


def test_unknown_names_are_caught_in_tests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (Counters().inc, Counters().get, lambda name: Counters().set(name, 1)):
        with pytest.raises(AssertionError, match=r"tokens\.emited"):
            call("tokens.emited")
    monkeypatch.setattr(metrics, "_STRICT", False)
    counters = Counters()
    counters.inc("tokens.emited")
    assert counters.snapshot() == {"tokens.emited": 1}


def test_the_catalogue_explains_everything() -> None:
    assert all(name == name.lower() and len(text) > 10 and text[0].isupper() for name, text in CATALOG.items())
    flat = [name.replace(".", "_") for name in CATALOG]
    assert len(set(flat)) == len(flat)


def test_threads_lose_nothing() -> None:
    counters = Counters()

    def work() -> None:
        for _ in range(5000):
            counters.inc("messages.sent", kind="Ping")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {"messages.sent{kind=Ping}": 20_000}


def run(code: str, **env: str) -> str:
    """In a process of its own: prometheus_client's registry and mode are global."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout + done.stderr


USE = """
from sglang_pdd.metrics import Counters
one, two = Counters(prometheus=True), Counters(prometheus=True)
one.inc("tokens.emitted", 3, source="P")
two.inc("tokens.emitted", 2, source="P")
one.inc("relay.opened")
one.set("relay.active", 7)
one.set("relay.active", 4)
"""


def test_prometheus_mirror() -> None:
    pytest.importorskip("prometheus_client")
    out = run(USE + "import prometheus_client; print(prometheus_client.generate_latest().decode())")
    assert 'pdd_tokens_emitted_total{source="P"} 5.0' in out
    assert "pdd_relay_opened_total 1.0" in out
    assert "pdd_relay_active 4.0" in out
    assert f"# HELP pdd_relay_opened_total {CATALOG['relay.opened']}" in out


def test_prometheus_multiprocess_mode(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run(USE, **env)
    run(USE + 'one.set("relay.active", 9)', **env)
    out = run(
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())",
        **env,
    )
    assert 'pdd_tokens_emitted_total{source="P"} 10.0' in out
    assert "pdd_relay_active 9.0" in out


def test_a_mirror_that_fails_is_logged_once_and_counts_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # cannot be imported
    name = f"test.{uuid.uuid4().hex}"
    monkeypatch.setitem(CATALOG, name, "For this test")
    counters = Counters(prometheus=True)
    for _ in range(3):
        counters.inc(name)
    assert counters.get(name) == 3
    assert len(caplog.messages) == 1 and name in caplog.messages[0]


def test_log_limit(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limit = LogLimit(logging.getLogger("test"), 10.0, lambda: now[0])
    for text in "abc":
        limit.warning("x", text)
    limit.warning("y", "other")
    assert caplog.messages == ["a", "other"]
    now[0] = 9.9
    limit.warning("x", "d")
    now[0] = 10.0
    limit.warning("x", "e %s")
    assert caplog.messages[2:] == ["e %s (3 more of this kind suppressed)"]
    now[0] = 20.0
    limit.warning("x", "f")
    assert caplog.messages[3:] == ["f"]
    for i in range(5000):
        limit.warning(f"peer {i}", "g")
    assert len(limit._kinds) <= 1024
