"""What every end-to-end test checks: the answer, the pools, the logs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import tasks
from client import Answer, generate
from cluster import Running, Server

LOGPROB_TOLERANCE = 1e-3
SETTLE_TIMEOUT_S = 45.0  # SGLang holds the pages of an aborted transfer for up to 30 s
BAD_LOG = re.compile(r"Traceback \(most recent|memory leak|leak detected|Scheduler hit an exception|AssertionError")


def limit(task: tasks.Task) -> int:
    """Room for the whole answer and its end-of-sequence token."""
    return task.answer_tokens + 1


@dataclass(frozen=True)
class ChatAnswer:
    """What the chat API answers."""

    text: str
    finish: str
    logprobs: list[float]


def chat(url: str, task: tasks.Task, stream: bool, max_tokens: int) -> ChatAnswer:
    """Put a task to the chat API through the `openai` client."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=180, max_retries=0)
    options: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": max_tokens, "logprobs": True}
    messages: Any = task.chat()
    if stream:
        chunks = list(client.chat.completions.create(messages=messages, stream=True, **options))
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        choices = [client.chat.completions.create(messages=messages, **options).choices[0]]
        text = choices[0].message.content or ""
    logprobs = [t.logprob for c in choices if c.logprobs for t in c.logprobs.content or []]
    finish = next(c.finish_reason for c in reversed(choices) if c.finish_reason)
    return ChatAnswer(text, finish, logprobs)


@dataclass
class Reference:
    """Answers of a single server, each computed once."""

    single: Running
    _answers: dict[tuple[str, int], Answer] = field(default_factory=dict)
    _chats: dict[tuple[str, bool, int], ChatAnswer] = field(default_factory=dict)

    def answer(self, prompt: str, max_new_tokens: int) -> Answer:
        """What the single server says."""
        key = (prompt, max_new_tokens)
        if key not in self._answers:
            self._answers[key] = generate(self.single.url, prompt, max_new_tokens, stream=False)
        return self._answers[key]

    def chat(self, task: tasks.Task, stream: bool, max_tokens: int) -> ChatAnswer:
        """What the single server says in the chat API."""
        key = (task.prompt, stream, max_tokens)
        if key not in self._chats:
            self._chats[key] = chat(self.single.url, task, stream, max_tokens)
        return self._chats[key]


@dataclass
class Served:
    """A cluster under test, beside its reference."""

    cluster: Running
    reference: Reference
    log_offsets: dict[str, int] = field(default_factory=dict)
    base: dict[str, dict[str, float]] = field(default_factory=dict)
    """Counters by role when the test began."""

    # -- asking

    def ask(self, task: tasks.Task, max_new_tokens: int | None = None, **options: Any) -> Answer:
        """Put a task to the cluster and check the answer."""
        room = max_new_tokens or limit(task)
        answer = generate(self.cluster.url, task.prompt, room, **options)
        self.check(answer, task, room)
        return answer

    def check(self, answer: Answer, task: tasks.Task, max_new_tokens: int) -> None:
        """Ids and logprobs as from a single server, and the text that is known to be right."""
        expected = self.reference.answer(task.prompt, max_new_tokens)
        known = " ".join(task.answer.split()[:max_new_tokens])
        assert expected.text.strip() == known, "the single server itself is wrong"
        assert answer.ids == expected.ids, first_difference(answer.ids, expected.ids)
        assert answer.text.strip() == known
        assert answer.finish is not None and expected.finish is not None
        assert answer.finish["type"] == expected.finish["type"]
        check_logprobs(answer.logprobs, expected.logprobs)

    def chat(self, task: tasks.Task, stream: bool, max_tokens: int | None = None) -> None:
        """Put a task to the chat API through the `openai` client and check the answer."""
        room = max_tokens or limit(task)
        found = chat(self.cluster.url, task, stream, room)
        expected = self.reference.chat(task, stream, room)
        # One word is one token, so that equal words are equal ids.
        assert found.text.split() == expected.text.split() == task.answer.split()[:room]
        assert found.finish == expected.finish
        # A stream of SGLang's loses the logprob of an end-of-sequence token that comes in a step of its own.
        words = len(found.text.split())
        assert len(found.logprobs) in (words, words + 1) if stream else len(found.logprobs) == len(expected.logprobs)
        check_logprobs(found.logprobs[:words], expected.logprobs[:words])

    # -- observing

    def servers(self, role: str) -> list[Server]:
        """The servers of a role."""
        return {"prefill": self.cluster.prefills, "relay": self.cluster.relays, "main": self.cluster.mains}[role]

    def events(self, role: str, event: str, **fields: Any) -> list[Mapping[str, Any]]:
        """Events of a kind that have these fields."""
        wanted = {"event": event, **fields}
        return [e for e in self.cluster.events(role) if all(e.get(k) == v for k, v in wanted.items())]

    def wait_for(self, role: str, event: str, timeout: float = 30, **fields: Any) -> Mapping[str, Any]:
        """Wait until there is such an event."""
        return wait(lambda: next(iter(self.events(role, event, **fields)), None), timeout, f"{role} {event} {fields}")

    def room(self, rid: str, timeout: float = 30) -> int:
        """The bootstrap room of a request that MD has opened."""
        return int(self.wait_for("main", "opened", timeout, rid=rid)["room"])

    def story(self, answer: Answer) -> tuple[dict[str, int], int]:
        """Tokens by role, and the size of the extend pass (0 if none), as MD noted them down."""
        room = self.room(answer.rid)
        made = self.wait_for("main", "finish", room=room)["by"]
        passes = self.events("main", "extend", room=room)
        return dict(made), sum(e["n"] for e in passes)

    def counters(self, role: str) -> dict[str, float]:
        """Counters of all living servers of a role, added up."""
        total: dict[str, float] = {}
        for server in self.servers(role):
            if server.alive:
                for name, value in self.cluster.state(server)["counters"].items():
                    total[name] = total.get(name, 0) + value
        return total

    def grown(self, role: str, name: str) -> float:
        """By how much all counters whose name begins so have grown in this test."""
        now, before = self.counters(role), self.base.get(role, {})
        return sum(v - before.get(k, 0) for k, v in now.items() if k.startswith(name))

    # -- around each test

    def begin(self) -> None:
        """Remember the counters and how long the logs are."""
        for role in ("prefill", "relay", "main"):
            self.base[role] = self.counters(role)
        for server in self.cluster.servers:
            self.log_offsets[server.name] = server.log.stat().st_size

    def restart(self, server: Server) -> None:
        """Start a server again that has ended."""
        self.cluster.restart(server)
        self.log_offsets[server.name] = server.log.stat().st_size  # SGLang's start-up noise is not the test's

    def end(self) -> None:
        """Everything is given back, everybody is alive, nobody has complained."""
        self.settle()
        for server in self.cluster.servers:
            if server.process is not None and server.process.returncode is None:
                assert server.alive, f"{server.name} is dead:\n{server.tail()}"
            self._check_log(server)

    def settle(self) -> None:
        """Wait until pools and sessions are at their baseline: nothing held, nothing open."""
        wait(lambda: not self.held() or None, SETTLE_TIMEOUT_S, "pools and sessions back to their baseline", self.held)

    def held(self) -> dict[str, Any]:
        """By server, what is not at its baseline."""
        result = {}
        for server in self.cluster.workers:
            if server.alive:
                state = self.cluster.state(server)
                held = {"rooms": state["rooms"], "relays": state["relays"], "used": state["pool"]["used"]}
                held["protected"], held["pending"] = state["pool"]["protected"], state.get("pending", 0)
                if any(held.values()):
                    result[server.name] = held
        return result

    def _check_log(self, server: Server) -> None:
        with server.log.open("rb") as log:
            log.seek(self.log_offsets.get(server.name, 0))
            text = log.read().decode(errors="replace")
        found = BAD_LOG.search(text)
        assert found is None, f"{server.name} logged:\n{text[max(0, found.start() - 300) : found.start() + 3000]}"
        if server in self.cluster.workers and server.alive:
            state = self.cluster.state(server)
            counters = state["counters"]
            assert not state["hook_failures"], f"{server.name}: {state['hook_failures']}"
            errors = {k: v for k, v in counters.items() if k.startswith(("hooks.errors", "timeline.errors"))}
            assert not errors, f"{server.name}: {errors}"


def check_logprobs(found: Sequence[float], expected: Sequence[float]) -> None:
    """As many as expected, and each within the tolerance."""
    assert len(found) == len(expected)
    far = [(a, b) for a, b in zip(found, expected, strict=True) if not abs(a - b) < LOGPROB_TOLERANCE]
    assert not far, f"logprobs differ, first {far[:3]} of {len(far)}"


def first_difference(found: Sequence[int], expected: Sequence[int]) -> str:
    """Where two lists of ids part."""
    pairs = zip(found, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    here, there = list(found[at : at + 8]), list(expected[at : at + 8])
    return f"ids part at {at}: found {here} of {len(found)}, expected {there} of {len(expected)}"


def wait(look: Callable[[], Any], timeout: float, what: str, explain: Callable[[], Any] | None = None) -> Any:
    """Look until there is something."""
    end = time.monotonic() + timeout
    while (found := look()) is None:
        assert time.monotonic() < end, f"waited {timeout:.0f} s for {what}" + (f": {explain()}" if explain else "")
        time.sleep(0.02)
    return found
