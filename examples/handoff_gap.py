"""Part B of `bench_handoff.py`: what a relayed request and its neighbours on main decode feel of the handoff."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import requests
import tasks
from cluster import Cluster, Running
from demo import kv_bytes_per_token
from plugin import install
from samples import gaps, median_gap, worst_gap, worst_gap_outside
from streams import Arrival, Stream, StreamError, session

from sglang_pdd.pacing import parse_rate

NONE = "none"
"""The mode without a handoff: an ordinary prefill-decode request, for the floor."""
CROWD_PROMPT_TOKENS = 16
CROWD_MAX_NEW_TOKENS = 6000
CROWD_POOL_TOKENS = 2048  # of main decode's pool, for each other request
CROWD_WARM_CHUNKS = 4
SETTLE_S = 60.0
QUIET_S = 1.5  # between the last of the others starting and the request that is looked at
RATE_FLAG = "--pdd-wan-rate-limit"
FIRST_RATE = "10mbit"
TUNE_ATTEMPTS = 4
TUNE_TOLERANCE = 1.7
MOST_CHANGE = 4.0  # of the rate at once: one look can deceive

_STEP = """
import time


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", forward, HookType.AROUND)


def forward(original, *args, **kwargs):
    end = time.monotonic() + {seconds}
    result = original(*args, **kwargs)
    time.sleep(max(0.0, end - time.monotonic()))
    return result
"""

Say = Callable[[str], None]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class GapSetting:
    """How part B is run."""

    model: Path
    modes: Sequence[str]
    threshold: int | None
    others: Sequence[int]
    repeat: int
    prompt_tokens: int
    eager_tokens: int
    own_tokens: int
    step_ms: float
    """Every forward pass of relay and main decode takes at least so long; the real pass is part of it."""
    wan_rate: str | None
    """None: for each number of others one at which about ``eager_tokens`` are relayed."""
    page_size: int
    router: str

    @property
    def answer_tokens(self) -> int:
        """Of the request that is looked at; long enough not to end before its KV has landed."""
        return 2 * self.eager_tokens + self.own_tokens

    @property
    def first_rate(self) -> str:
        """A WAN limit to begin with."""
        if not self.step_ms:
            return FIRST_RATE
        bits = kv_bytes_per_token(self.model) * self.prompt_tokens * 8
        return f"{round(bits / (self.eager_tokens * self.step_ms))}kbit"

    def cluster(self, mode: str, rate: str | None, folder: Path) -> Cluster:
        """Three roles and a router; main decode has room for all."""
        most = max(self.others)
        pool = self.prompt_tokens + self.answer_tokens + (most + 4) * CROWD_POOL_TOKENS
        main = ["--max-total-tokens", str(pool), "--max-running-requests", str(most + 8)]
        main += ["--incremental-streaming-output"]  # else each event repeats the whole answer
        if mode != NONE:
            main += ["--pdd-handoff", mode]
            main += ["--pdd-handoff-threshold", str(self.threshold)] if self.threshold else []
        prefill = ["--pdd-relay-policy", "never"] if mode == NONE else ["--pdd-relay-threshold-ms", "50"]
        spec = Cluster(
            kind="pdd",
            model=self.model,
            router="mini-lb" if self.router == "mini-lb" else "rust",
            page_size=self.page_size,
            wan_rate_limit=rate,
            flags={"main": main, "prefill": prefill},
        )
        if not self.step_ms:
            return spec
        return install(spec, folder, "pdd_bench_step", _STEP.format(seconds=self.step_ms / 1000), ["relay", "main"])


# --- measuring --------------------------------------------------------------------------------------------------


def measure(setting: GapSetting, logs: Path, say: Say) -> list[dict[str, Any]]:
    """All repetitions in all modes."""
    rates: dict[int, str] = {} if setting.wan_rate is None else dict.fromkeys(setting.others, setting.wan_rate)
    rows: list[dict[str, Any]] = []
    for mode in (NONE, *setting.modes):
        say(f"{mode}: starting a cluster")
        # Without a handoff the crossing is not looked at: it may be as fast as it goes.
        rate = None if mode == NONE else rates.get(setting.others[0], setting.first_rate)
        with setting.cluster(mode, rate, logs / mode).launch(logs / mode, say) as running:
            warm_up(running, setting)
            for others in setting.others:
                if mode != NONE:
                    rate = rates[others] = _prepare(running, setting, others, rates.get(others), say)
                for index in range(setting.repeat):
                    row = {"mode": mode, "others": others, "index": index, "wan_rate": rate}
                    row |= _attempt(running, setting, others, index)
                    rows.append(row)
                    say(f"{mode}, {others} others, {index + 1}/{setting.repeat}: {_in_short(row)}")
    return rows


def _attempt(running: Running, setting: GapSetting, others: int, index: int) -> dict[str, Any]:
    """One repetition; a failure is one of many, and must not cost those before it."""
    try:
        return repetition(running, setting, others, seed=1 + index)
    except (StreamError, requests.RequestException) as error:
        return {"arrivals": [], "crowd": [], "events": [], "error": str(error)}


def warm_up(running: Running, setting: GapSetting) -> None:
    """The first requests are slow."""
    repetition(running, setting, min(setting.others), seed=0)


def _prepare(running: Running, setting: GapSetting, others: int, rate: str | None, say: Say) -> str:
    """Set the WAN limit; None: find one at which about ``eager_tokens`` are relayed beside so many others."""
    if rate is not None:
        _set_rate(running, setting, rate, say)
        return rate
    bits = kv_bytes_per_token(setting.model) * setting.prompt_tokens * 8
    rate = _rate(running)
    for attempt in range(TUNE_ATTEMPTS):
        row = repetition(running, setting, others, seed=-1 - attempt)
        say(f"{others} others, WAN {rate}: {_in_short(row)}")
        handoff = find_handoff(row["events"])
        if handoff and 1 / TUNE_TOLERANCE < handoff.relayed / setting.eager_tokens < TUNE_TOLERANCE:
            break
        better = better_rate(row["events"], bits, parse_rate(rate) * 8, setting.eager_tokens)
        rate = f"{round(better / 1000)}kbit"
        _set_rate(running, setting, rate, say)
    return rate


def _rate(running: Running) -> str:
    command = running.prefills[0].command
    return command[command.index(RATE_FLAG) + 1]


def _set_rate(running: Running, setting: GapSetting, rate: str, say: Say) -> None:
    """Start prefill again, with this WAN limit, if it has another."""
    if _rate(running) == rate:
        return
    say(f"starting prefill again, with a WAN of {rate}")
    prefill, router = running.prefills[0], running.router
    assert router is not None
    for server in (router, prefill):  # the router would think prefill dead for up to a minute
        server.terminate()
        server.reap()
    place = prefill.command.index(RATE_FLAG) + 1
    prefill.command = [*prefill.command[:place], rate, *prefill.command[place + 1 :]]
    running.restart(prefill)
    running.restart(router)
    warm_up(running, setting)


def repetition(running: Running, setting: GapSetting, others: int, seed: int) -> dict[str, Any]:
    """One request among ``others``. Times are in seconds since it was sent.

    Raises:
        StreamError: it, or one of the others, failed.
    """
    rid = f"handoff-{others}-{seed}-{time.time_ns()}"
    task = tasks.endless(seed + 1000 * others, setting.prompt_tokens, setting.answer_tokens)
    probe = Stream(rid, task.prompt, setting.answer_tokens)
    crowd = [
        # Always the same prompts: main decode has their KV from the second time on.
        Stream(f"crowd-{index}-{rid}", tasks.endless(index, CROWD_PROMPT_TOKENS, 100).prompt, CROWD_MAX_NEW_TOKENS)
        for index in range(others)
    ]
    hooks = asyncio.run(_ask(running, probe, crowd))
    _settle(running)
    all_events = running.events("main")
    room = next((e["room"] for e in all_events if e["event"] == "opened" and e.get("rid") == rid), None)
    if room is None:
        raise StreamError("main decode knows nothing of this request")
    events = [e for e in all_events if e.get("room") == room]

    def since(found: Sequence[Arrival]) -> list[list[float]]:
        return [[round(at - probe.sent, 5), tokens] for at, tokens in found if at > probe.sent - QUIET_S]

    return {
        "arrivals": since(probe.arrivals()),
        "crowd": [since(stream.arrivals()) for stream in crowd],
        "events": [{**e, "t": round(e["t"] - probe.sent, 5)} for e in events],
        "hooks": hooks,
    }


async def _ask(running: Running, probe: Stream, crowd: Sequence[Stream]) -> float:
    """Get the crowd going, send the request that is looked at, and hang up on the crowd.

    Returns the share of main decode's time that was spent in our hooks while only the crowd decoded.
    """
    async with session() as client:
        jobs = [asyncio.create_task(stream.run(client, running.url)) for stream in crowd]
        try:
            while not all(len(stream.chunks) >= CROWD_WARM_CHUNKS for stream in crowd) or await _landing(running):
                _check(jobs)
                await asyncio.sleep(0.1)
            before, begin = await _hook_seconds(running), time.perf_counter()
            await asyncio.sleep(QUIET_S)
            share = (await _hook_seconds(running) - before) / (time.perf_counter() - begin)
            await probe.run(client, running.url)
            _check(jobs)
            return share
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)


async def _landing(running: Running) -> bool:
    """Whether some request waits for its KV still."""
    state = await asyncio.to_thread(running.state, running.mains[0])
    return bool(state["rooms"])


async def _hook_seconds(running: Running) -> float:
    """Seconds that main decode's scheduler has spent in our hooks, but for the one that answers this question."""
    state = await asyncio.to_thread(running.state, running.mains[0])
    return sum(s for path, s in state["hook_seconds"].items() if not path.endswith("get_internal_state"))


def _check(jobs: Sequence[asyncio.Task[None]]) -> None:
    """None of the crowd may have ended."""
    for job in jobs:
        if job.done():
            job.result()
            raise StreamError("a neighbour's answer ended early")


def _settle(running: Running) -> None:
    """Wait until all that was hung up on is gone."""
    end = time.monotonic() + SETTLE_S
    while any(running.state(server)["rooms"] or running.state(server)["pool"]["used"] for server in running.workers):
        if time.monotonic() > end:
            raise StreamError("requests that were hung up on still run")
        time.sleep(0.2)


def _in_short(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    handoff = find_handoff(row["events"])
    if handoff is None:
        why = ", ".join(f"{e['why']} with {e['n']} tokens" for e in row["events"] if e["event"] == "closed")
        return f"no handoff ({why})"
    worst = worst_gap((at for at, _ in row["arrivals"]), (handoff.landed, handoff.own)) or 0.0
    return f"{handoff.relayed} tokens at landing, {len(handoff.passes)} pass(es), worst gap {worst * 1000:.0f} ms"


# --- what it means: pure ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handoff:
    """A handoff as main decode noted it down; times in seconds since the request was sent."""

    landed: float
    own: float
    """When its first token of its own was there."""
    relayed: int
    """Tokens it had when the KV landed."""
    passes: tuple[tuple[float, int], ...]
    """Extend passes: when each was made up, and over how many tokens."""

    @property
    def last_pass_s(self) -> float:
        """From making up the last pass until its result."""
        return self.own - self.passes[-1][0]


def better_rate(events: Sequence[Event], bits: float, rate: float, tokens: int) -> float:
    """The WAN limit at which this request would have landed with so many tokens, in bits/s.

    Args:
        bits: of its KV.
        rate: the limit it had, in bits/s.
    """
    relayed = [e for e in events if e["event"] == "emit" and e["source"] == "RLD"]
    if len(relayed) < 2:
        return rate / MOST_CHANGE
    first, last = float(relayed[0]["t"]), float(relayed[-1]["t"])
    pace = (last - first) / sum(int(e["n"]) for e in relayed[1:])
    landed = next((float(e["t"]) for e in events if e["event"] == "landed"), None)
    crossing = bits / rate
    # If the answer was complete before: it left when the relay began, more or less.
    aim = tokens * pace if landed is None else crossing + first + tokens * pace - landed
    return bits / min(max(aim, crossing / MOST_CHANGE), crossing * MOST_CHANGE)


def find_handoff(events: Sequence[Event]) -> Handoff | None:
    """The handoff among one request's events; None if SGLang's ordinary path was taken."""
    passes = tuple((float(e["t"]), int(e["n"])) for e in events if e["event"] == "extend")
    if not passes:
        return None
    landed = next((e for e in events if e["event"] == "landed"), None)
    own = next((e for e in events if e["event"] == "own" and e["t"] >= passes[-1][0]), None)
    if landed is None or own is None:
        return None
    return Handoff(float(landed["t"]), float(own["t"]), int(landed["n"]), passes)


def window_of(handoff: Handoff, margin: float) -> tuple[float, float]:
    """The time around a handoff, in seconds since the request was sent."""
    return handoff.landed - margin, handoff.own + margin


def quiet_window(times: Sequence[float], length: float) -> tuple[float, float]:
    """A window of this length in the middle of a stream, seconds."""
    middle = (times[0] + times[-1]) / 2
    return middle - length / 2, middle + length / 2


def figures(row: Mapping[str, Any], margin: float, length: float) -> dict[str, Any] | None:
    """One repetition in figures, in milliseconds; None if there was no handoff where there should be one.

    Args:
        margin: seconds that count as around the handoff, before and after.
        length: seconds, of the window that is looked at where there is no handoff.
    """
    arrivals = [(float(at), int(tokens)) for at, tokens in row["arrivals"]]
    times = [at for at, _ in arrivals][1:]  # how fast the second token follows the first is no matter of the handoff
    handoff = find_handoff(row["events"])
    if (handoff is None) != (row["mode"] == NONE) or len(times) < 3:
        return None
    window = window_of(handoff, margin) if handoff else quiet_window(times, length)
    neighbours = [[float(at) for at, _ in stream] for stream in row["crowd"]]
    worst_of = [worst for stream in neighbours if (worst := worst_gap(stream, window)) is not None]
    found: dict[str, float | None] = {
        "worst": worst_gap(times, window),
        "outside": worst_gap_outside(times, window),
        "before": median_gap(times, until=handoff.landed) if handoff else None,
        "after": median_gap(times, since=handoff.own if handoff else times[0]),
        "others_worst": max(worst_of, default=None),
        "others_median": median([gap.length for s in neighbours for gap in gaps(s) if gap.touches(window)] or [0.0])
        if neighbours
        else None,
        "window": window[1] - window[0],
    }
    result: dict[str, Any] = {name: None if value is None else value * 1000 for name, value in found.items()}
    inside = [tokens for at, tokens in arrivals if window[0] <= at <= window[1]]
    result["tokens_per_arrival"] = max(inside, default=0)
    result["ratio"] = found["worst"] / found["after"] if found["worst"] and found["after"] else None
    if handoff:
        result |= main_side(row["events"], handoff)
    return result


def main_side(events: Sequence[Event], handoff: Handoff) -> dict[str, Any]:
    """The handoff on main decode, in milliseconds and tokens."""
    emitted = [float(e["t"]) for e in events if e["event"] == "emit" and e["t"] <= handoff.own] + [handoff.own]
    late = [gap for gap in pairwise(emitted) if gap[1] > handoff.landed]
    return {
        "relayed": handoff.relayed,
        "passes": len(handoff.passes),
        "recomputed": sum(tokens for _, tokens in handoff.passes),
        "handoff": (handoff.own - handoff.landed) * 1000,
        "last_pass": handoff.last_pass_s * 1000,
        "main_worst": max((stop - start for start, stop in late), default=0.0) * 1000,
    }


def summarise(rows: Sequence[Mapping[str, Any]], margin: float) -> list[dict[str, Any]]:
    """For each number of others and each mode: the median of every figure over the repetitions, and the worst gap's
    range. ``failed`` counts repetitions without the handoff that was looked for."""
    result = []
    for others in dict.fromkeys(row["others"] for row in rows):
        here = [row for row in rows if row["others"] == others]
        lengths = [
            window[1] - window[0]
            for row in here
            if (handoff := find_handoff(row["events"])) and (window := window_of(handoff, margin))
        ]
        length = median(lengths) if lengths else 2 * margin
        for mode in dict.fromkeys(row["mode"] for row in here):
            mine = [figures(row, margin, length) for row in here if row["mode"] == mode]
            good = [f for f in mine if f is not None]
            line: dict[str, Any] = {
                "others": others,
                "mode": mode,
                "repeat": len(mine),
                "failed": len(mine) - len(good),
            }
            for name in dict.fromkeys(name for f in good for name in f):
                values = [f[name] for f in good if f.get(name) is not None]
                line[name] = median(values) if values else None
            line["worst_all"] = [f["worst"] for f in good]
            line["others_worst_all"] = [f["others_worst"] for f in good]
            result.append(line)
    return result
