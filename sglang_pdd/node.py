"""A node: the state machine of its role with a network and a clock. Runs on rank 0, in the scheduler's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from sglang_pdd.actions import Action, Command, Dial, HangUp, Send
from sglang_pdd.discovery import Finder
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import Hello, Message, Welcome
from sglang_pdd.transport import Endpoint, TransportError

logger = logging.getLogger(__name__)

BEAT = 1.0  # seconds between Hellos
TICK = 0.1  # seconds between looks at the clock
SILENCE = 10.0  # seconds without a Welcome, after which a prefill is looked up again


class Machine(Protocol):
    def receive(self, peer: str, message: Message, now: float, *, prefill: str | None = None) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]: ...
    def __len__(self) -> int: ...


class Node:
    """Args:
    hello: what this node says of itself to prefills; None for a prefill.
    keyed: this node has CURVE keys.
    """

    def __init__(
        self,
        machine: Machine,
        endpoint: Endpoint,
        finder: Finder,
        counters: Counters,
        hello: Callable[[], Hello] | None = None,
        keyed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._endpoint = endpoint
        self._finder = finder
        self._counters = counters
        self._hello = hello
        self._keyed = keyed
        self._clock = clock
        self._prefills: dict[str, str] = {}  # endpoint -> bootstrap address
        self._heard: dict[str, float] = {}  # endpoint of a prefill -> when it last spoke
        self._greeted: dict[str, Welcome] = {}  # endpoint of a prefill -> what it last said of this node
        self._commands: list[Command] = []
        self._next_beat = self._next_tick = 0.0

    def poll(self) -> list[Command]:
        """Everything that has happened since the last call, as commands for the scheduler."""
        now = self._clock()
        for peer, message in self._endpoint.receive():
            if isinstance(message, Welcome):
                if peer in self._prefills:
                    self._welcome(peer, message, now)
            else:
                self._receive(peer, message, now)
        if now >= self._next_tick:
            self._next_tick = now + TICK
            self._discover()
            self.do(self._machine.tick(now))
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self._beat(now)
        commands, self._commands = self._commands, []
        return commands

    def do(self, actions: Iterable[Action]) -> None:
        """Carry actions out; commands wait for the next `poll`."""
        for action in actions:
            if isinstance(action, Send):
                self._endpoint.send(action.peer, action.message)
            elif isinstance(action, Dial):
                self._dial(action.endpoint, action.public_key)
            elif isinstance(action, HangUp):
                if action.endpoint not in self._prefills:
                    self._endpoint.hangup(action.endpoint)
            else:
                self._commands.append(action)

    def want(self, bootstrap: str) -> None:
        """There is a prefill at this bootstrap address (host:port)."""
        if self._hello is not None:
            self._finder.want(bootstrap)

    def tell(self, bootstrap: str, message: Message) -> None:
        """Say this to the prefill at a bootstrap address, if it is known."""
        for endpoint in [e for e, known in self._prefills.items() if known == bootstrap]:
            self._endpoint.send(endpoint, message)

    def close(self) -> None:
        self._finder.close()
        self._endpoint.close()

    def _receive(self, peer: str, message: Message, now: float) -> None:
        try:
            self.do(self._machine.receive(peer, message, now, prefill=self._prefills.get(peer)))
        except Exception:  # a message must not be able to end the server
            self._counters.inc("hooks.errors", hook="receive")
            logger.exception("PDD: dropped %s from %s", type(message).__name__, peer)

    def _discover(self) -> None:
        for found in self._finder.found():
            for endpoint in [e for e, b in self._prefills.items() if b == found.bootstrap and e != found.endpoint]:
                del self._prefills[endpoint]  # that prefill has moved
                self._endpoint.hangup(endpoint)
            if found.public_key and not self._keyed:
                logger.error("PDD: prefill %s uses keys, this node has none: give --pdd-keys", found.bootstrap)
            if found.endpoint not in self._prefills and self._dial(found.endpoint, found.public_key):
                logger.info("PDD: prefill %s answers at %s", found.bootstrap, found.endpoint)
                self._prefills[found.endpoint] = found.bootstrap
                self._next_beat = 0.0

    def _dial(self, endpoint: str, public_key: str) -> bool:
        try:
            self._endpoint.dial(endpoint, public_key)
        except TransportError as error:
            self._counters.inc("discovery.errors", cause="dial")
            logger.warning("PDD: %s", error)
            return False
        return True

    def _beat(self, now: float) -> None:
        self._counters.set("relay.active", len(self._machine))
        if self._hello is None or not self._prefills:
            return
        hello = self._hello()
        for endpoint, bootstrap in self._prefills.items():
            self._endpoint.send(endpoint, hello)
            if now - self._heard.setdefault(endpoint, now) > SILENCE:
                self._heard[endpoint] = now
                logger.warning("PDD: prefill %s is silent: looking it up again", bootstrap)
                self._finder.forget(bootstrap)

    def _welcome(self, peer: str, welcome: Welcome, now: float) -> None:
        self._heard[peer] = now
        if not welcome.accepted:
            self._counters.inc("messages.dropped", cause="unwelcome")
        if self._greeted.get(peer) == welcome:  # it comes with every Hello
            return
        self._greeted[peer] = welcome
        where = self._prefills[peer]
        if welcome.accepted:
            logger.info("PDD: prefill %s knows this node", where)
        else:
            logger.error("PDD: prefill %s refuses this node: %s", where, welcome.reason)
