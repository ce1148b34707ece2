"""Requests for the benchmark of MD's cache: a public trace of conversations, and agents as they come in practice."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import dataclass
from pathlib import Path

TRACE = Path(__file__).parent / "traces" / "conversation.jsonl"
BLOCK = 512  # tokens that one id of the trace stands for


@dataclass(frozen=True)
class Call:
    """One request: when it comes (seconds), its prompt, and what will be answered."""

    at: float
    prompt: array[int]
    output: array[int]


def conversations(limit: int | None = None) -> list[Call]:
    """The trace; its blocks' tokens are made up, equal where the trace says that they are equal."""
    fresh = _Fresh(1 << 40)
    calls = []
    for line in TRACE.read_text().splitlines()[:limit]:
        entry = json.loads(line)
        prompt = array("q")
        for block in entry["hash_ids"]:
            prompt.extend(range(block * BLOCK, (block + 1) * BLOCK))
        calls.append(Call(entry["timestamp"] / 1000, prompt[: entry["input_length"]], fresh(entry["output_length"])))
    return calls


def agents(count: int = 32, turns: int = 11, seed: int = 0) -> list[Call]:
    """Agents with a long context: most turns add little (a hit above 95 %), some a lot, and now and then one starts
    anew or sends a few helpers out at once on what it has read so far. The mean hit is about 90 %.
    """
    rng = random.Random(seed)
    fresh = _Fresh(0)
    system = fresh(2000)
    calls = []
    for agent in range(count):
        at = agent * 2.0
        context = system + fresh(rng.randint(12_000, 36_000))
        for _ in range(turns):
            output = fresh(rng.randint(50, 400))
            calls.append(Call(at, context, output))
            if rng.random() < 0.04:  # helpers, each with a task of its own
                reading = context + fresh(rng.randint(1000, 2000))
                calls += [
                    Call(at + 4.0 + rng.random() / 10, reading + fresh(rng.randint(100, 300)), fresh(200))
                    for _ in range(6)
                ]
            added = rng.randint(2000, 9000) if rng.random() < 0.2 else rng.randint(50, 700)
            context = context + output + fresh(added)
            at += rng.uniform(10, 20)
    return sorted(calls, key=lambda call: call.at)


class _Fresh:
    """Tokens that nobody has had."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self, count: int) -> array[int]:
        self._next += count
        return array("q", range(self._next - count, self._next))
