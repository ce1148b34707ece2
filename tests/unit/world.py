"""A small world for P, RLD and MD: who is there, what may fail, and what crosses between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_pdd.actions import Action, Command, Dial, HangUp, Send
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import Message, Welcome

Event = tuple[Any, ...]  # a method of a node, and its arguments


class Violation(AssertionError):
    """Something happened that must not."""


def require(condition: bool, what: str, *details: Any) -> None:
    if not condition:
        raise Violation(" ".join([what, *map(repr, details)]))


@dataclass(frozen=True, slots=True)
class Question:
    """What a client will ask for."""

    room: int
    tokens: int  # of the whole answer, as MD judges
    prefill: str = "p0"
    main: str = "m0"
    relayed: bool = True
    beyond: int = 0  # tokens that RLD would make past MD's end: it knows no stop strings


def truth(room: int) -> tuple[int, ...]:
    return tuple(100 * room + i for i in range(50))


def lie(room: int) -> tuple[int, ...]:
    """The answer of a relay whose first token is not P's."""
    return tuple(t + 50 for t in truth(room))


@dataclass(frozen=True)
class Scenario:
    """What there is, and what may go wrong. Each fault costs one of ``faults``; a repair costs nothing."""

    questions: tuple[Question, ...]
    prefills: int = 1
    relays: int = 1
    mains: int = 1
    capacity: int = 1  # relays at once of an RLD
    step: int = 1  # tokens in one message of RLD
    faults: int = 0
    kinds: frozenset[str] = frozenset()
    ticks: int = 0  # while there may be faults; afterwards as many as it takes
    catch_up: int = 0  # most tokens of a pass in the catch-up handoff; 0: one pass over all
    lag: bool = False  # commands wait for a step of their own; else they are carried out at once
    beats: bool = False  # Hellos are packets like others; else they arrive with each tick, unless the link is cut
    lies: bool = False  # RLD's first token is not P's
    machines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # mutants, by role

    def question(self, room: int) -> Question:
        return next(q for q in self.questions if q.room == room)

    def is_right(self, room: int, tokens: tuple[int, ...]) -> bool:
        """An answer may begin so. One must not begin with P's token and go on with a liar's, or the other way round."""
        answers = [truth(room), lie(room)] if self.lies else [truth(room)]
        return any(tokens == answer[: len(tokens)] for answer in answers)


# --- packets ----------------------------------------------------------------------------------------------------


class Signal:
    """What SGLang's engines tell one another over connections of their own. Late at worst, never lost."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Metadata(Signal):
    """MD -> P: where the KV of this room is wanted."""

    room: int
    session: str


@dataclass(frozen=True, slots=True)
class Landed(Signal):
    """P -> MD: the WAN copy has ended."""

    room: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Left(Signal):
    """MD -> P: the transfer is aborted."""

    room: int


@dataclass(frozen=True, slots=True)
class Ready(Signal):
    """RLD -> P: where the KV of this relay room is wanted."""

    relay_room: int


@dataclass(frozen=True, slots=True)
class Copied(Signal):
    """P -> RLD: the LAN copy has ended."""

    relay_room: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Died(Signal):
    """A node's transfer engine is gone."""

    node: str


@dataclass(frozen=True, slots=True)
class Packet:
    src: str  # as the receiver calls the sender: by its node id, which has a dot, if it has dialled; else by its name
    dst: str  # as the sender calls the receiver
    body: Message | Signal


# --- nodes ------------------------------------------------------------------------------------------------------


class _Counters(Counters):
    """Serves all nodes: that a count never shrinks is all that is wanted of it."""

    def inc(self, name: str, n: int | float = 1, /, **labels: str) -> None:
        require(n >= 0, "a counter shrinks:", name, n)
        super().inc(name, n, **labels)


COUNTERS = _Counters()


class Node:
    """A role's state machine with its engine. Takes one event at a time, and answers with packets.

    Everything that a node knows is in its attributes: nodes with equal ones will do the same.

    Args:
        name: where it listens, and what others dial.
        start: how often it had crashed before. Its node id changes with that.
    """

    machine: Any

    def __init__(self, scenario: Scenario, name: str, start: int) -> None:
        self.scenario = scenario
        self.name = name
        self.start = start
        self.now = 1000.0
        self.paused = False  # by SGLang: the engine takes no notice of signals, and drops what it is told to emit
        self.known: set[str] = set()  # whom it can send to
        self.queue: list[Command] = []
        self.out: list[Packet] = []

    @property
    def id(self) -> str:
        return f"{self.name}.{self.start}"

    def apply(self, event: Event) -> list[Packet]:
        getattr(self, event[0])(*event[1:])
        if not self.scenario.lag:
            self.run()
        self.check()
        out, self.out = self.out, []
        return out

    # --- events that all nodes know ---

    def hear(self, packet: Packet) -> None:
        body = packet.body
        if isinstance(body, Signal):
            self.notice(packet.src, body)
        elif not isinstance(body, Welcome):  # that is for `Node` in sglang_pdd
            if "." in packet.src:
                self.known.add(packet.src)
            bootstrap = f"{packet.src}:1" if packet.src.startswith("p") else None
            self.do(self.machine.receive(packet.src, body, self.now, prefill=bootstrap))

    def run(self) -> None:
        """All commands: the scheduler has pulled its requests."""
        while self.queue:
            self.carry_out(self.queue.pop(0))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.machine.tick(self.now))

    def beat(self) -> None:
        """Say Hello to all prefills."""

    # --- what a role provides ---

    def notice(self, peer: str, signal: Signal) -> None:
        raise NotImplementedError

    def carry_out(self, command: Command) -> None:
        raise NotImplementedError

    def moves(self) -> Iterable[tuple[Event, str | None]]:
        """What the engine may do next; and which fault or repair that is, if any."""
        raise NotImplementedError

    def check(self) -> None:
        """What must hold after every event."""

    def is_idle(self) -> bool:
        """Nothing is left of any request."""
        raise NotImplementedError

    # --- inside ---

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                require(action.peer in self.known, "sent to a stranger:", self.id, action)
                self.out.append(Packet(self.name if "." in action.peer else self.id, action.peer, action.message))
            elif isinstance(action, Dial):
                self.known.add(action.endpoint)
            elif isinstance(action, HangUp):
                self.known.discard(action.endpoint)
            else:
                self.queue.append(action)

    def signal(self, to: str, signal: Signal) -> None:
        self.out.append(Packet(self.name, to, signal))
