"""The workloads of `bench_wan.py`: chat requests with known answers, in the order in which they are sent.

They go to SGLang's own ``bench_serving`` as a file (``--dataset-name openai``), so any server can be asked the same.
All sizes are in tokens. The same seed gives the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tasks

WARM_UP = 1 << 20  # seeds of requests that are not measured


@dataclass(frozen=True)
class Request:
    """One request; ``kind`` is what it is counted as."""

    kind: str
    task: tasks.Task

    def line(self) -> str:
        """As ``bench_serving`` reads it."""
        return json.dumps({"messages": self.task.chat(), "max_tokens": self.task.answer_tokens})


@dataclass(frozen=True)
class Workload:
    """Requests of which at most ``concurrency`` are under way at once; ``before`` is sent first, and not measured.

    ``load``: they come at random times, such that their KV would take so much of the link; None: as fast as they end.
    """

    name: str
    what: str
    requests: Sequence[Request]
    concurrency: int
    before: Sequence[Request] = ()
    load: float | None = None


@dataclass(frozen=True)
class Sizes:
    """What the workloads are made of."""

    prompt: int = 1500
    answers: tuple[int, ...] = (24, 48, 96)
    cold: int = 40
    conversations: int = 6
    turns: int = 3
    turn: int = 150
    agents: int = 8
    contexts: int = 3
    own: int = 90
    mixed: int = 20
    answer: int = 24


def cold(sizes: Sizes, seed: int) -> Workload:
    """Prompts that nobody has seen, one after the other."""
    answers = [sizes.answers[index % len(sizes.answers)] for index in range(sizes.cold)]
    prompts = [tasks.cold(_seed(seed, index), sizes.prompt, answer) for index, answer in enumerate(answers)]
    what = f"{sizes.prompt} new tokens each, one request after the other"
    return Workload("cold", what, [Request("cold", task) for task in prompts], 1)


def steady(sizes: Sizes, seed: int) -> Workload:
    """The same at random times, no more than the link can bear."""
    what = f"{sizes.prompt} new tokens each, at random times; their KV takes 60 % of the link at most"
    return Workload("steady", what, cold(sizes, seed).requests, 64, load=0.6)


def turns(sizes: Sizes, seed: int) -> Workload:
    """Conversations: all first turns, then all second ones, and so on, so that a turn's predecessor is over."""
    now = [tasks.cold(_seed(seed, index), sizes.prompt, sizes.answer) for index in range(sizes.conversations)]
    requests = [Request("first turn", task) for task in now]
    for _ in range(sizes.turns - 1):
        now = [tasks.follow_up(task, 0, sizes.turn, sizes.answer, "new") for task in now]
        requests += [Request("later turn", task) for task in now]
    what = f"{sizes.conversations} conversations of {sizes.turns} turns, each adding {sizes.turn} tokens; two at once"
    return Workload("turns", what, requests, 2)


def agents(sizes: Sizes, seed: int) -> Workload:
    """Groups of agents that fork from one new context at the same moment."""
    contexts = [tasks.cold(_seed(seed, index), sizes.prompt, sizes.answer) for index in range(sizes.contexts)]
    requests = [
        Request("agent", tasks.follow_up(context, agent, sizes.own, sizes.answer, "new"))
        for context in contexts
        for agent in range(sizes.agents)
    ]
    what = f"{sizes.agents} at once on one new context of {sizes.prompt} tokens, {sizes.own} tokens of their own"
    return Workload("agents", what, requests, sizes.agents)


def mix(sizes: Sizes, seed: int) -> Workload:
    """Four of five requests find nearly all of their prompt in the cache, the fifth finds nothing."""
    known = [tasks.cold(_seed(seed, WARM_UP + index), sizes.prompt, sizes.answer) for index in range(4)]
    requests = []
    for index in range(sizes.mixed):
        if index % 5 == 4:
            requests.append(Request("cold", tasks.cold(_seed(seed, index), sizes.prompt, sizes.answer)))
        else:
            task = tasks.follow_up(known[index % len(known)], index, sizes.own, sizes.answer, "new")
            requests.append(Request("high-hit", task))
    random.Random(seed).shuffle(requests)
    what = f"80 % add {sizes.own} tokens to a prompt that is known, 20 % bring {sizes.prompt} new ones; four at once"
    return Workload("mix", what, requests, 4, before=[Request("known", task) for task in known])


def warm_up(sizes: Sizes, seed: int) -> Workload:
    """A few cold prompts, for links and compilers to be warm."""
    prompts = [tasks.cold(_seed(seed, 2 * WARM_UP + index), sizes.prompt, sizes.answer) for index in range(3)]
    return Workload("warm-up", "not measured", [Request("cold", task) for task in prompts], 1)


WORKLOADS = {"cold": cold, "turns": turns, "agents": agents, "mix": mix, "steady": steady}


def write(path: Path, requests: Sequence[Request]) -> Path:
    """A file for ``bench_serving``."""
    path.write_text("".join(request.line() + "\n" for request in requests))
    return path


def _seed(run: int, index: int) -> int:
    return run * 8 * WARM_UP + index
