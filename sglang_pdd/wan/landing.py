"""`Landings`: what a receiver may write, what it is writing, and what has landed. No I/O.

Nothing is written but for rooms that are open here, and a room is closed by its owner: from the moment that it is quiet
its pages can be reused, whatever the sender still believes or has on the way.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_pdd.wan.frames import Data, Outcome


class Spans:
    """A set of bytes, as disjoint half-open spans in order."""

    __slots__ = ("covered", "spans")

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.covered = 0

    def add(self, start: int, stop: int) -> None:
        spans = self.spans
        low = bisect.bisect_left(spans, (start, start))
        if low and spans[low - 1][1] >= start:
            low -= 1
        high = low
        while high < len(spans) and spans[high][0] <= stop:
            self.covered -= spans[high][1] - spans[high][0]
            start, stop = min(start, spans[high][0]), max(stop, spans[high][1])
            high += 1
        spans[low:high] = [(start, stop)]
        self.covered += stop - start

    @property
    def prefix(self) -> int:
        """How many bytes are in it from 0 on."""
        return self.spans[0][1] if self.spans and self.spans[0][0] == 0 else 0

    def overlaps(self, start: int, stop: int) -> bool:
        at = bisect.bisect_left(self.spans, (stop, stop))
        return bool(at) and self.spans[at - 1][1] > start

    def holds(self, start: int, stop: int) -> bool:
        at = bisect.bisect_right(self.spans, start, key=lambda span: span[0])
        return bool(at) and self.spans[at - 1][1] >= stop


@dataclass(frozen=True, slots=True)
class Landed:
    """Bytes ``[start, stop)`` of ``total`` of a part, in the order of its pages, are where they belong."""

    room: int
    session: int
    part: int
    start: int
    stop: int
    total: int
    complete: bool  # with these, all parts that this session sends for this room have landed


@dataclass(eq=False, slots=True)
class Claim:
    """One frame that is being written."""

    data: Data
    session: int
    stream: Hashable  # who writes
    room: _Room


@dataclass(slots=True)
class _Part:
    total: int
    pages: int  # 0: its bytes are not in the order of pages
    landed: Spans = field(default_factory=Spans)


@dataclass(eq=False, slots=True)
class _Room:
    claims: list[Claim] = field(default_factory=list)
    parts: dict[tuple[int, int], _Part] = field(default_factory=dict)  # by session and part
    expected: dict[int, int] = field(default_factory=dict)  # parts of a session, once it has said how many
    cancelled: set[int] = field(default_factory=set)  # sessions
    closed: bool = False


class Landings:
    """All open rooms. To be guarded by one lock."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}
        self._draining: dict[int, list[_Room]] = {}  # closed, and not quiet yet

    def __len__(self) -> int:
        return len(self._rooms)

    def open(self, room: int) -> None:
        """From now on this room may be written to. Nothing, if it is open."""
        self._rooms.setdefault(room, _Room())

    def close(self, room: int) -> list[Claim]:
        """No frame that has not begun will be written. Returns those that have: until they end it is not quiet."""
        closed = self._rooms.pop(room, None)
        if closed is not None:
            closed.closed = True
            if closed.claims:
                self._draining.setdefault(room, []).append(closed)
        return self.writing(room)

    def writing(self, room: int) -> list[Claim]:
        """Frames being written for a closed room; none: it is quiet, and its memory can be reused."""
        return [claim for each in self._draining.get(room, ()) for claim in each.claims]

    def landed(self, room: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """What an open room has: spans by (session, part)."""
        known = self._rooms.get(room)
        return {} if known is None else {key: list(part.landed.spans) for key, part in known.parts.items()}

    def pages(self, room: int) -> dict[int, int]:
        """How many pages of an open room have landed, from the first on, by each session that sends some of it.

        A page of which several sessions send a slice each has landed when it has for all of them. Metadata that a room
        ends with counts as pages, too.
        """
        known = self._rooms.get(room)
        return {} if known is None else {session: _leading(known, session) for session, _ in known.parts}

    def begin(self, data: Data, session: int, stream: Hashable) -> Claim | Outcome | list[Claim]:
        """May this frame be written?

        Returns:
            A claim, to be given to `end`; or "landed" or "discarded", if it must not be written because it was, or
            because the room is closed or cancelled; or the claims that have to end first: the same bytes on a stream
            that the sender has given up.
        """
        room = self._rooms.get(data.room)
        if room is None or session in room.cancelled:
            return "discarded"
        part = room.parts.get((session, data.part))
        if part is None:
            part = room.parts[session, data.part] = _Part(data.total, data.pages)
        if (part.total, part.pages) != (data.total, data.pages) or (
            data.parts and room.expected.get(session, data.parts) != data.parts
        ):
            return "discarded"
        stop = data.position + data.payload
        if part.landed.overlaps(data.position, stop):  # what has landed may be in use
            return "landed" if part.landed.holds(data.position, stop) else "discarded"
        rivals = [
            claim
            for claim in room.claims
            if (claim.session, claim.data.part) == (session, data.part)
            and claim.data.position < stop
            and data.position < claim.data.position + claim.data.payload
        ]
        if rivals:
            return rivals
        claim = Claim(data, session, stream, room)
        room.claims.append(claim)
        return claim

    def end(self, claim: Claim, written: bool) -> tuple[Landed | None, bool]:
        """A frame has been written, or will never be.

        Returns:
            What has landed; and whether the session's cancellation of this room is now complete.
        """
        room, data = claim.room, claim.data
        room.claims.remove(claim)
        if room.closed and not room.claims:
            rooms = self._draining[data.room]
            rooms.remove(room)
            if not rooms:
                del self._draining[data.room]
        settled = claim.session in room.cancelled and not self._busy(room, claim.session)
        if room.closed or not written:
            return None, settled
        stop = data.position + data.payload
        room.parts[claim.session, data.part].landed.add(data.position, stop)
        if data.parts:
            room.expected[claim.session] = data.parts
        complete = self._complete(room, claim.session)
        return Landed(data.room, claim.session, data.part, data.position, stop, data.total, complete), settled

    def cancel(self, room: int, session: int) -> bool:
        """The sender gives a room up. True: none of its frames is being written."""
        known = [*self._draining.get(room, ()), *([self._rooms[room]] if room in self._rooms else [])]
        for each in known:
            each.cancelled.add(session)
        return not any(self._busy(each, session) for each in known)

    @staticmethod
    def _busy(room: _Room, session: int) -> bool:
        return any(claim.session == session for claim in room.claims)

    @staticmethod
    def _complete(room: _Room, session: int) -> bool:
        expected = room.expected.get(session, 0)
        parts = [room.parts.get((session, index)) for index in range(expected)]
        return bool(parts) and all(part is not None and part.landed.covered == part.total for part in parts)


def _leading(room: _Room, session: int) -> int:
    pages = index = 0
    while (part := room.parts.get((session, index))) is not None:
        whole = part.landed.prefix * part.pages // part.total
        pages, index = pages + whole, index + 1
        if not part.pages or whole < part.pages:
            break
    return pages
