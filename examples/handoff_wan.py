"""Part A of `bench_handoff.py`: handing tokens over an emulated WAN, as KV and as token ids."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from samples import percentile
from wan import Side, Wan, ip_bytes

from sglang_pdd import keys
from sglang_pdd.protocol import Chunk, Tokens, encode

PEER = Path(__file__).parent / "handoff_peer.py"
PATIENCE_S = 180.0
RAMP_UP_S = 3.0
PACED_SHARE = 0.9  # of the link, for paced bulk traffic
POOL_TO_PAGES = 4  # a scattered transfer picks its pages from so many times as many
TUNED_LANES = 16  # Mooncake's maximum

Say = Callable[[str], None]
LinkState = Literal["idle", "paced", "saturated"]
Layout = Literal["merged", "scattered"]
Block = tuple[int, int, int, int]  # region, source offset, target offset, bytes


class PeerError(RuntimeError):
    """A process on the link ended or does not answer; the text holds the end of its log."""


# --- what is sent -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometry:
    """KV cache of a model: ``layers`` pairs of a K and a V buffer, in pages of ``page`` tokens."""

    name: str
    layers: int
    bytes_per_token: int
    page: int

    @property
    def regions(self) -> int:
        """Buffers: of each layer K and V."""
        return 2 * self.layers

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one buffer."""
        return self.page * max(1, round(self.bytes_per_token / self.regions))

    def pages(self, tokens: int) -> int:
        """Whole pages that hold so many tokens: SGLang sends no parts."""
        return -(-tokens // self.page)


def pick_pages(layout: Layout, count: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Source and target pages: neighbours in a fresh pool, or anywhere in a used one."""
    if layout == "merged":
        return list(range(count)), list(range(count))
    pool = range(count * POOL_TO_PAGES)
    return rng.sample(pool, count), rng.sample(pool, count)


def blocks(sources: Sequence[int], targets: Sequence[int], regions: int, page_bytes: int) -> list[Block]:
    """What SGLang hands to the transfer engine: a block for each run of pages that are neighbours on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if runs and source == runs[-1][0] + runs[-1][2] and target == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return [
        (region, source * page_bytes, target * page_bytes, length * page_bytes)
        for region in range(regions)
        for source, target, length in runs
    ]


@dataclass(frozen=True)
class Case:
    """One thing to hand over."""

    label: str
    tokens: int
    geometry: Geometry | None = None
    """None: as ids."""
    layout: Layout = "merged"
    lanes: int | None = None
    """Mooncake's TCP connections to a peer; None: as installed."""


def cases(tokens: int, tiny: Geometry, large: Geometry) -> list[Case]:
    """All series of part A."""
    return [
        Case(f"{tokens} token ids, one message", tokens),
        Case("1 token id, the message of one step", 1),
        Case("KV, fresh pool", tokens, tiny),
        Case("KV, fresh pool", tokens, large),
        Case(f"KV, fresh pool, {TUNED_LANES} lanes", tokens, large, lanes=TUNED_LANES),
        Case("KV, used pool", tokens, large, "scattered"),
        Case(f"KV, used pool, {TUNED_LANES} lanes", tokens, large, "scattered", lanes=TUNED_LANES),
    ]


def mooncake_environment(lanes: int | None) -> dict[str, str]:
    """Mooncake over TCP, as installed or with as many lanes and as long queues as it takes."""
    env = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
    if lanes is not None:
        env |= {
            "MC_TCP_LANES_PER_PEER": str(lanes),
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
            "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
            "MC_TRANSFER_TIMEOUT": "300",
        }
    return env


# --- the processes on the link ----------------------------------------------------------------------------------


class Peer:
    """`handoff_peer.py` in one role, on one side."""

    def __init__(self, wan: Wan, side: Side, role: str, setting: Mapping[str, Any], folder: Path, **env: str) -> None:
        self.role = role
        self._wan = wan
        self._log = folder / f"{role}.log"
        command = [sys.executable, str(PEER), role, json.dumps({"host": wan.address(side), **setting})]
        with self._log.open("ab") as log:
            self._process = wan.start(
                side,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def tell(self, fields: Mapping[str, Any]) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(fields) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error("has ended") from None

    def hear(self, name: str) -> dict[str, Any]:
        """The next line that has this field, or tells of progress.

        Raises:
            PeerError: the process has ended, or is silent.
        """
        while True:
            try:
                line = self._lines.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise self._error(f"is silent for {PATIENCE_S:.0f} s") from None
            if line is None:
                raise self._error("has ended")
            if line.startswith("{"):  # the engine may print, too
                heard: dict[str, Any] = json.loads(line)
                if name in heard or "done" in heard:
                    return heard

    def end(self) -> None:
        """End the process."""
        self._wan.end(self._process)

    def _error(self, what: str) -> PeerError:
        return PeerError(f"{self.role} {what}\n{self._log.read_text(errors='replace')[-2000:]}")


# --- measuring --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WanSetting:
    """How part A is run. ``rtt_ms`` is of the empty link."""

    rate_mbps: float
    rtt_ms: float
    queue_kb: float
    streams: int
    repeat: int
    pause_ms: float
    links: Sequence[LinkState]
    realtime: bool


def measure(setting: WanSetting, todo: Sequence[Case], say: Say) -> list[dict[str, Any]]:
    """Every case on every link: one row each, with all its samples in milliseconds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdd-handoff-")))
        keys.make(folder / "keys", ("rld", "md"))
        wan = stack.enter_context(
            Wan(setting.rate_mbps, setting.rtt_ms / 2, setting.queue_kb, realtime=setting.realtime)
        )
        rows = []
        for link in setting.links:
            with _bulk(wan, link, setting, folder, say):
                rows += [_measure_case(wan, case, link, setting, folder, say) for case in todo]
        return rows


@contextmanager
def _bulk(wan: Wan, link: LinkState, setting: WanSetting, folder: Path, say: Say) -> Iterator[None]:
    """Bulk traffic from A to B, as the link's name says."""
    if link == "idle":
        yield
        return
    pace = setting.rate_mbps * 1e6 / 8 * PACED_SHARE / setting.streams if link == "paced" else None
    sink = Peer(wan, "b", "bulk-receive", {}, folder)
    there = sink.hear("port")
    source = Peer(wan, "a", "bulk-send", {"to": wan.address("b"), "streams": setting.streams, "pace": pace}, folder)
    try:
        source.tell(there)
        source.hear("warm")
        time.sleep(RAMP_UP_S)
        wan.reset()
        time.sleep(1)
        say(f"{link}: {setting.streams} bulk streams move {wan.stats()['ab']['bytes'] * 8 / 1e6:.0f} Mbit/s")
        yield
    finally:
        source.end()
        sink.end()


@dataclass(frozen=True)
class _Plan:
    """The two processes of a case: roles of `handoff_peer.py` and what they are told."""

    facts: Mapping[str, Any]
    """For the row."""
    receiver: str
    place: str
    """A field of what the receiver says of where it listens."""
    sender: str
    near: Mapping[str, Any]
    far: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)


def _plan_ids(case: Case, folder: Path) -> _Plan:
    room = (1 << 63) - 1  # rooms are random 63-bit numbers
    size = len(encode(Tokens((Chunk(room, 0, tuple(range(case.tokens))),), load=1)))
    facts = {"kind": "ids", "model": "PDD", "content_bytes": size, "sent_bytes": size, "blocks": 1}
    near = {"tokens": case.tokens, "keys": str(folder / "keys" / "rld")}
    far = {"keys": str(folder / "keys" / "md")}
    return _Plan(facts, "ids-receive", "endpoint", "ids-send", near, far)


def _plan_kv(case: Case, shape: Geometry) -> _Plan:
    count = shape.pages(case.tokens)
    sources, targets = pick_pages(case.layout, count, random.Random(1))
    todo = blocks(sources, targets, shape.regions, shape.page_bytes)
    facts = {
        "kind": "kv",
        "model": shape.name,
        "content_bytes": case.tokens * shape.bytes_per_token,
        "sent_bytes": sum(length for *_, length in todo),
        "blocks": len(todo),
        "lanes": case.lanes,
    }
    pool = {"regions": shape.regions, "pool_pages": count * POOL_TO_PAGES, "page_bytes": shape.page_bytes}
    near: dict[str, Any] = {**pool, "blocks": todo}
    far: dict[str, Any] = {**pool, "target_pages": targets}
    return _Plan(facts, "kv-receive", "session", "kv-send", near, far, mooncake_environment(case.lanes))


def _measure_case(wan: Wan, case: Case, link: LinkState, setting: WanSetting, folder: Path, say: Say) -> dict[str, Any]:
    plan = _plan_ids(case, folder) if case.geometry is None else _plan_kv(case, case.geometry)
    name = f"{link}: {case.label} ({plan.facts['model']})"
    receiver = Peer(wan, "b", plan.receiver, plan.far, folder, **plan.env)
    common = {"repeat": setting.repeat, "pause_ms": setting.pause_ms, "seed": 1}
    sender = Peer(wan, "a", plan.sender, {**common, **plan.near}, folder, **plan.env)
    try:
        sender.tell(receiver.hear(plan.place))
        sender.hear("warm")
        wan.reset()
        began = time.monotonic()
        sender.tell({"go": True})
        sent = _follow(sender, name, setting.repeat, say)
        arrived = receiver.hear("arrived")["arrived"]
        seconds, stats = time.monotonic() - began, wan.stats()
    finally:
        sender.end()
        receiver.end()
    row = {"link": link, "case": case.label, "tokens": case.tokens, **plan.facts, **join(sent, arrived)}
    row["link_mbps"] = round(stats["ab"]["bytes"] * 8 / 1e6 / seconds, 1)
    row["ip_bytes"] = round(ip_bytes(stats) / len(sent)) if link == "idle" else None
    row["emulator_late_ms"] = max(stats[way]["late_max_us"] for way in ("ab", "ba")) / 1000
    result = f"median {percentile(row['ms'], 50):.1f} ms" if row["ms"] else "nothing arrived"
    say(f"{name}: {result}, {len(row['ms'])} of {len(sent)}")
    return row


def _follow(sender: Peer, name: str, repeat: int, say: Say) -> list[list[Any]]:
    """What was sent, with a word of progress now and then."""
    spoke = time.monotonic()
    while "sent" not in (heard := sender.hear("sent")):
        if time.monotonic() > spoke + 10:
            spoke = time.monotonic()
            say(f"{name}: {heard['done']}/{repeat}")
    sent: list[list[Any]] = heard["sent"]
    return sent


def join(sent: Sequence[Sequence[Any]], arrived: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Match what was sent, (index, time, ...), with what arrived, (index, time, intact): one-way times in ms.

    Warm-ups have arrived and were not sent; what was sent and did not arrive has failed.
    """
    by_index = {int(index): (float(at), bool(intact)) for index, at, intact in arrived}
    known = [(float(entry[1]), by_index[int(entry[0])]) for entry in sent if int(entry[0]) in by_index]
    return {
        "ms": [round((at - started) * 1000, 3) for started, (at, _) in known],
        "failed": len(sent) - len(known),
        "damaged": sum(not intact for _, (_, intact) in known),
    }
