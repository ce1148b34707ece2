"""P, RLD and MD: each a real state machine, and an engine that does as `patches/` and SGLang would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from states import clone
from world import (
    COUNTERS,
    Copied,
    Died,
    Event,
    Landed,
    Left,
    Metadata,
    Node,
    Packet,
    Ready,
    Scenario,
    Signal,
    lie,
    require,
    truth,
)

from sglang_pdd import main, relay
from sglang_pdd.actions import (
    Action,
    AnswerEarly,
    Command,
    DropRelay,
    Emit,
    GiveUp,
    OpenRelay,
    StartDecode,
    StopDecode,
)
from sglang_pdd.config import PddConfig
from sglang_pdd.main import Main
from sglang_pdd.prefill import Job, Prefill
from sglang_pdd.protocol import Chunk, Hello, Request
from sglang_pdd.relay import Relay


@dataclass(frozen=True, slots=True)
class _Prompt:
    session: str  # MD's
    prefilled: bool = False


class PNode(Node):
    def __init__(self, scenario: Scenario, name: str, start: int) -> None:
        super().__init__(scenario, name, start)
        config = PddConfig(role="prefill", relay_policy="auto")
        self.machine: Prefill = scenario.machines.get("prefill", Prefill)(COUNTERS, config, {})
        self.prompts: dict[int, _Prompt] = {}
        self.copies: dict[int, int] = {}  # relay room -> room
        self.ready: dict[int, str] = {}  # relay room -> the node that wants it

    def notice(self, peer: str, signal: Signal) -> None:
        if isinstance(signal, Metadata):
            self._bootstrapped(signal)
        elif isinstance(signal, Left):
            self._conclude(signal.room, "aborted")
        elif isinstance(signal, Ready):
            opening = any(isinstance(c, OpenRelay) and c.relay_room == signal.relay_room for c in self.queue)
            if opening or signal.relay_room in self.copies:
                self.ready[signal.relay_room] = peer
        elif isinstance(signal, Died):
            for room in [r for r, p in self.prompts.items() if p.session == signal.node]:
                self._conclude(room, "aborted")
            for relay_room in [r for r in self.copies if self.ready.get(r) == signal.node.partition(".")[0]]:
                self.lan(relay_room, False)

    def _bootstrapped(self, signal: Metadata) -> None:
        self.prompts[signal.room] = _Prompt(signal.session)
        landing_ms = 1000.0 if self.scenario.question(signal.room).relayed else 0.0
        request = Request((signal.room,), {})  # the prompt tells RLD's engine whose answer it computes
        self.do(self.machine.bootstrapped(Job(signal.room, (signal.session,), request, landing_ms)))

    def carry_out(self, command: Command) -> None:
        if isinstance(command, OpenRelay):
            if command.room in self.prompts:
                require(command.relay_room not in self.copies, "a relay is opened twice")
                self.copies[command.relay_room] = command.room
            else:
                self.do(self.machine.gave_up(command.relay_room, "aborted"))
        elif isinstance(command, DropRelay):
            self._end(command.relay_room)
        else:
            assert isinstance(command, AnswerEarly)

    def moves(self) -> Iterable[tuple[Event, str | None]]:
        for relay_room, room in self.copies.items():
            if self.prompts[room].prefilled and relay_room in self.ready:
                yield ("lan", relay_room, True), None
            yield ("lan", relay_room, False), "lan"
        for room, prompt in self.prompts.items():
            yield (("wan", room, True) if prompt.prefilled else ("prefill", room)), None
            yield ("wan", room, False), "wan"

    def prefill(self, room: int) -> None:
        prompt = self.prompts[room]
        self.prompts[room] = replace(prompt, prefilled=True)
        self.do(self.machine.first_token((prompt.session,), Chunk(room, 0, truth(room)[:1], cached=(0, 0, 0, 0))))

    def lan(self, relay_room: int, ok: bool) -> None:
        if ok:
            self.signal(self.ready[relay_room], Copied(relay_room, True))
            del self.copies[relay_room], self.ready[relay_room]
            self.do(self.machine.copied(relay_room))
        else:
            self._end(relay_room)
            self.do(self.machine.gave_up(relay_room, "copy_failed"))

    def wan(self, room: int, ok: bool) -> None:
        self.signal(self.prompts[room].session.partition(".")[0], Landed(room, ok))
        self._conclude(room, "landed" if ok else "aborted")

    def _conclude(self, room: int, why: str) -> None:
        """The copy to MD has ended: nobody needs the one to RLD."""
        self.prompts.pop(room, None)
        for relay_room in [r for r, of in self.copies.items() if of == room]:
            self._end(relay_room)
            self.do(self.machine.gave_up(relay_room, why))

    def _end(self, relay_room: int) -> None:
        self.copies.pop(relay_room, None)
        if node := self.ready.pop(relay_room, None):
            self.signal(node, Copied(relay_room, False))

    def check(self) -> None:
        if not self.queue:
            require(len(self.machine) == len(self.copies), "P holds a relay that has no copy, or the other way round")

    def is_idle(self) -> bool:
        return not (self.prompts or self.copies or self.queue or len(self.machine))


@dataclass(frozen=True, slots=True)
class _Relayed:
    room: int
    prefill: str
    made: int = 0
    running: bool = False  # its KV is here
    stopping: bool = False


class RNode(Node):
    def __init__(self, scenario: Scenario, name: str, start: int) -> None:
        super().__init__(scenario, name, start)
        self.known = {f"p{i}" for i in range(scenario.prefills)}
        make = scenario.machines.get("relay", Relay)
        self.machine: Relay = make(COUNTERS, scenario.capacity, 10_000, lambda key: True)
        self.jobs: dict[int, _Relayed] = {}
        self.draining = False

    def beat(self) -> None:
        hello = Hello("relay", "", (), {}, "", self.machine.capacity, len(self.machine))
        self.out += [Packet(self.id, f"p{i}", hello) for i in range(self.scenario.prefills)]

    def notice(self, peer: str, signal: Signal) -> None:
        if isinstance(signal, Copied):
            job = self.jobs.get(signal.relay_room)
            if job is not None and not job.running:
                if signal.ok:
                    self.jobs[signal.relay_room] = replace(job, running=True)
                else:
                    self.end(signal.relay_room)
        elif isinstance(signal, Died):
            for relay_room in [r for r, j in self.jobs.items() if f"{j.prefill}." in signal.node and not j.running]:
                self.end(relay_room)

    def carry_out(self, command: Command) -> None:
        if isinstance(command, StartDecode):
            require(command.relay_room not in self.jobs, "RLD's engine gets a request twice")
            require(self.scenario.lag or not self.draining, "RLD takes a relay although it is to end")
            prefill = command.bootstrap.partition(":")[0]
            self.jobs[command.relay_room] = _Relayed(command.request.prompt[0], prefill)
            self.signal(prefill, Ready(command.relay_room))
        else:
            assert isinstance(command, StopDecode)
            if command.relay_room in self.jobs:
                self.jobs[command.relay_room] = replace(self.jobs[command.relay_room], stopping=True)

    def moves(self) -> Iterable[tuple[Event, str | None]]:
        for relay_room, job in self.jobs.items():
            if job.stopping:
                yield ("end", relay_room), None
        if any(j.running and not j.stopping for j in self.jobs.values()):
            yield ("decode",), None
        if not self.draining:
            yield ("drain",), "drain"

    def drain(self) -> None:
        """This server is to end."""
        self.draining = True
        self.machine._draining = _yes

    def decode(self) -> None:
        """One step of the whole batch."""
        chunks, over = [], []
        for relay_room, job in sorted(self.jobs.items()):
            if not job.running or job.stopping:
                continue
            question = self.scenario.question(job.room)
            length = question.tokens + question.beyond
            end = min(job.made + self.scenario.step, length)
            finished = "length" if end == length else None
            answer = lie(job.room) if self.scenario.lies else truth(job.room)
            chunks.append(Chunk(relay_room, job.made, answer[job.made : end], None, finished))
            self.jobs[relay_room] = replace(job, made=end)
            if finished:
                over.append(relay_room)
        self.do(self.machine.produced(chunks))
        for relay_room in over:
            self.end(relay_room)

    def end(self, relay_room: int) -> None:
        del self.jobs[relay_room]
        self.do(self.machine.ended(relay_room))

    def unstopped(self) -> set[int]:
        """Rooms that RLD goes on with."""
        told = {c.relay_room for c in self.queue if isinstance(c, StopDecode)}
        return {j.room for r, j in self.jobs.items() if not j.stopping and r not in told}

    def check(self) -> None:
        require(len(self.machine) <= self.scenario.capacity, "more relays than RLD has room for")
        if not self.queue:
            require(len(self.machine) == len(self.jobs), "RLD's sessions are not its engine's")
        alone = clone(self)
        alone.now += relay.SILENCE + 0.1
        alone.do(alone.machine.tick(alone.now))
        alone.run()
        require(not alone.unstopped(), "RLD goes on without word from MD:", *alone.unstopped())

    def is_idle(self) -> bool:
        return not (self.jobs or self.queue or len(self.machine))


def _yes() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Answer:
    """A request as MD's engine has it.

    ``phase``: new, transfer (the metadata is out), leaving (aborted, not yet swept), landed (waits for its extend
    pass), running, done.
    """

    room: int
    phase: str = "new"
    output: tuple[int, ...] = ()
    covered: int = 0  # output tokens whose KV the catch-up has computed
    reason: str = ""


class MNode(Node):
    def __init__(self, scenario: Scenario, name: str, start: int) -> None:
        super().__init__(scenario, name, start)
        self.known = {f"p{i}" for i in range(scenario.prefills)}
        self.machine: Main = scenario.machines.get("main", Main)(COUNTERS, vocab_size=10_000)
        self.answers = {q.room: Answer(q.room) for q in scenario.questions if q.main == name}
        self.emitted: dict[int, tuple[int, ...]] = {}  # what the machine has asked for, of open sessions
        self.full = False

    def beat(self) -> None:
        hello = Hello("main", self.name, (self.id,), {}, "", 0, 0)
        self.out += [Packet(self.id, f"p{i}", hello) for i in range(self.scenario.prefills)]

    def notice(self, peer: str, signal: Signal) -> None:
        if isinstance(signal, Landed):
            answer = self.answers[signal.room]
            if answer.phase == "transfer" and signal.ok:
                self._commit(answer)
            elif answer.phase == "transfer":
                self._set(answer, phase="leaving", reason="error")
        elif isinstance(signal, Died):
            for answer in list(self.answers.values()):
                if answer.phase == "transfer" and f"{self.scenario.question(answer.room).prefill}." in signal.node:
                    self._set(answer, phase="leaving", reason="error")

    def do(self, actions: Iterable[Action]) -> None:
        actions = list(actions)
        for action in actions:
            if isinstance(action, Emit):
                before = self.emitted.get(action.room, ())
                require(action.room in self.emitted, "MD emits for a room that is closed:", action)
                require(action.start == len(before), "MD skips or repeats positions:", action, before)
                self.emitted[action.room] = before + action.ids
                right = self.scenario.is_right(action.room, self.emitted[action.room])
                require(right, "MD emits a wrong token:", action, before)
        super().do(actions)

    def carry_out(self, command: Command) -> None:
        answer = self.answers[command.room]  # type: ignore[union-attr]
        if isinstance(command, Emit):
            self._emit(answer, command)
        else:
            assert isinstance(command, GiveUp)
            if answer.phase == "landed":
                self._set(answer, phase="done", reason="error")
                self._cut(command.room, "aborted")

    def _emit(self, answer: Answer, command: Emit) -> None:
        output = answer.output
        if answer.phase not in ("transfer", "landed") or self.paused or len(output) != command.start:
            return
        end = self.scenario.question(answer.room).tokens
        output = (output + command.ids)[:end]
        self._set(answer, output=output)
        if len(output) == end:
            if answer.phase == "transfer":
                self.signal(self.scenario.question(answer.room).prefill, Left(answer.room))
            self._set(self.answers[answer.room], phase="done", reason="finished")
            self._cut(answer.room, "finished")

    def _commit(self, answer: Answer) -> None:
        if not answer.output:  # SGLang's own path: the first token comes with the KV
            self._own(answer)
            self._cut(answer.room, "landed")
        elif len(answer.output) < 2:
            self._set(answer, phase="running")
            self._cut(answer.room, "landed")
        else:
            self._set(answer, phase="landed")

    def _own(self, answer: Answer) -> None:
        """MD's engine makes the next token, from what the client has seen so far."""
        lies = answer.output[:1] == lie(answer.room)[:1]
        token = (lie if lies else truth)(answer.room)[len(answer.output)]
        output = (*answer.output, token)
        done = len(output) == self.scenario.question(answer.room).tokens
        self._set(answer, output=output, phase="done" if done else "running", reason="finished" if done else "")

    def moves(self) -> Iterable[tuple[Event, str | None]]:
        if self.paused:
            yield ("resume",), None
            return
        idle = all(a.phase in ("new", "landed", "done") for a in self.answers.values())
        for room, answer in self.answers.items():
            if answer.phase == "leaving":
                yield ("sweep", room), None
            elif answer.phase == "landed" and not self.full:
                rest = len(answer.output) - answer.covered
                more = self.scenario.catch_up and rest > self.scenario.catch_up
                yield ("middle" if more else "extend", room), None
            elif answer.phase == "landed" and idle and not self.queue:
                yield ("stuck", room), None
            elif answer.phase == "running":
                yield ("own", room), None
            elif answer.phase == "new":
                yield ("open", room), None
            if answer.phase in ("transfer", "landed", "running"):
                yield ("leave", room), "leave"
        if any(a.phase in ("transfer", "landed") for a in self.answers.values()):
            yield ("fill",), "full"
            yield ("pause",), "pause"
        if self.full:
            yield ("free",), "free"

    def open(self, room: int) -> None:
        self._set(self.answers[room], phase="transfer")
        self.emitted[room] = ()
        self.signal(self.scenario.question(room).prefill, Metadata(room, self.id))
        self.machine.opened(room)

    def middle(self, room: int) -> None:
        answer = self.answers[room]
        self._set(answer, covered=answer.covered + self.scenario.catch_up)

    def extend(self, room: int) -> None:
        self._set(self.answers[room], phase="running", covered=0)
        self._cut(room, "landed")

    def own(self, room: int) -> None:
        self._own(self.answers[room])

    def stuck(self, room: int) -> None:
        self.do(self.machine.stuck(room, self.now))

    def leave(self, room: int) -> None:
        """The client goes away."""
        answer = self.answers[room]
        if answer.phase == "transfer":
            self.signal(self.scenario.question(room).prefill, Left(room))
        self._set(answer, phase="done" if answer.phase == "running" else "leaving", reason="abort")

    def sweep(self, room: int) -> None:
        self._set(self.answers[room], phase="done")
        self._cut(room, "aborted")

    def fill(self) -> None:
        self.full = True

    def free(self) -> None:
        self.full = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def _cut(self, room: int, why: str) -> None:
        self.do(self.machine.cut(room, len(self.answers[room].output), why))
        del self.emitted[room]

    def _set(self, answer: Answer, **changes: Any) -> None:
        self.answers[answer.room] = replace(answer, **changes)

    def open_rooms(self) -> set[int]:
        return {a.room for a in self.answers.values() if a.phase in ("transfer", "leaving", "landed")}

    def wanted(self) -> set[int]:
        """Rooms that a relay may go on with."""
        return {room for room, session in self.machine._sessions.items() if not session.muted}

    def check(self) -> None:
        for answer in self.answers.values():
            right = self.scenario.is_right(answer.room, answer.output)
            require(right, "the client sees a wrong token:", answer)
            if answer.reason == "finished":
                require(len(answer.output) == self.scenario.question(answer.room).tokens, "a wrong end:", answer)
        require(len(self.machine) == len(self.open_rooms()), "MD's sessions are not its engine's")
        for session in self.machine._sessions.values():
            held = sum(len(c.ids) for c in session.held.values())
            require(held <= main.MAX_HELD_TOKENS, "MD holds too many tokens:", held)
        require(len(self.machine._closed) <= main.MAX_REMEMBERED, "MD remembers too many rooms")

    def is_idle(self) -> bool:
        over = all(a.phase == "done" for a in self.answers.values())
        return over and not self.queue and len(self.machine) == 0


ROLES: dict[str, type[Node]] = {"p": PNode, "r": RNode, "m": MNode}


def restarted(node: Node) -> Node:
    """The same role at the same address after a crash. What nobody had asked of it yet, it will still be asked."""
    fresh = type(node)(node.scenario, node.name, node.start + 1)
    if isinstance(node, MNode) and isinstance(fresh, MNode):
        lost = {r: replace(a, phase="done", reason=a.reason or "error") for r, a in node.answers.items()}
        fresh.answers = {r: a if a.phase in ("new", "done") else lost[r] for r, a in node.answers.items()}
    fresh.now = node.now
    return fresh
