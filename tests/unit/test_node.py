"""Three nodes over real sockets: discovery, a relay from open to stop, and what a peer may not do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from sglang_pdd.actions import AnswerEarly, Command, Demote, Emit, Follow, OpenRelay, StartDecode, StopDecode
from sglang_pdd.config import PddConfig
from sglang_pdd.discovery import Found
from sglang_pdd.main import Main
from sglang_pdd.metrics import Counters
from sglang_pdd.node import Machine, Node
from sglang_pdd.prefill import Job, Prefill
from sglang_pdd.protocol import Awaited, Chunk, Follows, Hello, Request
from sglang_pdd.relay import Relay
from sglang_pdd.transport import Endpoint

SAME = {"model": "m"}
PROMPT = tuple(range(50))


@dataclass
class FakeFinder:
    """Discovery without HTTP."""

    answers: dict[str, str]
    wanted: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def want(self, bootstrap: str) -> None:
        self.wanted.append(bootstrap)

    def found(self) -> list[Found]:
        found = [Found(w, self.answers[w], "") for w in self.wanted if w in self.answers]
        self.wanted = []
        return found

    def forget(self, bootstrap: str) -> None:
        self.forgotten.append(bootstrap)

    def close(self) -> None: ...


@dataclass
class Role:
    machine: Machine
    node: Node
    counters: Counters
    endpoint: Endpoint

    def wait(self, until: Callable[[list[Command]], bool], others: tuple[Role, ...] = ()) -> list[Command]:
        """Poll everybody until this role's commands satisfy ``until``."""
        seen: list[Command] = []
        deadline = time.monotonic() + 5
        while not until(seen):
            assert time.monotonic() < deadline, f"not in time; seen {seen}"
            for other in others:
                if other is not self:
                    other.node.poll()
            seen += self.node.poll()
            time.sleep(0.001)
        return seen


@dataclass
class Roles:
    p: Role
    md: Role
    rld: Role

    @property
    def all(self) -> tuple[Role, ...]:
        return (self.p, self.md, self.rld)

    def settle(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not until():
            assert time.monotonic() < deadline
            for role in self.all:
                role.node.poll()
            time.sleep(0.001)


@pytest.fixture
def roles() -> Iterator[Roles]:
    made: list[Role] = []

    def make(
        name: str,
        machine: Callable[[Counters], Machine],
        answers: dict[str, str],
        listen: bool,
        sessions: tuple[str, ...],
    ) -> tuple[Role, str]:
        counters = Counters()
        endpoint = Endpoint(name, None, counters)
        address = endpoint.bind("tcp://127.0.0.1:0") if listen else ""
        thing = machine(counters)
        role = {"p": "prefill", "md": "main", "rld": "relay"}[name]

        def hello() -> Hello:
            return Hello(role, address, sessions, SAME, "", 4, 0)

        node = Node(thing, endpoint, FakeFinder(answers), counters, None if name == "p" else hello)  # type: ignore[arg-type]
        made.append(Role(thing, node, counters, endpoint))
        return made[-1], address

    config = PddConfig(role="prefill", relay_policy="always")
    p, p_address = make("p", lambda c: Prefill(c, config, SAME), {}, True, ())
    md, _ = make("md", lambda c: Main(c, 1000), {"p:1": p_address}, True, ("session-md",))
    rld, _ = make("rld", lambda c: Relay(c, 4, 100_000, lambda key: True), {"p:1": p_address}, False, ("session-rld",))
    md.node.want("p:1")
    rld.node.want("p:1")
    result = Roles(p, md, rld)
    result.settle(lambda: p.counters.get("peers", role="main") == 1 and p.counters.get("peers", role="relay") == 1)
    yield result
    for role in made:
        role.node.close()


def test_a_relay_from_open_to_stop(roles: Roles) -> None:
    main, prefill, relay = roles.md.machine, roles.p.machine, roles.rld.machine
    assert isinstance(main, Main) and isinstance(prefill, Prefill) and isinstance(relay, Relay)
    main.opened(77)
    roles.p.node.do(prefill.bootstrapped(Job(77, ("session-md",), Request(PROMPT, {}), 1000.0)))
    early, opened = roles.p.node.poll()
    assert early == AnswerEarly(77) and isinstance(opened, OpenRelay)
    (start,) = roles.rld.wait(bool, roles.all)
    assert isinstance(start, StartDecode) and start.request.prompt == PROMPT and start.relay_room == opened.relay_room
    assert start.bootstrap == "p:1"  # where RLD has found P, whatever P says

    roles.p.node.do(prefill.first_token(("session-md",), Chunk(77, 0, (500,), None, None, (3, 3, 0, 0))))
    (first,) = roles.md.wait(bool, roles.all)
    assert first == Emit(77, 0, (500,), None, "P", (3, 3, 0, 0))

    roles.rld.node.do(relay.produced([Chunk(start.relay_room, 0, (500, 501))]))
    roles.rld.node.do(relay.produced([Chunk(start.relay_room, 2, (502,))]))
    emitted = roles.md.wait(lambda seen: sum(len(e.ids) for e in seen if isinstance(e, Emit)) == 2, roles.all)
    assert [t for e in emitted if isinstance(e, Emit) for t in e.ids] == [501, 502]

    roles.md.node.do(main.cut(77, 3, "landed"))
    (stop,) = roles.rld.wait(bool, roles.all)
    assert stop == StopDecode(start.relay_room, "landed")
    roles.rld.node.do(relay.ended(start.relay_room))
    roles.settle(lambda: not len(main) and not len(relay) and not len(prefill))


def test_a_lost_stop_is_repaired(roles: Roles) -> None:
    main, prefill, relay = roles.md.machine, roles.p.machine, roles.rld.machine
    assert isinstance(main, Main) and isinstance(prefill, Prefill) and isinstance(relay, Relay)
    main.opened(78)
    roles.p.node.do(prefill.bootstrapped(Job(78, ("session-md",), Request(PROMPT, {}), 1000.0)))
    (start,) = roles.rld.wait(bool, roles.all)
    assert isinstance(start, StartDecode)
    main.cut(78, 0, "aborted")  # and nobody sends what it asks for
    (stop,) = roles.rld.wait(bool, roles.all)  # RLD's Ping is answered: that room is over
    assert stop == StopDecode(start.relay_room, "closed")


def test_main_tells_a_prefill_that_it_knows(roles: Roles) -> None:
    roles.md.node.tell("q:1", Awaited(78, False))
    roles.md.node.tell("p:1", Awaited(77, False))
    assert roles.p.wait(bool, roles.all) == [Demote(77, ("session-md",), True)]
    roles.md.node.tell("p:1", Follows(77, 16, ((78, 32), (79, 0))))
    assert roles.p.wait(bool, roles.all) == [Follow(77, ("session-md",), 16, ((78, 32), (79, 0)))]


def test_an_exception_in_the_state_machine_is_a_dropped_message(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles.p.machine, "receive", lambda *a, **k: 1 / 0, raising=False)
    roles.settle(lambda: roles.p.counters.get("hooks.errors", hook="receive") > 0)


def test_a_silent_prefill_is_looked_up_again(roles: Roles) -> None:
    roles.settle(lambda: any(roles.md.node._heard.values()))
    roles.p.node.close()
    time.sleep(0.05)
    roles.md.node.poll()  # what P had said before
    roles.md.node._clock = lambda: time.monotonic() + 60
    roles.md.node.poll()
    finder = roles.md.node._finder
    assert isinstance(finder, FakeFinder) and finder.forgotten == ["p:1"]
