"""All that can happen in a small world, or a random part of it in a larger one.

The network may lose, repeat, delay and reorder packets; equal packets in flight on the same way count as one. States
are compared by what their nodes hold (`states.key`), so that each is visited once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from roles import ROLES, MNode, RNode, restarted
from states import clone, key
from world import Copied, Died, Event, Node, Packet, Scenario, Signal, Violation

from sglang_pdd.protocol import RelayReply

TICK = 8.0  # seconds: two ticks make every time-out, and one makes those of less than that
SLOW_TICKS = 2
LATE_TICKS = {
    "quick": 1,
    "slow": 1,
    "dark": 2,
}  # until RLD knows that it must stop: a Ping; or silence, which takes two
MOST_TICKS = 8  # until all is over once nothing fails any more


class State(NamedTuple):
    nodes: tuple[int, ...]  # one for each place, as numbered by the world
    net: int = 0  # packets in flight, a bit each
    down: int = 0  # links that are cut, a bit each
    faults: int = 0  # that may still happen
    ticks: int = 0  # and ticks


Label = tuple[Any, ...]
Step = tuple[Label, State]


class World:
    """What can follow a state. What one node does on one event is computed once, by the real machines."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.nodes: list[Node] = []
        self.packets: list[Packet] = []
        counts = {"p": scenario.prefills, "r": scenario.relays, "m": scenario.mains}
        self.places = [f"{role}{i}" for role, n in counts.items() for i in range(n)]
        self.links = [(a, b) for a in self.places for b in self.places if a[0] + b[0] in ("rp", "mp", "rm")]
        self._place = {name: i for i, name in enumerate(self.places)}
        self._numbers: dict[Any, int] = {}  # key -> index in nodes
        self._moves: list[tuple[tuple[Event, str | None], ...]] = []  # for each of nodes
        self._packet_numbers: dict[Any, int] = {}
        self._link: list[int] = []  # for each of packets: a bit; none for SGLang's own
        self._reliable = 0  # SGLang's own packets
        self._steps: dict[tuple[int, Event], tuple[int, int]] = {}

    def begin(self) -> State:
        nodes = tuple(self._number(ROLES[name[0]](self.scenario, name, 0)) for name in self.places)
        return self._greet(State(nodes, 0, 0, self.scenario.faults, self.scenario.ticks))

    # --- what can happen ---

    def successors(self, state: State) -> Iterator[Step]:
        yield from self.ordinary(state)
        if state.ticks:
            yield self.tick(state._replace(ticks=state.ticks - 1), TICK)
        yield from self.unusual(state)

    def ordinary(self, state: State) -> Iterator[Step]:
        """What must happen some time if nothing else does, but for the clock."""
        for i in _bits(state.down):
            yield ("heal", *self.links[i]), state._replace(down=state.down & ~(1 << i))
        for i in _bits(state.net):
            if self._can_arrive(state, i):
                yield self._deliver(state, i)
        yield from self._work(state)

    def tick(self, state: State, seconds: float) -> Step:
        for place in range(len(state.nodes)):
            state = self._step(state, place, ("tick", seconds))
        if not self.scenario.beats:
            return ("tick", seconds), self._greet(state)
        for place in range(len(state.nodes)):
            state = self._step(state, place, ("beat",))
        return ("tick", seconds), state

    def unusual(self, state: State) -> Iterator[Step]:
        """Repairs that nobody can count on, and faults as long as there may be some."""
        kinds = self.scenario.kinds
        worse = state._replace(faults=state.faults - 1)
        for place, n in enumerate(state.nodes):
            for event, fault in self._moves[n]:
                if fault == "free":
                    yield (self.places[place], *event), self._step(state, place, event)
                elif state.faults and fault in kinds:
                    yield (self.places[place], *event), self._step(worse, place, event)
        if not state.faults:
            return
        for i in _bits(state.net & ~self._reliable):
            without = worse._replace(net=state.net & ~(1 << i))
            if "drop" in kinds:
                yield ("drop", self.packets[i]), without
            if "repeat" in kinds:
                _, after = self._deliver(worse, i)
                yield ("repeat", self.packets[i]), after._replace(net=after.net | 1 << i)
        for i, pair in enumerate(self.links):
            if "cut" in kinds and not state.down >> i & 1:
                rest = sum(1 << k for k in _bits(state.net) if self._link[k] != 1 << i)
                yield ("cut", *pair), worse._replace(net=rest, down=state.down | 1 << i)
        for place, name in enumerate(self.places):
            if f"crash {name[0]}" in kinds:
                yield ("crash", name), self._crash(worse, place)

    def apply(self, state: State, label: Label) -> State | None:
        """Do what had this label before, if it is possible here."""
        if label[0] == "tick":
            return self.tick(state, label[1])[1]
        steps = (step for way in (self.ordinary, self.unusual) for step in way(state))
        return next((after for found, after in steps if found == label), None)

    # --- what is left when nothing fails any more ---

    def calm(self, state: State, kind: str) -> State:
        """Where `settle` of this kind begins. How many faults there were does not matter, but whether there were."""
        faults = state.faults if state.faults == self.scenario.faults else 0
        if kind == "dark":
            return State(state.nodes, state.net & self._reliable, (1 << len(self.links)) - 1, faults)
        return State(state.nodes, state.net, 0, faults, SLOW_TICKS if kind == "slow" else 0)

    def settle(self, state: State, kind: str) -> Step | None:
        """The next step if nothing fails any more; None at the end.

        quick: every packet arrives, and every engine works. slow: RLD never gets its KV and makes no token, and the
        other engines do nothing new for some time. dark: RLD makes no token either, and only SGLang's packets arrive.
        """
        quick = kind == "quick"
        for i in _bits(state.net):
            if (quick or not isinstance(self.packets[i].body, Copied)) and self._can_arrive(state, i):
                return self._deliver(state, i)
        work = (s for s in self._work(state) if s[1] != state and (quick or s[0][1] not in ("decode", "lan")))
        if state.ticks:  # what is over is swept away all the same
            tick = self._tick_and_greet(state._replace(ticks=state.ticks - 1))
            return next((s for s in work if s[0][1] in ("end", "sweep", "resume", "run")), tick)
        step = next(work, None) or self._tick_and_greet(state)
        return None if step[1] == state else step

    def events(self) -> frozenset[str]:
        return frozenset(event[0] for _, event in self._steps)

    def is_late(self, state: State) -> bool:
        """RLD goes on with a request for which MD takes nothing more from it."""
        nodes = [self.nodes[n] for n in state.nodes]
        going_on = {room for node in nodes if isinstance(node, RNode) for room in node.unstopped()}
        return bool(going_on - {room for node in nodes if isinstance(node, MNode) for room in node.wanted()})

    def check_end(self, state: State) -> None:
        for node in (self.nodes[n] for n in state.nodes):
            if not node.is_idle():
                raise Violation(f"{node.name} holds something for ever: {vars(node)} {vars(node.machine)}")
            if isinstance(node, MNode) and state.faults == self.scenario.faults:
                for answer in node.answers.values():
                    if answer.reason != "finished":
                        raise Violation(f"nothing failed, but the answer did: {answer}")

    # --- inside ---

    def _work(self, state: State) -> Iterator[Step]:
        for place, n in enumerate(state.nodes):
            for event, fault in self._moves[n]:
                if fault is None:
                    yield (self.places[place], *event), self._step(state, place, event)

    def _can_arrive(self, state: State, i: int) -> bool:
        signal = self._reliable >> i & 1
        return not (signal and self.nodes[state.nodes[self._place[self.packets[i].dst]]].paused)

    def _deliver(self, state: State, i: int) -> Step:
        packet = self.packets[i]
        place = self._place[packet.dst.partition(".")[0]]
        return ("deliver", packet), self._step(state, place, ("hear", i), state.net & ~(1 << i))

    def _step(self, state: State, place: int, event: Event, net: int | None = None) -> State:
        nodes, before, down, faults, ticks = state
        old = nodes[place]
        known = self._steps.get((old, event))
        if known is None:
            known = self._steps[old, event] = self._compute(old, event)
        new, out = known
        if new != old:
            nodes = (*nodes[:place], new, *nodes[place + 1 :])
        if out:
            out = self._sent(state, out)
        return State(nodes, (before if net is None else net) | out, down, faults, ticks)

    def _compute(self, number: int, event: Event) -> tuple[int, int]:
        node = clone(self.nodes[number])
        if event[0] == "hear":
            event = ("hear", self.packets[event[1]])
        try:
            out = node.apply(event)
        except Exception as error:
            raise Violation(f"{node.id}, {event}: {type(error).__name__}: {error}") from error
        return self._number(node), sum({1 << self._packet(p) for p in out})

    def _sent(self, state: State, out: int) -> int:
        """What is sent on a cut link, or to a node that has started anew since, is lost."""
        for i in _bits(out):
            dst, body = self.packets[i].dst, self.packets[i].body
            name, dot, _ = dst.partition(".")
            gone = dot and self.nodes[state.nodes[self._place[name]]].id != dst
            # P does nothing with an accepting reply: half as many states.
            idle = isinstance(body, RelayReply) and body.accepted and not self.scenario.beats
            if gone or idle or self._link[i] & state.down:
                out &= ~(1 << i)
        return out

    def _greet(self, state: State) -> State:
        """All Hellos arrive at once. Nobody waits for the Welcomes."""
        for place, name in enumerate(self.places):
            if name[0] != "p":
                net = state.net
                greeting = self._step(state._replace(net=0), place, ("beat",))
                for i in _bits(greeting.net):
                    greeting = self._deliver(greeting, i)[1]
                state = greeting._replace(net=net)
        return state

    def _tick_and_greet(self, state: State) -> Step:
        for place in range(len(state.nodes)):
            state = self._step(state, place, ("tick", TICK))
        return ("tick", TICK), self._greet(state)

    def _crash(self, state: State, place: int) -> State:
        node = self.nodes[state.nodes[place]]
        net = state.net
        for i in _bits(net):
            packet = self.packets[i]
            its_own = node.name in (packet.src.partition(".")[0], packet.dst.partition(".")[0])
            # What a peer has sent to the address waits for whoever listens there next.
            if packet.dst == node.id or (its_own and self._reliable >> i & 1):
                net &= ~(1 << i)
        for to in self.places:
            if to[0] != node.name[0] and "p" in (to[0], node.name[0]):
                net |= 1 << self._packet(Packet(node.name, to, Died(node.id)))
        fresh = self._number(restarted(node))
        return state._replace(nodes=(*state.nodes[:place], fresh, *state.nodes[place + 1 :]), net=net)

    def _number(self, node: Node) -> int:
        number = self._numbers.setdefault(key(node, node.now), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
            run = [(("run",), None)] if node.queue else []
            self._moves.append((*node.moves(), *run))
        return number

    def _packet(self, packet: Packet) -> int:
        number = self._packet_numbers.setdefault(key(packet, 0.0), len(self.packets))
        if number == len(self.packets):
            self.packets.append(packet)
            ends = {packet.src.partition(".")[0], packet.dst.partition(".")[0]}
            signal = isinstance(packet.body, Signal)
            self._reliable |= signal << number
            self._link.append(sum(1 << i for i, pair in enumerate(self.links) if {*pair} == ends and not signal))
        return number


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# --- everything -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    states: int
    steps: int
    nodes: int  # different states of single nodes
    events: frozenset[str]  # what nodes did
    ticks: dict[str, int]  # on the longest way to the end


def explore(scenario: Scenario) -> Explored:
    """Visit every state that can be reached, and see from each that all ends well.

    Raises:
        Violation: with a shortest way to it.
    """
    world = World(scenario)
    state = world.begin()
    came: dict[State, State | None] = {state: None}
    frontier = deque([state])
    steps = 0
    ticks: dict[str, int] = {}
    try:
        while frontier:
            state = frontier.popleft()
            for _, after in world.successors(state):
                steps += 1
                if after not in came:
                    came[after] = state
                    frontier.append(after)
        for kind in LATE_TICKS:
            endings = Endings(world, kind)
            for state in came:
                endings.check(state)
            ticks[kind] = max(ticks for ticks, _ in endings.known.values())
    except Violation as violation:
        raise Violation(f"{violation}\n{_way(world, came, state)}") from violation
    return Explored(len(came), steps, len(world.nodes), world.events(), ticks)


class Endings:
    """From each state the same way on, until nothing changes any more."""

    def __init__(self, world: World, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.known: dict[State, tuple[int, int]] = {}  # ticks until the end, and until RLD stops what it must stop
        self._values: dict[tuple[int, int], tuple[int, int]] = {}  # there are few: kept once

    def check(self, state: State) -> None:
        world = self.world
        state = world.calm(state, self.kind)
        way: dict[State, bool] = {}  # state -> the step from here is a tick
        while state not in self.known:
            if state in way:
                raise Violation(f"{self.kind}: this goes on for ever")
            step = world.settle(state, self.kind)
            if step is None:
                world.check_end(state)
                self.known[state] = (0, 0)
                break
            label, after = step
            way[state] = label[0] == "tick"
            state = after
        ticks, late = self.known[state]
        for state, is_tick in reversed(way.items()):
            ticks += is_tick
            late = late + is_tick if world.is_late(state) else 0
            self.known[state] = self._values.setdefault((ticks, late), (ticks, late))
            if late > LATE_TICKS[self.kind]:
                raise Violation(f"{self.kind}: {late} ticks after MD wants no more RLD still goes on")
            if ticks > MOST_TICKS:
                raise Violation(f"{self.kind}: not over after {MOST_TICKS} ticks")


def _way(world: World, came: dict[State, State | None], state: State) -> str:
    labels: list[Label] = []
    while (before := came[state]) is not None:
        labels.append(next(label for label, after in world.successors(before) if after == state))
        state = before
    return "\n".join(map(str, reversed(labels)))


# --- at random --------------------------------------------------------------------------------------------------


class Failed(Violation):
    """A walk that went wrong, and the way."""

    def __init__(self, scenario: Scenario, labels: list[Label], what: str) -> None:
        super().__init__(what)
        self.scenario = scenario
        self.labels = labels


def walk(scenario: Scenario, rng: random.Random, steps: int) -> None:
    """One way through a world. Now and then, and at last, see that from here all would end well.

    Raises:
        Failed: something went wrong.
    """
    world = World(scenario)
    state = world.begin()
    labels: list[Label] = []
    wan = rng.choice((1.0, 0.1, 0.02))  # how fast it is: slow enough, and the relay has much to do
    try:
        for _ in range(steps):
            chance = rng.random()
            if chance < 0.05:
                _check_endings(world, state)
            elif chance < 0.1:
                labels.append(("tick", rng.choice((0.1, 0.5, 1.0, 3.0, 8.0, 20.0))))
                _, state = world.tick(state, labels[-1][1])
            elif choices := list(world.unusual(state) if chance < 0.15 else world.ordinary(state)):
                weights = [wan if label[1] == "wan" else 1.0 for label, _ in choices]
                label, state = rng.choices(choices, weights)[0]
                labels.append(label)
        _check_endings(world, state)
    except Violation as violation:
        raise Failed(scenario, labels, str(violation)) from violation


def _check_endings(world: World, state: State) -> None:
    for kind in LATE_TICKS:
        Endings(world, kind).check(state)


def replay(scenario: Scenario, labels: list[Label]) -> str | None:
    """What goes wrong on this way, if anything. A step that is not possible is left out."""
    world = World(scenario)
    state = world.begin()
    try:
        for label in labels:
            state = world.apply(state, label) or state
        deque(world.successors(state), maxlen=0)  # the last step is one of these, and says itself what it was
        _check_endings(world, state)
    except Violation as violation:
        return str(violation)
    return None


def shrink(failed: Failed) -> str:
    """A shorter way to a violation, in words."""
    labels = failed.labels
    size = len(labels)
    while size:
        for start in range(len(labels) - size, -1, -size):
            shorter = labels[:start] + labels[start + size :]
            if replay(failed.scenario, shorter) is not None:
                labels = shorter
        size //= 2
    return "\n".join([*map(str, labels), str(replay(failed.scenario, labels))])
