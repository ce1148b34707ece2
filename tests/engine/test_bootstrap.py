"""A stopping prefill waits for its copies, bounded; GET /pdd answers."""

import asyncio
import json
import os
import subprocess
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest

from sglang_pdd.config import FLAGS
from sglang_pdd.patches import bootstrap, drain
from sglang_pdd.patches.drain import Drain
from sglang_pdd.protocol import PROTOCOL


class ServerStatus(Enum):
    Up = 1
    UnHealthy = 2


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    module = ModuleType("sglang.srt.managers.tokenizer_manager")
    module.ServerStatus = ServerStatus
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(drain, "_POLL", 0.005)
    for name in ("PDD_DRAIN_FILE", "PDD_DRAIN_SECONDS", "SGL_FORCE_SHUTDOWN", *(flag.variable for flag in FLAGS)):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def manager(**state):
    return SimpleNamespace(gracefully_exit=True, rid_to_state={}, server_status=ServerStatus.Up, **state)


async def exits(server) -> bool:
    """Whether SGLang's own shutdown has been reached 50 ms from now."""
    reached = asyncio.Event()

    async def original(_):
        reached.set()

    task = asyncio.create_task(drain.finish_work(original, server))
    await asyncio.sleep(0.05)
    task.cancel()
    return reached.is_set()


def test_drain_is_shared_with_other_processes():
    Drain.create()
    code = "from sglang_pdd.patches.drain import Drain; d = Drain.open(); d.set(2); d.set(5, rank=7); d.set(0, rank=8)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Drain.open().get() == 5
    Drain.open().set(0, rank=7)
    assert Drain.open().get() == 2


def test_no_drain_file():
    assert Drain.open() is None
    os.environ["PDD_DRAIN_FILE"] = "/no/such/file"
    assert Drain.open() is None
    assert asyncio.run(exits(manager()))


def test_waits_for_copies_and_for_sigterm():
    Drain.create()
    running = manager()
    running.gracefully_exit = False
    assert not asyncio.run(exits(running))
    assert asyncio.run(exits(manager()))
    Drain.open().set(1)
    assert not asyncio.run(exits(manager()))
    Drain.open().set(0)
    assert asyncio.run(exits(manager()))


def test_waits_no_longer_than_allowed(monkeypatch):
    Drain.create()
    Drain.open().set(1)
    monkeypatch.setenv("PDD_DRAIN_SECONDS", "0.01")
    assert asyncio.run(exits(manager()))


def test_the_time_starts_when_the_last_http_request_has_ended(monkeypatch):
    Drain.create()
    monkeypatch.setenv("PDD_DRAIN_SECONDS", "0.01")
    busy = manager()
    busy.rid_to_state = {"a": 1}
    assert not asyncio.run(exits(busy))  # SGLang would wait for it as well


@pytest.mark.parametrize("hurry", ["unhealthy", "forced"])
def test_exits_at_once_where_sglang_does(hurry, monkeypatch):
    Drain.create()
    Drain.open().set(1)
    server = manager()
    if hurry == "forced":
        monkeypatch.setenv("SGL_FORCE_SHUTDOWN", "true")
    else:
        server.server_status = ServerStatus.UnHealthy
    assert asyncio.run(exits(server))


def test_route(monkeypatch):
    web = pytest.importorskip("aiohttp.web")
    monkeypatch.setenv("PDD_ROLE", "prefill")
    monkeypatch.setenv("PDD_ADVERTISE", "10.0.0.1")
    server = SimpleNamespace(app=web.Application())
    bootstrap.add_route(None, server)
    (resource,) = server.app.router.resources()
    (route,) = [route for route in resource if route.method == "GET"]
    answer = json.loads(asyncio.run(route.handler(None)).body)
    assert answer == {"protocol": PROTOCOL, "endpoint": "tcp://10.0.0.1:9310", "public_key": ""}
    assert resource.canonical == "/pdd"
