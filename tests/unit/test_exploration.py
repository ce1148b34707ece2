"""P, RLD and MD through everything that can happen in a small world, and through a part of it in larger ones.

What must hold after every step is said in `roles.py` (`check`, and `require` where it happens), what must hold in the
end in `explorer.py`. An exploration is over when no unvisited state is left. It has no other bounds than its scenario:
so many requests and tokens, so many faults, and so many ticks while there may still be faults. From each of its states
three ways then lead to the end, with as many ticks as that takes.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from explorer import Failed, explore, shrink, walk
from world import Question, Scenario, Violation

from sglang_pdd import main, relay
from sglang_pdd.actions import Action
from sglang_pdd.main import Main
from sglang_pdd.prefill import Prefill
from sglang_pdd.protocol import Chunk, Message, Pong, Stop
from sglang_pdd.relay import Relay

pytestmark = pytest.mark.timeout(3600)
FULL = pytest.mark.full

NETWORK = frozenset({"drop", "repeat", "cut"})
ENGINES = frozenset({"lan", "wan", "leave", "full", "pause"})
CRASHES = frozenset({"crash p", "crash r", "crash m"})
ALL = NETWORK | ENGINES | CRASHES
DRAIN = frozenset({"drain"})

ONE = (Question(1, 3),)
TWO = (Question(1, 2), Question(2, 2))


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within reach of a few tokens and a few ticks."""
    monkeypatch.setattr(relay, "IDLE", 10.0)
    monkeypatch.setattr(main, "MAX_HELD_TOKENS", 2)
    monkeypatch.setattr(main, "MAX_REMEMBERED", 1)


# --- everything -------------------------------------------------------------------------------------------------

# With the number of states when this was written: far fewer would be a world that stands still.
SMALL = {
    "one fault": (Scenario((Question(1, 4),), faults=1, kinds=ALL), 46_703),
    "a network fault and a time-out": (Scenario(ONE, faults=1, ticks=1, kinds=NETWORK), 68_740),
    "a crash and a time-out": (Scenario(ONE, faults=1, ticks=1, kinds=CRASHES), 77_330),
    "catch-up": (Scenario((Question(1, 4, beyond=1),), step=2, catch_up=1, faults=1, kinds=ALL), 26_103),
    "another first token": (Scenario(ONE, lies=True, faults=1, kinds=ALL), 26_843),
    "commands take their time": (Scenario(ONE, lag=True, faults=1, kinds=ENGINES), 23_445),
    "a relay that is to end": (Scenario(ONE, faults=1, ticks=1, kinds=DRAIN), 15_937),
    "two share a relay": (Scenario(TWO, capacity=2, step=2), 71_521),
}
LARGE = {
    "two faults of four tokens": (Scenario((Question(1, 4),), faults=2, kinds=ALL), 423_887),
    "three faults": (Scenario(ONE, faults=3, kinds=ALL), 821_498),
    "two faults and a time-out": (Scenario(ONE, faults=2, ticks=1, kinds=ALL), 1_984_500),
    "two network faults and two time-outs": (Scenario(ONE, faults=2, ticks=2, kinds=NETWORK), 1_422_015),
    "two faults in a catch-up": (replace(SMALL["catch-up"][0], faults=2), 229_034),
    "two faults and another first token": (Scenario(ONE, lies=True, faults=2, kinds=ALL), 251_232),
    "a fault, a time-out and another first token": (Scenario(ONE, lies=True, faults=1, ticks=1, kinds=ALL), 276_222),
    "a fault while commands take their time": (Scenario(ONE, lag=True, faults=1, kinds=ALL), 76_532),
    "Hellos take their time": (Scenario(ONE, beats=True, ticks=1), 91_200),
    "two want one relay": (Scenario(TWO, faults=1, kinds=ALL), 291_087),
    "two share a relay and are handed over": (Scenario((Question(1, 3), TWO[1]), capacity=2, step=2), 203_813),
    "two share a relay, token by token": (Scenario(TWO, capacity=2), 273_201),
    "two share a relay that is to end": (Scenario(TWO, capacity=2, step=2, faults=1, kinds=DRAIN), 154_554),
    "two share a relay, and a fault": (Scenario(TWO, capacity=2, step=2, faults=1, kinds=ALL), 2_073_673),
}


@pytest.mark.parametrize(
    "scenario, states",
    [
        *(pytest.param(*world, id=name) for name, world in SMALL.items()),
        *(pytest.param(*world, id=name, marks=FULL) for name, world in LARGE.items()),
    ],
)
def test_everything_that_can_happen(scenario: Scenario, states: int) -> None:
    explored = explore(scenario)
    print(explored)
    assert explored.states > states / 2
    happened = {"prefill", "lan", "wan", "decode", "end", "own", "tick"}
    extends = any(q.tokens > 2 for q in scenario.questions)
    happened |= {"extend"} if extends else set()
    happened |= {"middle"} if scenario.catch_up else set()
    happened |= {"leave", "resume", "sweep"} if scenario.kinds >= ENGINES else set()
    happened |= {"stuck"} if scenario.kinds >= ENGINES and extends else set()
    assert happened <= explored.events


# --- at random --------------------------------------------------------------------------------------------------


def random_scenario(rng: random.Random) -> Scenario:
    """Up to two of each role, five requests, and ten faults of some kinds."""
    prefills, relays, mains = (rng.randint(1, 2) for _ in range(3))
    return Scenario(
        tuple(
            Question(
                room,
                tokens=rng.choice((1, 2, 4, 8, 16)),
                prefill=f"p{rng.randrange(prefills)}",
                main=f"m{rng.randrange(mains)}",
                relayed=rng.random() < 0.8,
                beyond=rng.choice((0, 0, 2)),
            )
            for room in range(1, rng.randint(2, 5) + 1)
        ),
        prefills,
        relays,
        mains,
        capacity=rng.randint(1, 3),
        step=rng.randint(1, 3),
        faults=rng.randint(0, 10),
        kinds=frozenset(kind for kind in sorted(ALL | DRAIN) if rng.random() < 0.5),
        catch_up=rng.randint(0, 2),
        lag=rng.random() < 0.5,
        beats=rng.random() < 0.5,
        lies=rng.random() < 0.1,
    )


def walk_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        try:
            walk(random_scenario(rng), rng, steps=250)
        except Failed as failed:
            again = f"PDD_TEST_SEED={seed} {sys.executable} -m pytest {__file__}::test_random_walks"
            pytest.fail(f"seed {seed}: {failed}\n{failed.scenario}\n{shrink(failed)}\nto see it again:\n{again}")


def test_random_walks() -> None:
    one = os.environ.get("PDD_TEST_SEED")
    walk_all([int(one)] if one else range(60))


@FULL
def test_many_random_walks() -> None:
    walk_all(range(60, 4000))


# --- that all this can fail -------------------------------------------------------------------------------------


class Hasty(Main):
    """Takes tokens as they come."""

    def _hold(self, session: Any, chunk: Chunk) -> list[Action]:
        return self._accept(session, replace(chunk, start=len(session.accepted)), 0)


class Trusting(Main):
    """Takes any relay's word."""

    def _contradicts(self, session: Any, chunk: Chunk) -> bool:
        return False


class Unproven(Main):
    """Takes a relay's tokens without having seen its first."""

    def opened(self, room: int) -> None:
        super().opened(room)
        self._sessions[room].proven = True


class Discreet(Main):
    """Does not say again that it wants no more."""

    def _wants(self, room: int) -> bool:
        return room in self._sessions


class Hoarder(Main):
    """Keeps the sessions of requests that its engine is done with."""

    def cut(self, room: int, kept: int, why: str) -> list[Action]:
        session = self._sessions[room]
        actions = super().cut(room, kept, why)
        self._sessions[room] = session
        return actions


class Deaf(Relay):
    """Hears MD, but does not listen."""

    def receive(self, peer: str, message: Message, now: float, *, prefill: str | None = None) -> list[Action]:
        told = isinstance(message, Stop | Pong)
        return super().receive(peer, Pong() if told else message, now, prefill=prefill)


class Patient(Relay):
    """Waits for MD for ever."""

    def tick(self, now: float) -> list[Action]:
        for session in self._sessions.values():
            session.heard = now
        return super().tick(now)


class Hospitable(Relay):
    """Takes whoever comes."""

    def _refusal(self, *args: Any) -> None:
        return None


class Devoted(Relay):
    """Takes relays to its very end."""

    def _refusal(self, *args: Any) -> str | None:
        draining, self._draining = self._draining, lambda: False
        reason = super()._refusal(*args)
        self._draining = draining
        return reason


class Clinging(Prefill):
    """Never drops a relay."""

    def gave_up(self, relay_room: int, why: str) -> list[Action]:
        return []


class Forward(Prefill):
    """Speaks to nodes that have never spoken to it."""

    def copied(self, relay_room: int) -> list[Action]:
        return [*super().copied(relay_room), *self.first_token(("x",), Chunk(1, 0, ()))]

    def _owner(self, sessions: tuple[str, ...]) -> str | None:
        return "x.0" if sessions == ("x",) else super()._owner(sessions)


DROP = frozenset({"drop"})
MUTANTS: dict[Callable[..., Any], tuple[Scenario, str]] = {
    Hasty: (Scenario(ONE), "wrong token"),
    Trusting: (Scenario(ONE, lies=True), "wrong token"),
    Unproven: (Scenario(ONE, lies=True, faults=1, kinds=DROP), "wrong token"),
    Discreet: (Scenario(ONE, lies=True, faults=1, kinds=DROP), "RLD still goes on"),
    Hoarder: (Scenario(ONE), "MD's sessions are not its engine's"),
    Deaf: (Scenario(ONE), "goes on for ever"),
    Patient: (Scenario(ONE), "RLD goes on without word from MD"),
    Hospitable: (Scenario(TWO, ticks=1), "more relays than RLD has room for"),
    Devoted: (Scenario(ONE, faults=1, kinds=DRAIN), "although it is to end"),
    Clinging: (Scenario(ONE), "P holds a relay that has no copy"),
    Forward: (Scenario(ONE), "stranger"),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_machine_is_found(mutant: type[Main | Relay | Prefill]) -> None:
    scenario, what = MUTANTS[mutant]
    role = {Main: "main", Relay: "relay", Prefill: "prefill"}[mutant.__mro__[1]]
    with pytest.raises(Violation, match=what):
        explore(replace(scenario, machines={role: mutant}))


def test_a_failing_walk_becomes_a_short_one() -> None:
    scenario = Scenario(TWO, capacity=2, faults=3, kinds=ALL, machines={"main": Hasty})
    rng = random.Random(0)
    with pytest.raises(Failed) as caught:
        for _ in range(20):
            walk(scenario, rng, steps=100)
    way = shrink(caught.value).splitlines()
    assert "wrong token" in way[-1]
    assert len(way) < min(15, len(caught.value.labels))
