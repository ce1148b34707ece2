"""RLD's side of a relay, without I/O: what is accepted, where the tokens go, and when it ends.

A relay ends when MD says Stop, when P says Abort, when the answer is complete, or when MD has not been heard of for
`SILENCE` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_pdd.actions import Action, Dial, HangUp, Send, StartDecode, StopDecode
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import Abort, Chunk, Message, Ping, Pong, RelayOpen, RelayReply, Stop, Tokens

SILENCE = 15.0  # seconds without word from MD
PING_EVERY = 1.0  # seconds
IDLE = 60.0  # seconds until the connection to an MD without relays is closed
RESERVED_OUTPUT = 512  # tokens counted for a relay's output when it asks for room


@dataclass(slots=True)
class _Session:
    room: int
    prefill: str
    main: str
    tokens: int  # of the pool, that it may take
    heard: float
    stopping: bool = False


class Relay:
    """Sessions by relay room.

    Args:
        capacity: relays at once.
        pool_tokens: size of the KV pool in tokens.
        trusted: whether a public key may be dialled (all may without keys).
        draining: whether this server is to end and takes nothing new.
    """

    def __init__(
        self,
        counters: Counters,
        capacity: int,
        pool_tokens: int,
        trusted: Callable[[str], bool],
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._counters = counters
        self._capacity = capacity
        self._draining = draining
        self._pool_tokens = pool_tokens
        self._trusted = trusted
        self._sessions: dict[int, _Session] = {}
        self._pinged = 0.0
        self._used: dict[str, float] = {}  # MD -> when it last had a relay

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def capacity(self) -> int:
        return 0 if self._draining() else self._capacity

    @property
    def load(self) -> int:
        return len(self._sessions)

    def receive(self, peer: str, message: Message, now: float, *, prefill: str | None = None) -> list[Action]:
        """``prefill``: bootstrap address of the peer if it is a P; else it is an MD. This node dialled both."""
        if prefill is not None:
            if isinstance(message, RelayOpen):
                return self._open(peer, prefill, message, now)
            if isinstance(message, Abort):
                return self._stop_room(message.room, message.why)
            return []
        for session in self._sessions.values():
            if session.main == peer:
                session.heard = now
        if isinstance(message, Stop):
            return self._stop(peer, {message.room}, message.why)
        if isinstance(message, Pong):
            return self._stop(peer, set(message.closed), "closed")
        return []

    def produced(self, chunks: Iterable[Chunk]) -> list[Action]:
        """New tokens of this step; ``chunk.room`` is the relay room. One message for each MD."""
        by_main: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            session = self._sessions.get(chunk.room)
            if session is None or session.stopping:
                self._counters.inc("tokens.wasted", len(chunk.ids))
                continue
            by_main.setdefault(session.main, []).append(
                Chunk(session.room, chunk.start, chunk.ids, chunk.logprobs, chunk.finished)
            )
        percent = min(100, 100 * self.load // self._capacity)
        return [Send(main, Tokens(tuple(chunks), percent)) for main, chunks in by_main.items()]

    def ended(self, relay_room: int) -> list[Action]:
        """The engine has let go of the request."""
        session = self._sessions.pop(relay_room, None)
        return [Send(session.prefill, Abort(relay_room, "ended"))] if session else []

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for relay_room, session in self._sessions.items():
            if now - session.heard > SILENCE and not session.stopping:
                self._counters.inc("relay.dropped", why="silence")
                actions += self._halt(relay_room, session, f"no word from {session.main} for {SILENCE:.0f} s")
        if now - self._pinged >= PING_EVERY:
            self._pinged = now
            rooms: dict[str, list[int]] = {}
            for session in self._sessions.values():
                rooms.setdefault(session.main, []).append(session.room)
            self._used.update(dict.fromkeys(rooms, now))
            actions += [Send(main, Ping(tuple(r))) for main, r in rooms.items()]
            for main in [main for main, used in self._used.items() if now - used > IDLE]:
                del self._used[main]
                actions.append(HangUp(main))
        return actions

    def _open(self, peer: str, bootstrap: str, ask: RelayOpen, now: float) -> list[Action]:
        if ask.relay_room in self._sessions:
            self._counters.inc("messages.dropped", cause="stale")
            return []
        tokens = len(ask.request.prompt) + RESERVED_OUTPUT
        if reason := self._refusal(peer, ask, tokens):
            self._counters.inc("relay.refused", reason=reason.split(":")[0])
            return [Send(peer, RelayReply(ask.relay_room, False, reason))]
        self._sessions[ask.relay_room] = _Session(ask.room, peer, ask.main, tokens, now)
        self._used[ask.main] = now
        self._counters.inc("relay.opened")
        return [
            Dial(ask.main, ask.main_key),
            StartDecode(ask.relay_room, bootstrap, ask.request),
            Send(peer, RelayReply(ask.relay_room, True)),
        ]

    def _refusal(self, peer: str, ask: RelayOpen, tokens: int) -> str | None:
        mine = sum(s.prefill == peer for s in self._sessions.values())
        others = {s.prefill for s in self._sessions.values()} | {peer}
        if self._draining():
            return "drain: this relay is about to end"
        if len(self._sessions) >= self._capacity:
            return f"full: {self._capacity} relays at once"
        if len(others) > 1 and mine >= max(1, self._capacity * 3 // 4):
            return "share: another prefill needs room too"
        if tokens + sum(s.tokens for s in self._sessions.values()) > self._pool_tokens:
            return f"memory: {tokens} tokens do not fit"
        if not self._trusted(ask.main_key):
            return f"key: {ask.main} is not in the allow-list"
        if not ask.request.prompt:
            return "prompt: empty"
        return None

    def _stop(self, main: str, rooms: set[int], why: str) -> list[Action]:
        return [
            action
            for relay_room, session in self._sessions.items()
            if session.main == main and session.room in rooms and not session.stopping
            for action in self._halt(relay_room, session, why)
        ]

    def _stop_room(self, relay_room: int, why: str) -> list[Action]:
        session = self._sessions.get(relay_room)
        return self._halt(relay_room, session, why) if session and not session.stopping else []

    def _halt(self, relay_room: int, session: _Session, why: str) -> list[Action]:
        session.stopping = True  # the session stays until the engine has let go of it
        return [StopDecode(relay_room, why)]
