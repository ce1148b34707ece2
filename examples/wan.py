"""A WAN on one machine: two network namespaces, ``a`` and ``b``, joined by the emulator in ``wanem/``. Needs root.

    with Wan(rate_mbps=1000, delay_ms=10) as wan:
        server = wan.start("b", [sys.executable, "server.py", wan.address("b")])
        client = wan.start("a", [sys.executable, "client.py", wan.address("b")])
        wan.set("ab", loss=1e-3)

Afterwards the processes, the namespaces and the emulator are gone.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

SOURCE = Path(__file__).parent / "wanem" / "wanem.c"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0

Side = Literal["a", "b"]
Direction = Literal["ab", "ba", "both"]


class WanError(RuntimeError):
    """The link cannot be made or steered; the text says why."""


def obstacle() -> str | None:
    """Why there can be no emulated WAN here, in one line; None if nothing is in the way."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    missing = [tool for tool in ("ip", "gcc") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (on Debian: iproute2, gcc, libc6-dev)" if missing else None


def build() -> Path:
    """The emulator's binary, compiled at need.

    Raises:
        WanError: it does not compile.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-pdd"
    binary = cache / f"wanem-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        draft = cache / f".{binary.name}.{os.getpid()}"  # two programs may build at once
        command = ["gcc", "-O2", "-o", str(draft), str(SOURCE), "-lpthread"]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                raise WanError(f"{' '.join(command)}:\n{result.stderr}")
            draft.replace(binary)
        finally:
            draft.unlink(missing_ok=True)
    return binary


class Wan:
    """Both directions are alike until `set` changes one.

    Args:
        rate_mbps: 10^6 bits per second of Ethernet frames; 0: no limit.
        delay_ms: one way.
        queue_kb: of the bottleneck's tail-drop queue.
        mtu: bytes of an IP packet.
        realtime: give the emulator real-time priority where that is allowed, so that busy neighbours do not delay
            packets.
    """

    def __init__(
        self,
        rate_mbps: float,
        delay_ms: float,
        queue_kb: float = 4096,
        mtu: int = 1500,
        realtime: bool = False,
    ) -> None:
        self._settings = {"rate_mbps": rate_mbps, "delay_ms": delay_ms, "queue_kb": queue_kb}
        self._mtu = mtu
        self._realtime = realtime
        name = f"pdd-{os.getpid()}-{secrets.token_hex(3)}"
        self.namespaces: dict[Side, str] = {"a": f"{name}-a", "b": f"{name}-b"}
        self._folder: Path | None = None
        self._emulator: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[Any]] = []

    # -- life

    def __enter__(self) -> Wan:
        if reason := obstacle():
            raise WanError(reason)
        atexit.register(self.close)
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started here; idempotent."""
        for process in self._started:
            _end(process)
        self._started.clear()
        for namespace in self.namespaces.values():
            for pid in _ip("netns", "pids", namespace).stdout.split():  # what those processes have started
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        if self._emulator is not None:
            _end(self._emulator)
            self._emulator = None
        for namespace in self.namespaces.values():
            _ip("netns", "del", namespace)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.close)

    def _open(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pdd-wan-"))
        command = [str(build())]
        for side, namespace in self.namespaces.items():
            command += [f"-{side}", f"{namespace}:wan0:{self.address(side)}/24"]
        command += ["-c", str(self._folder / "ctl"), "-m", str(self._mtu)]
        command += [f"{key}={value:g}" for key, value in self._settings.items()]
        log = self._folder / "log"
        with log.open("wb") as file:
            self._emulator = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.stats()
                break
            except WanError as error:
                if self._emulator.poll() is not None or time.monotonic() > end:
                    raise WanError(f"the emulator did not start: {log.read_text() or error}") from None
            time.sleep(0.02)
        if self._realtime:
            with suppress(PermissionError):  # containers may forbid it
                for thread in os.listdir(f"/proc/{self._emulator.pid}/task"):
                    os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(50))

    # -- use

    @staticmethod
    def address(side: Side) -> str:
        """IP address of a side."""
        return {"a": "10.77.0.1", "b": "10.77.0.2"}[side]

    def command(self, side: Side, command: Sequence[str]) -> list[str]:
        """The same command, to be run on one side."""
        return ["ip", "netns", "exec", self.namespaces[side], *command]

    @contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """This thread, and what it starts meanwhile, are on one side."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/var/run/netns/{self.namespaces[side]}", os.O_RDONLY)
        try:
            _set_namespace(there)
            yield
        finally:
            _set_namespace(here)
            os.close(there)
            os.close(here)

    def start(self, side: Side, command: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a process on one side. It gets a session of its own: Ctrl-C reaches it through `close` only."""
        process = subprocess.Popen(self.command(side, command), start_new_session=True, **popen)
        self._started.append(process)
        return process

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End a process that `start` has started."""
        _end(process)
        self._started.remove(process)

    def set(self, direction: Direction = "both", **values: float) -> None:
        """Change ``rate_mbps``, ``delay_ms``, ``jitter_ms``, ``loss``, ``loss_burst``, ``queue_kb`` or ``down``."""
        answer = self._ask(" ".join(["set", direction, *(f"{key}={value:g}" for key, value in values.items())]))
        if answer.strip() != "ok":
            raise WanError(f"cannot set {values}")

    def set_congestion(self, name: str) -> None:
        """The congestion control of new connections over the link."""
        for side, namespace in self.namespaces.items():
            address = self.address(side)
            subnet = f"{address.rsplit('.', 1)[0]}.0/24"
            route = ["route", "replace", subnet, "dev", "wan0", "src", address, "congctl", name]
            if (result := _ip("-n", namespace, *route)).returncode != 0:
                raise WanError(f"no congestion control {name}: {result.stderr.strip()}")

    def stats(self) -> dict[str, Any]:
        """Settings and counters of ``ab`` and ``ba``; ``bytes`` are of IP packets."""
        stats: dict[str, Any] = json.loads(self._ask("stats"))
        return stats

    def reset(self) -> None:
        """Set the counters back to 0."""
        self._ask("reset")

    def _ask(self, line: str) -> str:
        assert self._folder is not None, "not open"
        try:
            with socket.socket(socket.AF_UNIX) as ctl:
                ctl.settimeout(5)
                ctl.connect(str(self._folder / "ctl"))
                ctl.sendall(line.encode() + b"\n")
                answer = b"".join(iter(lambda: ctl.recv(8192), b""))
        except OSError as error:
            raise WanError(f"the emulator does not answer: {error}") from None
        return answer.decode()


def ip_bytes(stats: dict[str, Any]) -> int:
    """Bytes of IP packets on the link in both directions, with the headers of segments that travelled merged."""
    header = 52  # IPv4, TCP, timestamps
    return sum(int(d["bytes"]) + (int(d["segs"]) - int(d["pk"])) * header for d in (stats["ab"], stats["ba"]))


def _set_namespace(file: int) -> None:
    if _LIBC.setns(file, 0) != 0:  # Python has it from 3.12 on
        raise WanError(f"cannot enter the network namespace: {os.strerror(ctypes.get_errno())}")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)
