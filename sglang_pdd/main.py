"""MD's side of a relay, without I/O: which eager tokens become output, and when the relay ends.

Eager tokens are accepted in position order, from whoever has them first. At the cut MD has accepted ``kept`` tokens;
whatever arrives after it, for any position, is dropped. Nobody is asked, so a handoff costs no round trip. Between the
landing and the cut MD may take several steps to catch up; tokens are accepted all the while.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_pdd.actions import Action, Emit, GiveUp, Send
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import Chunk, Message, Ping, Pong, Stop, Tokens

MAX_HELD_TOKENS = 4096  # of one request, waiting for a gap to close
RELAY_SILENCE = 5.0  # seconds without a token, after which nothing more is hoped of a relay
MAX_REMEMBERED = 4096  # closed rooms, told apart from rooms that never were


@dataclass(slots=True)
class _Session:
    accepted: list[int] = field(default_factory=list)
    held: dict[int, Chunk] = field(default_factory=dict)
    relay: str | None = None  # the RLD that sends tokens
    proven: bool = False  # the relay's first token has come, and it was no other than P's
    muted: bool = False  # nothing more is taken from the relay
    complete: bool = False  # the relay has said that nothing more will come
    heard: float = 0.0  # when it last sent something
    load: int = 0  # percent of its relays in use, as it last said


class Main:
    """Sessions by bootstrap room. One opens when MD's transfer metadata goes out, before anybody can send tokens."""

    def __init__(self, counters: Counters, vocab_size: int) -> None:
        self._counters = counters
        self._vocab_size = vocab_size
        self._sessions: dict[int, _Session] = {}
        self._closed: OrderedDict[int, int] = OrderedDict()  # room -> tokens kept

    def __len__(self) -> int:
        return len(self._sessions)

    def opened(self, room: int) -> None:
        self._closed.pop(room, None)
        self._sessions[room] = _Session()

    def receive(self, peer: str, message: Message, now: float, *, prefill: str | None = None) -> list[Action]:
        """``prefill``: bootstrap address of the peer if it is a P (MD dialled it); else it is an RLD."""
        if isinstance(message, Tokens):
            load = message.load if prefill is None else None
            return [a for chunk in message.chunks for a in self._chunk(peer, chunk, now, load)]
        if isinstance(message, Ping):
            return [Send(peer, Pong(tuple(r for r in message.rooms if not self._wants(r))))]
        return []

    def cut(self, room: int, kept: int, why: str) -> list[Action]:
        """MD goes on by itself, or is done with the request: it keeps ``kept`` output tokens."""
        session = self._sessions.pop(room, None)
        if session is None:
            return []
        self._remember(room, kept)
        self._counters.inc(
            "tokens.wasted", max(0, len(session.accepted) - kept) + sum(len(c.ids) for c in session.held.values())
        )
        return [Send(session.relay, Stop(room, kept, why))] if session.relay else []

    def stuck(self, room: int, now: float) -> list[Action]:
        """The KV has landed and there will never be memory to go on; only the relay can complete the answer."""
        session = self._sessions.get(room)
        if session is None:
            return []
        hopeless = session.muted or session.complete or now - session.heard > RELAY_SILENCE
        return [GiveUp(room)] if hopeless else []

    def tick(self, now: float) -> list[Action]:
        return []

    def _chunk(self, peer: str, chunk: Chunk, now: float, load: int | None) -> list[Action]:
        """``load``: the RLD's; None: the chunk is P's."""
        prefill = load is None
        session = self._sessions.get(chunk.room)
        if session is None:
            return self._stray(peer, chunk, prefill)
        if chunk.ids and max(chunk.ids) >= self._vocab_size:
            self._counters.inc("messages.dropped", cause="malformed")
            return []
        if not prefill:
            if session.muted or session.relay not in (None, peer):
                self._counters.inc("messages.dropped", cause="stale")
                return []
            session.relay = peer
            session.heard = now
            session.load = load or 0
            session.complete |= chunk.finished is not None
        if self._contradicts(session, chunk):
            self._counters.inc("tokens.mismatch")
            if prefill:
                return []
            return self._mute(chunk.room, session, peer, "mismatch")
        session.proven |= not prefill and chunk.start == 0 and bool(chunk.ids)
        ready = prefill or (session.proven and not _waits_for_prefill(session, chunk))
        if chunk.start > len(session.accepted) or not ready:
            return self._hold(session, chunk)
        actions = self._accept(session, chunk, load)
        while session.proven and session.held and (start := min(session.held)) <= len(session.accepted):
            held = session.held.pop(start)
            if self._contradicts(session, held):
                self._counters.inc("tokens.mismatch")
                return actions + self._mute(chunk.room, session, session.relay or peer, "mismatch")
            actions += self._accept(session, held, session.load)
        return actions

    def _wants(self, room: int) -> bool:
        session = self._sessions.get(room)
        return session is not None and not session.muted

    def _mute(self, room: int, session: _Session, relay: str, why: str) -> list[Action]:
        session.muted = True
        session.held.clear()
        return [Send(relay, Stop(room, len(session.accepted), why))]

    def _accept(self, session: _Session, chunk: Chunk, load: int | None) -> list[Action]:
        source = "P" if load is None else "RLD"
        known = len(session.accepted) - chunk.start
        fresh = chunk.ids[known:]
        self._counters.inc("tokens.duplicate", len(chunk.ids) - len(fresh))
        if not fresh:  # only P knows what it found cached; its token may come second
            known_cached = chunk.cached is not None
            emit = Emit(chunk.room, len(session.accepted), (), None, source, chunk.cached, load)
            return [emit] if known_cached else []
        start = len(session.accepted)
        session.accepted.extend(fresh)
        logprobs = chunk.logprobs.slice(known, len(chunk.ids)) if chunk.logprobs else None
        return [Emit(chunk.room, start, fresh, logprobs, source, chunk.cached, load)]

    def _contradicts(self, session: _Session, chunk: Chunk) -> bool:
        known = session.accepted[chunk.start : chunk.start + len(chunk.ids)]
        return list(chunk.ids[: len(known)]) != known

    def _hold(self, session: _Session, chunk: Chunk) -> list[Action]:
        if sum(len(c.ids) for c in session.held.values()) + len(chunk.ids) > MAX_HELD_TOKENS:
            self._counters.inc("messages.dropped", cause="held")
        elif chunk.ids:
            session.held.setdefault(chunk.start, chunk)
            self._counters.inc("tokens.held", len(chunk.ids))
        return []

    def _stray(self, peer: str, chunk: Chunk, prefill: bool) -> list[Action]:
        kept = self._closed.get(chunk.room)
        if kept is None:
            self._counters.inc("messages.dropped", cause="unknown_room")
            kept = 0
        else:
            self._counters.inc("messages.dropped", cause="stale")
            self._counters.inc("tokens.wasted", len(chunk.ids))
        # The Stop may have been lost: say it again.
        return [] if prefill else [Send(peer, Stop(chunk.room, kept, "closed"))]

    def _remember(self, room: int, kept: int) -> None:
        self._closed[room] = kept
        while len(self._closed) > MAX_REMEMBERED:
            self._closed.popitem(last=False)


def _waits_for_prefill(session: _Session, chunk: Chunk) -> bool:
    """A relay overtook P, and does not know the logprobs of P's token that the request has asked for."""
    logprobs = chunk.logprobs
    return not session.accepted and logprobs is not None and bool(logprobs.named) and not logprobs.named_row(0)
