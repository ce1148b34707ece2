"""`Peer`: the rooms on their way to one rank of a main decode, and the streams that carry them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sglang_pdd.policy import LinkEstimate
from sglang_pdd.wan.outgoing import Outgoing
from sglang_pdd.wan.plan import Block, plan
from sglang_pdd.wan.regions import Ints, Remote
from sglang_pdd.wan.schedule import Frame, Lane, Link, Part, Room

if TYPE_CHECKING:
    from sglang_pdd.wan.sender import Sender

Ending = Literal["landed", "cancelled", "refused", "failed"]

REMEMBERED = 4096  # rooms that are over: their parts must not be numbered from 0 again
MAX_ATTEMPTS = 10  # a frame that breaks so many streams is not the streams' fault


class Ticket:
    """What became of one submission.

    landed: the peer has all of it. cancelled: not all went, and the peer has said that nothing of it is being written
    or ever will be. refused: the peer has closed the room, which says the same. failed: the peer cannot be reached, and
    nothing is known.
    """

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.reason = ""
        self._done = threading.Event()

    def wait(self, timeout: float | None = None) -> Ending | None:
        """Wait for the end; None if it has not come within ``timeout`` seconds."""
        self._done.wait(timeout)
        return self.ending

    def end(self, ending: Ending, reason: str = "") -> None:
        """Called once, by the peer."""
        if self.ending is None:
            self.ending, self.reason = ending, reason
            self._done.set()


@dataclass(slots=True)
class _Open:
    """A room, and who waits for its parts."""

    room: Room
    tickets: dict[int, tuple[Part, Ticket]] = field(default_factory=dict)
    started: bool = False  # some of it has been sent


class Peer:
    """One rank of a main decode, its streams, and the rooms on their way to it."""

    def __init__(self, sender: Sender, name: str, address: tuple[str, int], token: bytes, bases: Sequence[int]) -> None:
        self.sender = sender
        self.name = name
        self.address = address
        self.token = token
        self.link = Link(name, sender.pace, LinkEstimate(sender.pace.rate if sender.pace else None))
        self.closed = False
        self.down_since: float | None = time.monotonic()  # None while a stream is up
        self.controls: set[int] = set()  # rooms whose cancellation has to be sent
        self._bases = bases
        self._remote: Remote | None = None
        self._rooms: dict[int, _Open] = {}
        self._over: dict[int, None] = {}  # the last rooms that have ended
        self._cancelling: set[int] = set()  # rooms whose cancellation is not acknowledged
        self._change = sender.change
        self._schedule = sender.schedule
        many = sender.tuning.streams
        self._express = Outgoing(self, many, "small")
        self._streams = [self._express, *(Outgoing(self, index) for index in range(many))]

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self, room: int, promised: int = 0, beside: list[Room] | None = None) -> None:
        """``promised`` bytes of this room will be submitted, so its place among the others is known. A room that was
        over begins anew.

        Args:
            beside: what goes to other peers for the same request: they go level. It is added to them.
        """
        with self._change:
            self._over.pop(room, None)
            self._room(room, promised, beside)

    def submit(self, room: int, blocks: Iterable[Block] | Ints, *, last: bool = False) -> Ticket:
        """Send blocks of (source address, destination address, bytes), the next part of this room; see `plan`.

        Returns at once, unless the peer has never been reached: then it waits for that, as long as a peer may be away.

        Args:
            last: no further part follows.

        Raises:
            BoundsError: an address that is in no region, here or there; nothing was submitted.
        """
        ticket = Ticket()
        if not self._ready():
            ticket.end("failed", f"{self.name} cannot be reached")
            return ticket
        assert self._remote is not None
        tuning = self.sender.tuning.paced(self.link.estimate.bandwidth)
        near, far = self.sender.memory.locate, self._remote.locate
        loads = plan(blocks, near, far, self._remote.units, frame=tuning.frame, streams=tuning.streams)
        with self._change:
            if self.closed or room in self._over:
                ticket.end("failed", "the room is over" if room in self._over else f"{self.name} was dropped")
            elif room in self._cancelling:
                tickets = self._rooms[room].tickets
                tickets[-1 - len(tickets)] = Part(-1, 0), ticket  # ends with the others
            elif not loads and not last:
                ticket.end("landed")
            else:
                known, now = self._room(room, 0), time.monotonic()
                part = self._schedule.submit(known.room, loads, now, last=last)
                known.tickets[part.index] = part, ticket
                self._settle(known, part, now)
        self.wake()
        return ticket

    def cancel(self, room: int) -> None:
        """Send nothing of this room that has not begun, nor take any more of it. Its tickets end when the peer has
        acknowledged."""
        with self._change:
            known = self._rooms.get(room)
            if known is None:
                self._remember(room)
            elif not known.started:
                self._end(known, "cancelled", "before anything was sent")
            elif room not in self._cancelling:
                self._schedule.cancel(known.room)
                self._cancelling.add(room)
                self.controls.add(room)
        self.wake()

    def settled(self, room: int) -> bool:
        """Is nothing of this room on its way, nor can it be any more?"""
        with self._change:
            return room not in self._rooms

    def urge(self, room: int, size: int) -> None:
        """Somebody who needs ``size`` bytes more waits for this room."""
        with self._change:
            if (known := self._rooms.get(room)) is not None:
                self._schedule.urge(known.room, size, time.monotonic())
        self.wake()

    def demote(self, room: int, demoted: bool = True) -> None:
        """Nobody waits for this room any more: it goes when nothing else does. Or somebody does again."""
        with self._change:
            if (known := self._rooms.get(room)) is not None:
                self._schedule.demote(known.room, demoted)
        self.wake()

    def landing_ms(self, size: int = 0, *, room: int | None = None, together: float = math.inf) -> float:
        """Milliseconds until ``size`` bytes, asked for now, will have landed; or all of ``room``. If their prefill is
        not over: from its end on.

        Args:
            together: bytes that prefill makes in the same pass, at most.
        """
        with self._change:
            known = self._rooms.get(room) if room is not None else None
            if room is not None and known is None:
                return 0.0  # it is over
            subject = known.room if known is not None else None
            return self._schedule.landing(self.link, size, time.monotonic(), room=subject, together=together) * 1000

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for stream in self._streams:
            stream.start()

    def close(self, *, wait: bool = True) -> None:
        """Close the streams; what was on its way has failed. ``wait``: for their threads to end."""
        with self._change:
            self.closed = True
            self.fail("the peer was dropped")
            self._change.notify_all()
        for stream in self._streams:
            stream.abort()
        for stream in self._streams if wait else ():
            if stream.is_alive() and stream is not threading.current_thread():
                stream.join(1.0)  # one that is connecting ends by itself, later

    def wake(self) -> None:
        for stream in self._streams:
            stream.wake()

    # --- for its streams; all but `welcome` with the lock held --------------------------------------------------------

    def welcome(self, shape: Sequence[tuple[int, int]]) -> None:
        """A stream is up.

        Raises:
            BoundsError: the peer's regions are not those that its engine has registered.
        """
        with self._change:
            self._remote = Remote(self._bases, shape)
            self.down_since = None
            # Only now has the peer let go of the stream that this one replaces. While that one was still being written
            # a cancellation got no answer, and whoever was to give it later has broken down.
            self.controls |= self._cancelling
            self._change.notify_all()

    def lost(self, frames: Iterable[Frame], *, all_down: bool) -> int:
        """A stream has broken with these frames unacknowledged. Returns how many go again."""
        frames = list(frames)
        again = self._schedule.lost(frames)
        for frame in frames:
            known = self._rooms.get(frame.room.id)
            if frame.attempts >= MAX_ATTEMPTS and known is not None and known.room is frame.room:
                self._end(known, "failed", f"a frame was sent {frame.attempts} times in vain")
        self.controls |= self._cancelling  # the cancellation, or its answer, may have been lost with the stream
        if all_down and self.down_since is None:
            self.down_since = time.monotonic()
        return again

    def check(self, now: float) -> None:
        """Away for too long?"""
        if self.down_since is not None and now - self.down_since > self.sender.tuning.give_up_s and self._rooms:
            self.fail(f"{self.name} cannot be reached since {now - self.down_since:.0f} s")

    @property
    def any_up(self) -> bool:
        return any(stream.up for stream in self._streams)

    def next(self, now: float, lane: Lane) -> Frame | float:
        if not (self._express.up and any(stream.up for stream in self._streams if stream is not self._express)):
            lane = "any"
        frame = self._schedule.next(self.link, now, lane)
        if isinstance(frame, Frame):
            self._rooms[frame.room.id].started = True
        return frame

    def alive(self, frame: Frame) -> bool:
        """Is its memory still that of its room?"""
        known = self._rooms.get(frame.room.id)
        return known is not None and known.room is frame.room and not frame.room.cancelled

    def acknowledged(self, frame: Frame, now: float, *, landed: bool) -> None:
        self._schedule.acknowledged(frame, now, landed=landed)
        known = self._rooms.get(frame.room.id)
        if known is None or known.room is not frame.room:
            return
        if not landed and not known.room.cancelled:
            self._end(known, "refused", "the peer has closed the room")
        elif landed:
            self._settle(known, frame.part, now)

    def cancelled(self, room: int) -> None:
        """The peer has acknowledged a cancellation."""
        self._cancelling.discard(room)
        self.controls.discard(room)
        if (known := self._rooms.get(room)) is not None and known.room.cancelled:
            self._end(known, "cancelled")

    def fail(self, reason: str) -> None:
        """Nothing of what is on its way will be heard of any more."""
        for known in list(self._rooms.values()):
            self._end(known, "failed", reason)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        deadline = time.monotonic() + self.sender.tuning.give_up_s
        with self._change:
            while self._remote is None and not self.closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._change.wait(left)
            return self._remote is not None

    def _room(self, room: int, promised: int, beside: list[Room] | None = None) -> _Open:
        known = self._rooms.get(room)
        if known is None:
            now = time.monotonic()
            known = self._rooms[room] = _Open(self._schedule.open(self.link, room, promised, now, beside))
        return known

    def _settle(self, known: _Open, part: Part, now: float) -> None:
        if part.landed < part.total:
            return
        _, ticket = known.tickets.pop(part.index, (part, None))
        if ticket is not None:
            ticket.end("landed")
        room = known.room
        if room.last and not known.tickets:
            error = now - self.link.rtt / 2 - room.predicted
            self.sender.counters.inc("wan.landings")
            self.sender.counters.inc("wan.landing_error_ms", abs(error) * 1000)
            self._forget(known)

    def _end(self, known: _Open, ending: Ending, reason: str = "") -> None:
        self._schedule.cancel(known.room)
        for _, ticket in known.tickets.values():
            ticket.end(ending, reason)
        self._forget(known)

    def _forget(self, known: _Open) -> None:
        room = known.room.id
        self._schedule.close(known.room)
        del self._rooms[room]
        self._remember(room)
        self._cancelling.discard(room)
        self.controls.discard(room)

    def _remember(self, room: int) -> None:
        self._over[room] = None
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]
