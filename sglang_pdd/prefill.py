"""P's side, without I/O: who is there, which request gets a relay, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sglang_pdd import policy
from sglang_pdd.actions import Action, AnswerEarly, Demote, DropRelay, Follow, KnowLandings, OpenRelay, Send
from sglang_pdd.config import PddConfig
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import (
    ROOM_LIMIT,
    Abort,
    Awaited,
    Chunk,
    Follows,
    Hello,
    Message,
    RelayOpen,
    RelayReply,
    Request,
    Tokens,
    Welcome,
)

PEER_TIMEOUT = 10.0  # seconds without a Hello
REFUSALS = ("drain", "full", "share", "memory", "key", "prompt")  # the first words of what a relay answers
_STRIDE = 0x9E3779B97F4A7C15  # odd, so that rooms map to relay rooms one to one
_OFFSET = 0x5851F42D4C957F2D


def _word(text: str, known: Iterable[str]) -> str:
    """A peer's text as a metric label: one of a fixed set."""
    return next((word for word in known if text.startswith(word)), "other")


@dataclass(frozen=True, slots=True)
class Job:
    """A request whose MD has said what it holds."""

    room: int
    sessions: tuple[str, ...]  # MD's transfer-engine sessions
    request: Request
    landing_ms: float  # predicted, after prefill
    obstacle: str | None = None  # why it can't be relayed


@dataclass(slots=True)
class _Peer:
    hello: Hello
    seen: float
    late: policy.Hysteresis  # does KV land late there? (of a main decode)
    asked: int = 0  # relays opened here since its last Hello


@dataclass(slots=True)
class _Relaying:
    room: int
    node: str


@dataclass
class Prefill:
    """Peers by node id, relays by relay room.

    Args:
        fingerprint: what peers must have in common with this node.
    """

    counters: Counters
    config: PddConfig
    fingerprint: Mapping[str, str]
    peers: dict[str, _Peer] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)  # engine session -> node id
    _relays: dict[int, _Relaying] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._relays)

    def receive(self, peer: str, message: Message, now: float, *, prefill: str | None = None) -> list[Action]:
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        if peer not in self.peers:
            self.counters.inc("messages.dropped", cause="unwelcome")
        elif isinstance(message, RelayReply) and not message.accepted and self._is_mine(peer, message.relay_room):
            self.counters.inc("relay.refused", reason=_word(message.reason, REFUSALS))
            return self._drop(message.relay_room, "refused")
        elif isinstance(message, Abort) and self._is_mine(peer, message.room):
            return self._drop(message.room, _word(message.why, ("ended",)))
        elif isinstance(message, Awaited) and self.peers[peer].hello.role == "main":
            return [Demote(message.room, self.peers[peer].hello.sessions, not message.awaited)]
        elif isinstance(message, Follows) and self.peers[peer].hello.role == "main":
            return [Follow(message.room, self.peers[peer].hello.sessions, message.own, message.leaders)]
        return []

    def bootstrapped(self, job: Job) -> list[Action]:
        """Open a relay for this request, if it is worth one and somebody has room. Nothing for a stranger's request."""
        main = self._owner(job.sessions)
        if main is None or self.peers[main].hello.role != "main":
            self.counters.inc("requests", pipeline="stock")
            return []
        relay = self._relay(main, job)
        self.counters.inc("requests", pipeline="P-RLD-MD" if relay else "P-MD")
        return [AnswerEarly(job.room), *relay]

    def reconsidered(self, job: Job) -> list[Action]:
        """This request goes on without a relay, and its KV is now known to land later than was predicted."""
        main = self._owner(job.sessions)
        if main is None or self.peers[main].hello.role != "main":
            return []
        relay = self._relay(main, job)
        self.counters.inc("relay.opened_late", int(bool(relay)))
        return relay

    def _relay(self, main: str, job: Job) -> list[Action]:
        """A relay for a request of this main decode, if it is worth one and has none."""
        relay_room = (job.room * _STRIDE + _OFFSET) % ROOM_LIMIT
        if relay_room in self._relays:
            return []
        late = self.peers[main].late.above(job.landing_ms)
        wanted = policy.relay_wanted(self.config.relay_policy, late)
        if job.request.sampling.get("max_new_tokens") == 1:
            wanted = False  # P's own token is the answer
        if wanted and job.obstacle:
            self.counters.inc("relay.refused", reason="feature")
            wanted = False
        node = policy.choose_relay(self._relays_with_room()) if wanted else None
        if wanted and node is None:
            self.counters.inc("relay.refused", reason="no_relay")
        if node is None:
            return []
        hello = self.peers[main].hello
        self.peers[node].asked += 1
        self._relays[relay_room] = _Relaying(job.room, node)
        self.counters.inc("relay.opened")
        ask = RelayOpen(relay_room, job.room, hello.address, hello.public_key, job.request)
        return [OpenRelay(job.room, relay_room), Send(node, ask)]

    def first_token(self, sessions: tuple[str, ...], chunk: Chunk) -> list[Action]:
        """The token P has sampled, straight to MD."""
        main = self._owner(sessions)
        return [Send(main, Tokens((chunk,)))] if main else []

    def copied(self, relay_room: int) -> list[Action]:
        """The LAN copy is complete: the rest is between RLD and MD."""
        self._relays.pop(relay_room, None)
        return []

    def gave_up(self, relay_room: int, why: str) -> list[Action]:
        """The LAN copy failed, or nobody needs it any more."""
        relay = self._relays.pop(relay_room, None)
        if relay is None:
            return []
        self.counters.inc("relay.dropped", why=why)
        return [Send(relay.node, Abort(relay_room, why))]

    def tick(self, now: float) -> list[Action]:
        gone = [node for node, peer in self.peers.items() if now - peer.seen > PEER_TIMEOUT]
        actions: list[Action] = []
        for node in gone:
            actions += self._forget(node)
            for relay_room in [r for r, relay in self._relays.items() if relay.node == node]:
                actions += self._drop(relay_room, "silence")
        return actions

    def _hello(self, node: str, hello: Hello, now: float) -> list[Action]:
        actions: list[Action] = []
        if reason := self._refusal(hello):
            actions += self._forget(node) if node in self.peers else []
            self.counters.inc("messages.dropped", cause="unwelcome")
            return [*actions, Send(node, Welcome(False, reason))]
        known = self.peers.get(node)
        if known is not None and (known.hello.sessions, known.hello.landings) != (hello.sessions, hello.landings):
            actions += self._forget(node)
            known = None
        if known is None and hello.role == "main" and hello.landings:
            actions.append(KnowLandings(hello.sessions, hello.landings))
        self._owners.update(dict.fromkeys(hello.sessions, node))
        late = policy.Hysteresis(self.config.relay_threshold_ms) if known is None else known.late
        self.peers[node] = _Peer(hello, now, late)
        self._count_peers()
        return [*actions, Send(node, Welcome(True))]

    def _refusal(self, hello: Hello) -> str | None:
        if hello.role not in ("relay", "main"):
            return f"role: expected relay or main, found {hello.role!r}"
        if hello.role == "main" and not hello.address:
            return "address: a main decode must listen"
        for name, mine in self.fingerprint.items():
            theirs = hello.fingerprint.get(name)
            if theirs != mine:
                return f"{name}: expected {mine}, found {theirs}; start all roles with the same one"
        return None

    def _forget(self, node: str) -> list[Action]:
        hello = self.peers.pop(node).hello
        self._owners = {s: n for s, n in self._owners.items() if n != node}
        self._count_peers()
        return [KnowLandings(hello.sessions, ())] if hello.role == "main" and hello.landings else []

    def _count_peers(self) -> None:
        for role in ("relay", "main"):
            self.counters.set("peers", sum(p.hello.role == role for p in self.peers.values()), role=role)

    def _owner(self, sessions: tuple[str, ...]) -> str | None:
        return next((self._owners[s] for s in sessions if s in self._owners), None)

    def _relays_with_room(self) -> dict[str, tuple[int, int]]:
        return {
            node: (peer.hello.load + peer.asked, peer.hello.capacity)
            for node, peer in self.peers.items()
            if peer.hello.role == "relay"
        }

    def _is_mine(self, peer: str, relay_room: int) -> bool:
        return relay_room in self._relays and self._relays[relay_room].node == peer

    def _drop(self, relay_room: int, why: str) -> list[Action]:
        relay = self._relays.pop(relay_room, None)
        if relay is None:
            return []
        self.counters.inc("relay.dropped", why=why)
        return [DropRelay(relay.room, relay_room, why)]
