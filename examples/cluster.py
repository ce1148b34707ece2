"""Whole serving clusters on one machine: a single server, stock prefill/decode, or PDD, with a router in front.

    with Cluster(kind="pdd", page_size=16).launch() as cluster:
        requests.post(f"{cluster.url}/generate", json=...)

Everything listens on free loopback ports, runs on the CPU reference platform, and is gone when the block ends, with its
temporary files.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import requests

from sglang_pdd.timeline import read as read_events

MODEL = Path(__file__).parent / "tiny" / "model"
HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
FAST_START = ("--skip-server-warmup", "--disable-cuda-graph", "--sleep-on-idle")  # idle schedulers spin otherwise
CPU_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32")
CPU_ENV = {
    "SGLANG_PLATFORM": "pdd_cpu",
    "OMP_NUM_THREADS": "1",
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    # Between unequal tensor-parallel sizes SGLang sends a block a token; by default Mooncake refuses so many at once.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}

Say = Callable[[str], None]


class ServerDied(RuntimeError):
    """A server ended, or did not come up; the text holds its log's tail."""


# --- one process ------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """One process and its children, in a process group of their own, with a log file."""

    name: str
    command: Sequence[str]
    url: str
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    timeline: Path | None = None
    pdd_port: int | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Spawn the process; `start_all` says when it serves."""
        assert not self.alive, f"{self.name} is running"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:  # a server that is started again goes on in the same log
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        _live.append(self)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the main process runs."""
        return self.process is not None and self.process.poll() is None

    def healthy(self) -> bool:
        """Whether it serves; raises `ServerDied` if it never will."""
        if not self.alive:
            raise ServerDied(f"{self.name} ended while starting; the end of {self.log}:\n{self.tail()}")
        try:
            return requests.get(self.url + self.health, timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def members(self) -> list[int]:
        """Ids of all living processes of the group."""
        return [] if self.process is None else _group_members(self.process.pid)

    def kill(self) -> None:
        """End the whole group at once, as a crash would."""
        self._signal_group(signal.SIGKILL)
        self._reap(STOP_TIMEOUT_S)

    def terminate(self) -> None:
        """Ask the main process to end in good order; `reap` waits for it."""
        if self.alive and self.process is not None:
            self.process.terminate()

    def reap(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Wait until the group is gone; kill what is left of it after `timeout` seconds."""
        if not self._reap(timeout):
            self.kill()
        if self in _live:
            _live.remove(self)

    def _reap(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while self.alive or self.members():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def _signal_group(self, number: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):  # all gone already
                os.killpg(self.process.pid, number)


_live: list[Server] = []


@atexit.register
def _kill_leftovers() -> None:
    for server in list(_live):
        server.kill()


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind the stack like Ctrl-C does, so that servers are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def start_all(servers: Sequence[Server], say: Say, timeout: float = START_TIMEOUT_S) -> None:
    """Start servers together and wait until all of them serve."""
    begin = time.monotonic()
    for server in servers:
        server.start()
    waiting = list(servers)
    next_word = begin + 10
    while waiting:
        for server in list(waiting):
            if server.healthy():
                waiting.remove(server)
                say(f"{server.name} is up after {time.monotonic() - begin:.0f} s")
        now = time.monotonic()
        if waiting and now > begin + timeout:
            tails = "\n".join(f"--- {server.log}\n{server.tail(20)}" for server in waiting)
            raise ServerDied(f"not up after {timeout:.0f} s: {_names(waiting)}\n{tails}")
        if waiting and now > next_word:
            next_word += 10
            say(f"starting {_names(waiting)} ({now - begin:.0f} s)")
        time.sleep(0.25)


def _names(servers: Sequence[Server]) -> str:
    return ", ".join(server.name for server in servers)


def _group_members(group: int) -> list[int]:
    """Processes of a group that still run (a zombie waits for its parent only)."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _parent, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # ended meanwhile
            if int(owner) == group and state != "Z":
                members.append(int(entry.name))
    return members


def free_port() -> int:
    """A port that nobody listens on, outside the ranges from which the kernel and Mooncake pick ports of their own."""
    while True:
        port = random.SystemRandom().randint(17001, 32000)
        if port in _handed_out:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _handed_out.add(port)
        return port


_handed_out: set[int] = set()


# --- a cluster --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """Where a role runs: the address it listens on, and what its command starts with to get there."""

    host: str = HOST
    prefix: Sequence[str] = ()


@dataclass(frozen=True)
class Cluster:
    """What to start. ``flags``, ``env`` and ``sites`` go by role: single, prefill, relay, main (also a stock decode),
    router."""

    kind: Literal["single", "stock", "pdd"]
    model: Path = MODEL
    prefills: int = 1
    relays: int = 1
    mains: int = 1
    router: Literal["rust", "mini-lb"] = "rust"
    page_size: int = 1
    overlap: bool = True
    tp: int = 1
    tps: Mapping[str, int] = field(default_factory=dict)  # by role, where it differs from ``tp``
    max_total_tokens: int = 40_000
    wan_rate_limit: str | None = None
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sites: Mapping[str, Site] = field(default_factory=dict)

    def site(self, role: str) -> Site:
        """Where a role runs: here, if nothing else is said."""
        return self.sites.get(role, Site())

    @contextmanager
    def launch(self, logs: Path | None = None, say: Say = print) -> Iterator[Running]:
        """Start it and stop it again. Logs and timelines go to ``logs`` and stay there, or else vanish."""
        with ExitStack() as stack:
            scratch = tempfile.TemporaryDirectory(prefix="pdd-", ignore_cleanup_errors=True)
            temp = Path(stack.enter_context(scratch))
            running = Running(self, logs or temp, temp, say)
            stack.callback(running.stop)
            running.start()
            yield running


class Running:
    """A cluster that has been started.

    Args:
        folder: for logs and timelines.
        temp: for what the servers leave behind; a short path, since it is also for their unix sockets.
    """

    def __init__(self, spec: Cluster, folder: Path, temp: Path, say: Say = print) -> None:
        self.spec, self.folder, self.temp, self.say = spec, folder, temp, say
        self.prefills: list[Server] = []
        self.relays: list[Server] = []
        self.mains: list[Server] = []
        self.single: Server | None = None
        self.router: Server | None = None
        self.bootstrap_ports: list[int] = []

    # -- life

    def start(self) -> None:
        """Start all workers together, then the router: it finds workers that already serve at once."""
        if self.spec.kind == "single":
            self.single = self._worker("single", 0, [])
        else:
            self.bootstrap_ports = [free_port() for _ in range(self.spec.prefills)]
            self.prefills = [self._prefill(i, port) for i, port in enumerate(self.bootstrap_ports)]
            self.mains = [self._main(i) for i in range(self.spec.mains)]
            if self.spec.kind == "pdd":
                self.relays = [self._relay(i) for i in range(self.spec.relays)]
        start_all(self.workers, self.say)
        if self.spec.kind != "single":
            self.router = self._router()
            start_all([self.router], self.say)
        if self.spec.kind == "pdd":
            self.wait_for_peers()

    def wait_for_peers(self, timeout: float = 30) -> None:
        """Wait until every prefill knows all living relays and mains: before that it serves stock PD."""
        expected = {"relay": sum(s.alive for s in self.relays), "main": sum(s.alive for s in self.mains)}
        end = time.monotonic() + timeout
        for server in self.prefills:
            while (known := self._known_peers(server)) != expected:
                if time.monotonic() > end:
                    raise ServerDied(f"{server.name} knows {known}, expected {expected}\n{server.tail()}")
                time.sleep(0.2)

    def _known_peers(self, prefill: Server) -> dict[str, int]:
        counters = self.state(prefill)["counters"]
        return {role: int(counters.get(f"peers{{role={role}}}", 0)) for role in ("relay", "main")}

    def terminate(self) -> None:
        """Ask everything to end; `stop` waits for it."""
        for server in self.servers:
            server.terminate()

    def stop(self) -> None:
        """Stop everything; none of its processes is left afterwards."""
        self.terminate()
        for server in self.servers:
            server.reap()
        left = {server.name: server.members() for server in self.servers if server.members()}
        assert not left, f"processes left: {left}"

    def restart(self, server: Server) -> None:
        """Start a server that was killed, on its old ports."""
        start_all([server], self.say)
        self.wait_for_peers()

    def add_relay(self) -> Server:
        """Start one more relay beside those that run."""
        server = self._relay(len(self.relays))
        self.relays.append(server)
        start_all([server], self.say)
        self.wait_for_peers()
        return server

    @property
    def workers(self) -> list[Server]:
        """All SGLang servers."""
        single = [] if self.single is None else [self.single]
        return single + self.prefills + self.relays + self.mains

    @property
    def servers(self) -> list[Server]:
        """The router, which should stop first, and all workers."""
        return ([] if self.router is None else [self.router]) + self.workers

    @property
    def url(self) -> str:
        """Where clients go."""
        front = self.single or self.router
        assert front is not None, "not started"
        return front.url

    # -- what can be observed

    def state(self, server: Server) -> dict[str, Any]:
        """The ``pdd`` section of a server's internal state."""
        info = requests.get(f"{server.url}/get_server_info", timeout=30).json()
        state: dict[str, Any] = info["internal_states"][0].get("pdd", {})
        return state

    def events(self, role: str) -> list[dict[str, Any]]:
        """The timeline written so far by all servers of a role, in order of time."""
        servers = {"prefill": self.prefills, "relay": self.relays, "main": self.mains}[role]
        files = [server.timeline for server in servers if server.timeline and server.timeline.exists()]
        events = [event for file in files for event in read_events(file)]
        return sorted(events, key=lambda event: event["t"])

    # -- commands

    def _prefill(self, index: int, bootstrap_port: int) -> Server:
        flags = ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        if self.spec.wan_rate_limit:
            flags += ["--pdd-wan-rate-limit", self.spec.wan_rate_limit]
        if self.spec.kind == "stock":
            return self._worker("prefill", index, ["--disaggregation-mode", "prefill", *flags])
        return self._worker("prefill", index, ["--pdd-role", "prefill", *flags], listens=True)

    def _relay(self, index: int) -> Server:
        return self._worker("relay", index, ["--pdd-role", "relay", "--pdd-prefills", self._prefill_addresses()])

    def _main(self, index: int) -> Server:
        if self.spec.kind == "stock":
            stock = ["--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"]
            return self._worker("main", index, stock)
        flags = ["--pdd-role", "main", "--pdd-prefills", self._prefill_addresses()]
        return self._worker("main", index, flags, listens=True)

    def _prefill_addresses(self) -> str:
        host = self.spec.site("prefill").host
        return ",".join(f"{host}:{port}" for port in self.bootstrap_ports)

    def _worker(self, role: str, index: int, flags: Sequence[str], listens: bool = False) -> Server:
        name, port, spec = f"{self.spec.kind}-{role}{index}", free_port(), self.spec
        site = spec.site(role)
        command = [*site.prefix, sys.executable, "-m", "sglang.launch_server", "--model-path", str(spec.model)]
        command += ["--host", site.host, "--port", str(port), "--max-total-tokens", str(spec.max_total_tokens)]
        command += ["--nccl-port", str(free_port())]  # SGLang would pick one that another server is about to take
        tp = spec.tps.get(role, spec.tp)
        command += ["--page-size", str(spec.page_size), "--tp", str(tp), *CPU_FLAGS, *FAST_START]
        command += [] if spec.overlap else ["--disable-overlap-schedule"]
        timeline = None
        if spec.kind == "pdd":
            timeline = self.folder / f"{name}.jsonl"
            command += ["--pdd-timeline", str(timeline)]
        env = {**CPU_ENV, "TMPDIR": str(self.temp)}
        # Else a request is lost now and then after five idle seconds; PDD sees to it by itself.
        if spec.kind != "pdd":
            env["SGLANG_TIMEOUT_KEEP_ALIVE"] = "120"
        if site.host != HOST:
            env["SGLANG_HOST_IP"] = site.host  # else SGLang finds one by itself, and there may be no route to it
        if tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(tp))
        env.update(spec.env.get(role, {}))
        pdd_port = free_port() if listens else None
        command += ["--pdd-port", str(pdd_port)] if listens else []
        command += [*flags, *spec.flags.get(role, ())]
        url, log = f"http://{site.host}:{port}", self.folder / f"{name}.log"
        return Server(name, command, url, log, env, timeline=timeline, pdd_port=pdd_port)

    def _router(self) -> Server:
        port, site = free_port(), self.spec.site("router")
        command = [*site.prefix, sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += ["--host", site.host, "--port", str(port), "--prometheus-port", str(free_port())]
        for server, bootstrap_port in zip(self.prefills, self.bootstrap_ports, strict=True):
            command += ["--prefill", server.url, str(bootstrap_port)]
        for server in self.mains:
            command += ["--decode", server.url]
        if self.spec.router == "mini-lb":
            command += ["--mini-lb", "--policy", "random"]
        else:
            command += ["--policy", "round_robin", "--disable-circuit-breaker", "--disable-retries"]
            command += ["--worker-startup-check-interval", "1", "--health-success-threshold", "1"]
        name = f"{self.spec.kind}-router"
        health = "/health" if self.spec.router == "mini-lb" else "/readiness"
        command += self.spec.flags.get("router", ())
        url, log = f"http://{site.host}:{port}", self.folder / f"{name}.log"
        return Server(name, command, url, log, {"TMPDIR": str(self.temp)}, health=health)
