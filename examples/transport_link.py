"""An emulated link with the processes of `transport_ends.py` on it, and what is measured there."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

from handoff_wan import mooncake_environment
from samples import percentile
from wan import Side, Wan

from sglang_pdd import keys

ENDS = Path(__file__).parent / "transport_ends.py"
PATIENCE_S = 180.0
RAMP_UP_S = 1.0
PACED_SHARE = 0.9  # of the link
PLAIN = (1, 4, 8)  # streams
BLOCKS = (4 << 10, 16 << 10, 64 << 10)
TLS_BLOCK = 64 << 10
ENGINES: dict[str, tuple[str, dict[str, str]]] = {  # role and environment
    "Mooncake": ("mooncake", mooncake_environment(None)),
    "Mooncake tuned": ("mooncake", mooncake_environment(16)),
    "NIXL": ("nixl", {"UCX_TLS": "tcp"}),
}
SMALL_PAGES, SMALL_EVERY_S, SMALL_COUNT = 1, 0.02, 200  # of each layer; between two; of each kind and repetition
COLD = 16 << 20  # bytes

Part = Literal["goodput", "ids", "mix", "rough", "engines"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One link, and what is measured on it. ``rtt_ms`` is of the empty link, ``loss`` of a segment."""

    part: Part
    rate_mbps: float
    rtt_ms: float
    loss: float = 0.0
    jitter_ms: float = 0.0
    congestion: str = "bbr"

    def __str__(self) -> str:
        more = f", {self.loss:.2g} lost" if self.loss else ""
        more += f", jitter {self.jitter_ms:g} ms" if self.jitter_ms else ""
        return f"{self.part}: {self.rate_mbps:g} Mbit/s, {self.rtt_ms:g} ms{more}, {self.congestion}"


@dataclass(frozen=True)
class Setting:
    """How all cells are measured. ``engine_s``: seconds that each kind of an engine gets."""

    mib: int
    reps: int
    streams: int
    ids_s: float
    engine_s: float
    busy: bool


class EndError(RuntimeError):
    """A process on the link has ended, or does not answer; the text holds the end of its log."""


class End:
    """`transport_ends.py` in one role, on one side."""

    def __init__(self, wan: Wan, side: Side, role: str, setting: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.role = role
        self._wan = wan
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this)
        self._process = wan.start(
            side,
            [sys.executable, str(ENDS), role, json.dumps({"host": wan.address(side), **setting})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **env},
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.hello = self.hear()

    def tell(self, do: str, **fields: Any) -> None:
        """A command whose answer `hear` gives."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        """
        Raises:
            EndError: the process has ended, or says nothing.
        """
        try:
            answer = self._answers.get(timeout=patience_s)
        except queue.Empty:
            raise EndError(f"{self.role} is silent for {patience_s:.0f} s{self._tail()}") from None
        if answer is None:
            raise EndError(f"{self.role} has ended{self._tail()}")
        return json.loads(answer)

    def ask(self, do: str, patience_s: float = PATIENCE_S, **fields: Any) -> Any:
        """Both."""
        self.tell(do, **fields)
        return self.hear(patience_s)

    def end(self) -> None:
        """End the process."""
        self._wan.end(self._process)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._answers.put(line[1:])
        self._answers.put(None)

    def _tail(self) -> str:
        self._log.seek(0)
        return "\n" + self._log.read().decode(errors="replace")[-2000:]


class Link:
    """The emulated link of a cell, with both ends of the transport at it."""

    def __init__(self, cell: Cell, setting: Setting) -> None:
        self.cell = cell
        self.setting = setting
        self.rooms = count(1)
        self._stack = ExitStack()

    def __enter__(self) -> Link:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdd-transport-"))
            keys.make(folder, ["p", "md"])
            cell = self.cell
            queue_kb = 4096 * max(1, cell.rate_mbps / 1000)
            self.wan = stack.enter_context(Wan(cell.rate_mbps, cell.rtt_ms / 2, queue_kb, realtime=True))
            self.wan.set("ab", loss=cell.loss, jitter_ms=cell.jitter_ms)
            self.wan.set_congestion(cell.congestion)
            self._common = {**asdict(self.setting), "keys": folder, "congestion": cell.congestion}
            self.target = self.start("b", "target")
            self.source = self.start("a", "source", there=self.target.hello)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, side: Side, role: str, env: Mapping[str, str] | None = None, **setting: Any) -> End:
        """One more process."""
        return End(self.wan, side, role, {**self._common, **setting}, env or {})

    def push(self, kind: str, block: int) -> dict[str, float]:
        """All memory by our streams. Raises `EndError` unless it has landed, and is what was sent."""
        room = next(self.rooms)
        self.target.ask("open", rooms=[room])
        before = self.target.ask("cpu")
        result = self.source.ask("push", kind=kind, room=room, block=block)
        used = self.target.ask("cpu") - before
        self.target.ask("close", rooms=[room])
        sums, ending = result.pop("sums"), result.pop("ending")
        if ending != "landed" or sums != self.target.ask("sums"):
            raise EndError(f"{kind}, blocks of {block} bytes: {ending}, or the bytes differ")
        return {**result, "cpu_recv": used}

    def saturated(self, rate: float | None, size: int) -> Saturated:
        return Saturated(self, rate, size)

    @property
    def paced(self) -> float:
        """Bytes/s."""
        return PACED_SHARE * self.cell.rate_mbps * 1e6 / 8


class Saturated:
    """While this is open, two transfers of so many bytes are always on their way."""

    def __init__(self, link: Link, rate: float | None, size: int) -> None:
        self.link, self.rate, self.size = link, rate, size
        self.rooms = [next(link.rooms) for _ in range(4000)]

    def __enter__(self) -> None:
        self.link.target.ask("open", rooms=self.rooms)
        self.link.source.ask("saturate", rooms=self.rooms, size=self.size, rate=self.rate)
        time.sleep(RAMP_UP_S)

    def __exit__(self, *_: object) -> None:
        enough = self.link.source.ask("rest")
        self.link.target.ask("close", rooms=self.rooms)
        if not enough:
            raise EndError("the link was not busy all the time")


class Engine:
    """A transfer engine of SGLang's at both ends; started anew when it is stuck."""

    def __init__(self, link: Link, role: str, env: Mapping[str, str]) -> None:
        self._link = link
        self._role = role
        self._env = env
        self._ends: tuple[End, End] | None = None

    def push(self, block: int, patience_s: float) -> dict[str, Any]:
        """All memory. ``s`` is None if it has failed, and why is said."""
        if self._ends is None:
            target = self._link.start("b", f"{self._role}-target", self._env)
            self._ends = target, self._link.start("a", f"{self._role}-source", self._env, there=target.hello)
        target, source = self._ends
        room = next(self._link.rooms)
        try:
            result = source.ask("push", patience_s, room=room, block=block)
        except EndError as error:
            self._ends = None
            source.end()
            target.end()
            return {"s": None, "why": f"> {patience_s:.0f} s" if "silent" in str(error) else "ended"}
        if result["ending"] != 0:
            return {"s": None, "why": f"error {result['ending']} after {result['s']:.1f} s"}
        if result["sums"] != target.ask("sums"):
            return {"s": None, "why": "the bytes differ"}
        return {"s": result["s"]}


# --- parts ------------------------------------------------------------------------------------------------------


def goodput(link: Link, say: Say) -> dict[str, Any]:
    """Each kind in turn, once more than ``reps`` times: the first push opens connections and windows. Seconds.

    Part ``engines`` has the kinds of SGLang's engines as well.
    """
    setting = link.setting
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        f"plain {n}": lambda n=n: link.source.ask("push_plain", streams=n)  # type: ignore[misc]
        for n in PLAIN
    }
    for block in BLOCKS:
        kinds[f"stream {block >> 10}K"] = lambda b=block: link.push("stream", b)  # type: ignore[misc]
    kinds["TLS"] = lambda: link.push("tls", TLS_BLOCK)
    theirs = set()
    for name, (role, env) in ENGINES.items() if link.cell.part == "engines" else ():
        if find_spec(role) is None:
            say(f"{name} is left out: it is not installed")
            continue
        engine = Engine(link, role, env)
        for block in reversed(BLOCKS):
            theirs.add(kind := f"{name} {block >> 10}K")
            kinds[kind] = lambda e=engine, b=block: e.push(b, setting.engine_s)  # type: ignore[misc]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for rep in range(setting.reps + 1):
        for name, kind in kinds.items():
            done = runs[name]
            if name in theirs and (
                any(run["s"] is None for run in done) or sum(run["s"] for run in done) > setting.engine_s / 2
            ):
                continue  # it is slow enough to be seen as such
            done.append(kind())
        say(f"round {rep} of {setting.reps}")
    return {"runs": runs}


def rough(link: Link, say: Say) -> dict[str, Any]:
    """Does everything arrive, and is it equal? (`Link.push` looks.)"""
    runs = {}
    for name, kind, block in (
        ("stream 4K", "stream", 4 << 10),
        ("stream 64K", "stream", 64 << 10),
        ("TLS", "tls", TLS_BLOCK),
    ):
        runs[name] = [link.push(kind, block) for _ in range(link.setting.reps)]
        say(f"{name}: {link.setting.reps} transfers are complete and equal")
    return {"runs": runs}


def ids(link: Link, say: Say) -> dict[str, Any]:
    """One-way milliseconds of a message of 100 token ids: on an idle link, and beside KV, paced and unpaced."""
    listener = link.start("b", "listener")
    speaker = link.start("a", "speaker", there=listener.hello)

    def delays() -> list[float]:
        link.wan.reset()
        listener.tell("listen")
        sent = speaker.ask("speak", seconds=link.setting.ids_s)
        arrived = listener.hear()
        if sent.keys() != arrived.keys():
            raise EndError(f"{len(sent)} messages were sent, {len(arrived)} have come")
        late.append(link.wan.stats()["ab"]["late_max_us"] / 1000)
        return [round(1000 * (arrived[index] - sent[index]), 3) for index in sent]

    late: list[float] = []
    series: dict[str, list[list[float]]] = {"idle": [], "paced": [], "unpaced": []}
    delays()  # connects
    late.clear()
    for rep in range(link.setting.reps):
        series["idle"].append(delays())
        for name, rate in (("paced", link.paced), ("unpaced", None)):
            with link.saturated(rate, COLD):
                series[name].append(delays())
        say(f"round {rep + 1} of {link.setting.reps}: P99 " + _p99(series))
    return {"ms": series, "late_ms": late}


def mix(link: Link, say: Say) -> dict[str, Any]:
    """One-way milliseconds from submission until all has landed of small transfers, alone and beside large ones, on a
    paced link."""
    series: dict[str, list[list[float]]] = {"alone": [], "beside cold": []}
    late: list[float] = []
    queued: list[float] = []

    def landings() -> list[float]:
        rooms = [next(link.rooms) for _ in range(SMALL_COUNT)]
        link.wan.reset()
        link.target.ask("open", rooms=rooms)
        begun = link.source.ask("trickle", rooms=rooms, pages=SMALL_PAGES, rate=link.paced, every_s=SMALL_EVERY_S)
        landed = link.target.ask("close", rooms=rooms)
        stats = link.wan.stats()["ab"]
        late.append(stats["late_max_us"] / 1000)
        queued.append(stats["qmax_kb"])
        return [round(1000 * (there - here), 3) for here, there in zip(begun, landed, strict=True)]

    landings()  # connects
    late.clear()
    queued.clear()
    for rep in range(link.setting.reps):
        series["alone"].append(landings())
        with link.saturated(link.paced, COLD):
            series["beside cold"].append(landings())
        say(f"round {rep + 1} of {link.setting.reps}: P99 " + _p99(series))
    return {"ms": series, "late_ms": late, "queue_kb": queued}


def _p99(series: Mapping[str, list[list[float]]]) -> str:
    return ", ".join(f"{name} {percentile(runs[-1], 99):.1f} ms" for name, runs in series.items())


PARTS: dict[Part, Callable[[Link, Say], dict[str, Any]]] = {
    "goodput": goodput,
    "ids": ids,
    "mix": mix,
    "rough": rough,
    "engines": goodput,
}
