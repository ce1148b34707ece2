"""`Schedule`: whose frame is next on which link. No I/O, no clock of its own, not thread-safe.

A room's rank on its link is ``opened + PATIENCE * (its remaining bytes / bandwidth)``, and the lowest goes first. That
is shortest remaining first, with ageing: a room that needs R seconds of the link can only be overtaken by rooms opened
within PATIENCE * R seconds after it, so none starves. Between any two frames the choice is made anew.

What a stream's socket has taken cannot be taken back, and whoever comes next on that stream waits for it. So small
rooms have a lane of their own, a stream that carries nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from sglang_pdd.policy import LinkEstimate
from sglang_pdd.wan.plan import Load

PATIENCE = 10.0
BURST_S = 0.02  # what a paced link may send at once after a pause
YIELD_S = 0.001  # how soon a link asks again that has let another one go first
LATE_S = 0.02  # a link that does not ask for so long after it might go is not waited for
SMALL_S = 0.003  # a room that needs no longer than that is small
SMALL = 128 << 10  # bytes; and so is this, on any link
CROWD = 4  # so many times what is small, in small rooms together, is more than their lane should have to carry alone

HELP_S = 0.05  # and what has waited for so long there is sent by whoever can: that stream may hang

Lane = Literal["any", "small", "large"]

_NEVER = float("inf")
_TINY = 1e-9


class Pace:
    """Lets ``rate`` bytes/s through, and after a pause ``burst`` bytes and one frame at once. Links may share one."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        if not 0 < rate < _NEVER:
            raise ValueError(f"rate {rate} must be positive and finite")
        self.rate = rate
        self.burst = rate * BURST_S if burst is None else burst
        self.waiting: dict[Link, float] = {}  # links that have been told to wait, and until when they have precedence
        self._tokens = self.burst
        self._at: float | None = None

    def wait(self, now: float) -> float:
        """Seconds until the next frame may go."""
        self._fill(now)
        return max(0.0, -self._tokens / self.rate)

    def take(self, n: int, now: float) -> None:
        """A frame of ``n`` bytes goes now; what the bucket did not hold is a debt."""
        self._fill(now)
        self._tokens -= n

    def _fill(self, now: float) -> None:
        if self._at is not None:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now


@dataclass(eq=False, slots=True)
class Frame:
    """One frame of one part, until the peer has acknowledged it."""

    room: Room
    part: Part
    load: Load
    attempts: int = 0
    sent: float = 0.0  # when, last


@dataclass(eq=False, slots=True)
class Part:
    """What was submitted together."""

    index: int
    total: int  # bytes
    last: bool = False  # no further part follows
    landed: int = 0  # bytes


@dataclass(eq=False, slots=True)
class Room:
    """Everything that goes to one peer rank for one request."""

    id: int
    link: Link
    opened: float
    promised: int  # bytes announced and not submitted: their prefill is yet to come
    queued: int = 0  # bytes submitted and not sent
    flying: int = 0  # bytes sent and not acknowledged
    submitted: int = 0  # bytes
    small: bool = False  # said when something is submitted: whoever carries it must then be woken anyway
    since: float = 0.0  # when its first frame that waits was submitted
    background: bool = False  # nobody waits for it
    cancelled: bool = False
    parts: int = 0  # submitted
    last: bool = False  # no further part follows
    frames: deque[Frame] = field(default_factory=deque)
    claims: list[tuple[float, int]] = field(default_factory=list)  # (time, bytes) of those who wait for this one
    predicted: float = 0.0  # when it should have landed, said when the last of it was submitted
    beside: list[Room] = field(default_factory=list)  # this one, and those of the same request on other links

    def __post_init__(self) -> None:
        self.beside.append(self)

    @property
    def urgent(self) -> bool:
        """Is it for the lane of small rooms?"""
        return self.small and not self.background

    @property
    def left(self) -> int:
        """Bytes that are still to be sent."""
        return self.promised + self.queued

    def rank(self, bandwidth: float) -> float:
        """Low goes first. A request has landed when all of it has: its rooms on other links are as far behind."""
        left = max(room.left for room in self.beside)
        own = self.opened + PATIENCE * left / bandwidth
        if not self.claims:
            return own
        return min(own, min(time + PATIENCE * min(size, left) / bandwidth for time, size in self.claims))


@dataclass(eq=False, slots=True)
class Link:
    """The way to one peer rank. Hashed by identity."""

    name: str
    pace: Pace | None = None
    estimate: LinkEstimate = field(default_factory=LinkEstimate)
    rtt: float = 0.0  # seconds
    rooms: dict[int, Room] = field(default_factory=dict)
    supply: Supply = field(init=False)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.supply = Supply()
        self.meter = Meter(self.estimate)

    @property
    def flying(self) -> int:
        return sum(room.flying for room in self.rooms.values())


class Schedule:
    """Rooms on links, each link with a queue of its own: none ever waits for another, except through a shared pace."""

    # --- rooms ---

    def open(self, link: Link, room: int, promised: int, now: float, beside: list[Room] | None = None) -> Room:
        """A room that will need ``promised`` bytes. ``beside``: the rooms of the same request on other links; it is
        added to them."""
        if room not in link.rooms:
            if promised:
                link.supply.promised(now)
            link.rooms[room] = Room(room, link, now, promised, beside=[] if beside is None else beside)
        return link.rooms[room]

    def submit(self, room: Room, loads: Iterable[Load], now: float, *, last: bool) -> Part:
        """These bytes exist and may go; they were promised, as far as any were."""
        loads = list(loads)
        total = sum(load.size for load in loads)
        part = Part(room.parts, total, last)
        room.parts += 1
        room.last = room.last or last
        made, room.promised = min(total, room.promised), 0 if last else max(0, room.promised - total)
        room.link.supply.made(made, now, more=self._promised(room.link))
        room.queued += total
        room.submitted += total
        room.small = room.promised + room.submitted <= self._small(room.link)
        room.since = room.since if room.frames else now
        room.frames.extend(Frame(room, part, load) for load in loads)
        if last:
            room.predicted = now + self.landing(room.link, 0, now, room=room)
        return part

    def urge(self, room: Room, size: int, now: float) -> None:
        """Somebody who needs ``size`` bytes more, and came now, waits for this room: it goes as early as he would."""
        room.background = False
        if all(size < earlier for _, earlier in room.claims):  # else one who came before is as urgent already
            room.claims.append((now, size))

    def demote(self, room: Room, demoted: bool = True) -> None:
        """Nobody waits for it any more: it goes when nothing else does. Or somebody does again."""
        room.background = demoted

    def cancel(self, room: Room) -> int:
        """Nothing of it will be sent that has not begun. Returns the bytes dropped."""
        dropped = room.queued
        room.frames.clear()
        room.promised = room.queued = 0
        room.cancelled = True
        room.link.supply.dropped(more=self._promised(room.link))
        return dropped

    def close(self, room: Room) -> None:
        """Forget it."""
        if room.link.rooms.pop(room.id, None) is not None:
            room.beside.remove(room)
        room.link.supply.dropped(more=self._promised(room.link))

    # --- frames ---

    def next(self, link: Link, now: float, lane: Lane = "any") -> Frame | float:
        """The frame to be sent now; or after how many seconds to ask again (infinity: when something changes).

        Args:
            lane: of which rooms. Small ones do not wait for a large one's debt to the pace: it comes out of what large
                ones have next.
        """
        room = self._first(link, now, lane)
        if room is None:
            waiting = lane == "large" and any(room.frames for room in link.rooms.values())
            return HELP_S if waiting else _NEVER
        if link.pace is not None and (lane != "small" or link.pace.wait(now) > BURST_S):
            wait = link.pace.wait(now)
            if wait > 0:
                link.pace.waiting[link] = now + wait + LATE_S
                return wait
            if self._others_first(link, room, now):
                return YIELD_S
            link.pace.waiting.pop(link, None)
        frame = room.frames.popleft()
        frame.attempts += 1
        frame.sent = now
        size = frame.load.size
        if link.pace is not None:
            link.pace.take(size, now)
        link.meter.sent(now, link.flying == 0)
        room.queued -= size
        room.flying += size
        return frame

    def acknowledged(self, frame: Frame, now: float, *, landed: bool) -> None:
        """The peer has it, or does not want it."""
        room = frame.room
        room.flying -= frame.load.size
        if landed:
            frame.part.landed += frame.load.size
            room.link.meter.landed(frame.load.size, now, room.link.rtt, room.link.flying == 0)

    def lost(self, frames: Iterable[Frame]) -> int:
        """These were not acknowledged and never will be: they go again, first. Returns how many do."""
        again = 0
        for frame in sorted(frames, key=lambda f: (f.part.index, f.load.position), reverse=True):
            room = frame.room
            room.flying -= frame.load.size
            if not room.cancelled:
                room.frames.appendleft(frame)
                room.queued += frame.load.size
                again += 1
        return again

    # --- the future ---

    def landing(
        self, link: Link, size: int, now: float, *, room: Room | None = None, together: float = _NEVER
    ) -> float:
        """Seconds until ``size`` bytes, asked for now, will have landed; or all of ``room``. If their prefill is not
        over: from its end on.

        What goes before them by rank is counted, what may come later is not. While prefill is at work the link goes on
        with what is there.

        Args:
            together: bytes that prefill makes in the same pass as the last of them, at most: none of them goes before.
        """
        bandwidth = link.estimate.bandwidth
        if link.pace is not None:
            bandwidth = min(bandwidth, link.pace.rate)
        subject = room or Room(-1, link, now, size)
        rank = subject.rank(bandwidth)
        ahead = [
            other
            for other in link.rooms.values()
            if other is not subject and (not other.background or subject.background) and other.rank(bandwidth) <= rank
        ]
        before = (link.flying + subject.queued + sum(other.queued for other in ahead)) / bandwidth
        promised = sum(other.promised for other in ahead)
        if subject.promised:
            for other in ahead:  # in the order in which they came, as prefill takes them
                before = max(0.0, before - other.promised / link.supply.rate) + other.promised / bandwidth
            before = max(0.0, before - subject.promised / link.supply.rate)
            before = max(before, min(promised, together) / bandwidth)
        else:
            before += promised / bandwidth
        return before + subject.promised / bandwidth + link.rtt / 2

    # --- inside ---

    @staticmethod
    def _promised(link: Link) -> bool:
        """Does anything wait for its prefill?"""
        return any(room.promised for room in link.rooms.values())

    def _others_first(self, link: Link, room: Room, now: float) -> bool:
        """Has another link that waits for the same pace somebody to send who goes before this room?"""
        assert link.pace is not None
        mine = room.background, room.rank(link.estimate.bandwidth)
        for other, until in list(link.pace.waiting.items()):
            first = self._first(other, now)
            if first is None or until < now:
                del link.pace.waiting[other]
            elif first in room.beside:
                if first.left > room.left:
                    return True
            elif other is not link and (first.background, first.rank(other.estimate.bandwidth)) < mine:
                return True
        return False

    @staticmethod
    def _small(link: Link) -> float:
        """Bytes up to which a room is small."""
        return max(SMALL, SMALL_S * link.estimate.bandwidth)

    def _first(self, link: Link, now: float, lane: Lane = "any") -> Room | None:
        ready = [room for room in link.rooms.values() if room.frames]
        if lane != "any":
            small = [room for room in ready if room.urgent]
            if lane == "small":
                ready = small
            elif sum(room.queued for room in small) <= CROWD * self._small(link):
                ready = [room for room in ready if not room.urgent or now - room.since >= HELP_S]
        if len(ready) < 2:
            return ready[0] if ready else None
        bandwidth = link.estimate.bandwidth
        return min(ready, key=lambda room: (room.background, room.rank(bandwidth)))


class Supply:
    """How fast prefill makes what was promised, leaving out the time in which nothing was."""

    LONGEST_S = 2.0  # a standstill of prefill says nothing about its speed

    def __init__(self) -> None:
        self._estimate = LinkEstimate(_NEVER)
        self._since: float | None = None  # since when something is promised, or since the last of it was made

    @property
    def rate(self) -> float:
        """Bytes/s; infinity: not known yet."""
        return self._estimate.bandwidth

    def promised(self, now: float) -> None:
        """There is something to be made."""
        if self._since is None:
            self._since = now

    def made(self, n: int, now: float, *, more: bool) -> None:
        """``n`` promised bytes are there; ``more``: others are not."""
        if self._since is not None and n:
            seconds = max(now - self._since, _TINY)  # of one batch all are there at once
            self._estimate.sent(n, min(seconds, self.LONGEST_S), 0)
            self._since = now
        self.dropped(more=more)

    def dropped(self, *, more: bool) -> None:
        """Some will never be made."""
        if not more:
            self._since = None


class Meter:
    """Feeds an estimate with what was really sent, leaving out idle time and the first round trip after it."""

    WINDOW_S = 0.2
    LEAST_S = 0.002
    LEAST = 64 << 10  # bytes

    def __init__(self, estimate: LinkEstimate) -> None:
        self.estimate = estimate
        self._since: float | None = None
        self._from_idle = False
        self._bytes = 0

    def sent(self, now: float, from_idle: bool) -> None:
        """A frame begins; ``from_idle``: nothing else is on its way."""
        if from_idle or self._since is None:
            self._since, self._from_idle, self._bytes = now, True, 0

    def landed(self, n: int, now: float, rtt: float, idle: bool) -> None:
        """``n`` bytes have landed; ``idle``: nothing is on its way any more."""
        if self._since is None:
            return
        self._bytes += n
        seconds = now - self._since - (rtt if self._from_idle else 0)
        if idle or seconds >= self.WINDOW_S:
            if seconds >= self.LEAST_S and self._bytes >= self.LEAST:
                self.estimate.sent(self._bytes, seconds, 0)
            self._since, self._from_idle, self._bytes = (None if idle else now), False, 0
