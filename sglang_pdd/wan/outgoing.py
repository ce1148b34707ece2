"""`Outgoing`: one stream to a peer, and its thread: connects, sends what is next, hears what has landed, reconnects."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from sglang_pdd.wan.frames import (
    PREFIX,
    SOUND,
    SPOILT,
    Ack,
    Cancel,
    Cancelled,
    Data,
    FrameError,
    Hello,
    Ping,
    Pong,
    Reject,
    Welcome,
    encode,
    parse,
    parse_prefix,
)
from sglang_pdd.wan.regions import BoundsError
from sglang_pdd.wan.schedule import Frame, Lane
from sglang_pdd.wan.sockets import HANDSHAKE_S, connect
from sglang_pdd.wan.stream import Stream, StreamClosed

if TYPE_CHECKING:
    from sglang_pdd.wan.peer import Peer

BATCH = 4  # frames sent before a look at what has come back
LOOK_S = 1.0  # how often a stream with something on its way looks at the time, and at what the kernel knows

_log = logging.getLogger(__name__)
_ANSWERS = (Ack, Cancelled, Pong)


class Outgoing(threading.Thread):
    """All but `wake` and `abort` is the thread's own.

    Args:
        lane: which rooms it carries; large ones only as long as another stream carries the small ones.
    """

    def __init__(self, peer: Peer, index: int, lane: Lane = "large") -> None:
        super().__init__(name=f"pdd-stream-{peer.name}-{index}", daemon=True)
        self.peer = peer
        self.index = index
        self.lane = lane
        self.up = False
        self._sender = peer.sender
        self._tuning = peer.sender.tuning
        self._labels = {"peer": peer.name, "stream": str(index)}
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = threading.Lock()  # holds the event open while it is written to
        self._stream: Stream | None = None
        self._flying: dict[tuple[int, int, int], Frame] = {}  # by room, part, position
        self._received = bytearray()
        self._views: list[memoryview] = []  # what is left of the frame being sent
        self._open: Frame | None = None  # whose payload that is: the byte behind it comes last
        self._progress = 0.0  # when something last moved
        self._acked = 0  # bytes, says the kernel
        self._looked = 0.0
        self._pinged = False

    def wake(self) -> None:
        """There may be something to do. From any thread."""
        with self._awake, contextlib.suppress(BlockingIOError):
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def abort(self) -> None:
        """Break the connection, if there is one. From any thread."""
        if (stream := self._stream) is not None:
            stream.abort()
        self.wake()

    def run(self) -> None:
        delay = self._tuning.retry_s[0]
        try:
            while not self.peer.closed:
                try:
                    with contextlib.closing(self._connected()) as stream:
                        delay = self._tuning.retry_s[0]
                        self._pump(stream)
                except Exception as error:  # whatever it is, what was on its way must go again, or fail in the end
                    if not isinstance(error, (OSError, FrameError, BoundsError)):
                        _log.exception("stream %d to %s", self.index, self.peer.name)
                    self._broken(error)
                self._rest(delay)
                delay = min(2 * delay, self._tuning.retry_s[1])
        finally:
            with self._awake:
                os.close(self._event)
                self._event = -1

    # --- connecting ---

    def _connected(self) -> Stream:
        peer, sender = self.peer, self._sender
        stream = self._stream = connect(peer.address, self._tuning, sender.identity)
        try:
            if peer.closed:
                raise StreamClosed("the peer was dropped")
            stream.blocking(HANDSHAKE_S)
            stream.write(encode(Hello(sender.node, peer.token, sender.session, self.index)))
            answer = stream.read_frame((Welcome, Reject))
            if isinstance(answer, Reject):
                raise StreamClosed(f"refused: {answer.reason}")
            assert isinstance(answer, Welcome)
            stream.sock.setblocking(False)
            if sender.pace is not None:
                stream.pace(sender.pace.rate / (1 if self.lane == "small" else self._tuning.streams))
            self._received.clear()
            self._views, self._open, self._pinged, self._acked = [], None, False, 0
            self._progress = time.monotonic()
            self._look(stream)
            self.up = True
            peer.welcome(answer.regions)
            return stream
        except BaseException:
            stream.close()
            raise

    def _broken(self, error: Exception) -> None:
        peer, was_up = self.peer, self.up
        with self._sender.change:
            self.up, self._stream = False, None
            again = peer.lost(self._flying.values(), all_down=not peer.any_up)
            self._flying.clear()
            peer.check(time.monotonic())
        self._views = []
        if peer.closed:
            return
        counters = self._sender.counters
        counters.inc("stream.reconnects" if was_up else "stream.unreachable", **self._labels)
        if again:
            counters.inc("stream.retransmitted", again, **self._labels)
        self._sender.limit.warning(f"{peer.name} broken", f"stream {self.index} to {peer.name}: {error}")
        peer.wake()

    def _rest(self, seconds: float) -> None:
        """Between two attempts; work that comes does not make a peer reachable."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        while not self.peer.closed and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            self._drain()
            if not self.peer.closed:
                time.sleep(min(0.02, left))

    # --- sending ---

    def _pump(self, stream: Stream) -> None:
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        poller.register(stream.sock, select.POLLIN)
        fd, watched = stream.sock.fileno(), select.POLLIN
        while not self.peer.closed:
            now = time.monotonic()
            wait = 0.0
            for _ in range(BATCH):  # each system call may cost a turn of the interpreter's lock: no look between frames
                if not self._views:
                    wait = self._choose(now) if self._open is None else self._seal(self._open)
                if not self._views:
                    break
                left = stream.send_some(self._views)
                if left is not self._views:
                    self._views, self._progress = left, now
                if left:
                    break
            wanted = select.POLLIN | (select.POLLOUT if self._views else 0)
            if wanted != watched:
                poller.modify(stream.sock, wanted)
                watched = wanted
            timeout = self._timeout(stream, now) if self._views else min(wait, self._timeout(stream, now))
            for ready, events in poller.poll(max(0, int(timeout * 1000 + 0.999))):
                if ready == self._event:
                    self._drain()
                elif ready == fd and events & ~select.POLLOUT:
                    self._receive(stream)

    def _choose(self, now: float) -> float:
        """The next frame into ``_views``, if there is one; else seconds until there may be."""
        peer = self.peer
        frame: Frame | float
        with self._sender.change:
            if peer.controls:
                self._views = [memoryview(encode(Cancel(peer.controls.pop())))]
                return 0.0
            frame = peer.next(now, self.lane)
        if not isinstance(frame, Frame):
            return frame
        room, part, load = frame.room, frame.part, frame.load
        if not self._flying:
            self._progress = now
        self._flying[room.id, part.index, load.position] = frame
        parts = part.index + 1 if part.last else 0
        head = Data(
            room.id,
            part.index,
            parts,
            load.position,
            part.total,
            load.size,
            load.regions,
            load.offsets,
            load.lengths,
            load.pages,
        )
        self._open = frame
        views = self._sender.memory.read(load.source_regions, load.source_offsets, load.lengths)
        self._views = [memoryview(encode(head)), *views]
        self._sender.counters.inc("stream.frames", **self._labels)
        self._sender.counters.inc("stream.bytes", load.size, **self._labels)
        return 0.0

    def _seal(self, frame: Frame) -> float:
        """All of its payload has been read."""
        with self._sender.change:
            alive = self.peer.alive(frame)
        self._views, self._open = [memoryview(SOUND if alive else SPOILT)], None
        return 0.0

    def _timeout(self, stream: Stream, now: float) -> float:
        """Seconds until the next look. Raises if nothing has moved for too long."""
        silent = now - self._progress
        if not (self._flying or self._views or self._pinged):
            if silent >= self._tuning.idle_s:
                self._views, self._pinged, self._progress = [memoryview(encode(Ping()))], True, now
                self._look(stream)
                return 0.0
            return self._tuning.idle_s - silent
        look = min(LOOK_S, self._tuning.progress_s / 4)
        if now - self._looked > look and self._look(stream):
            self._progress = now
        elif silent > self._tuning.progress_s:
            raise StreamClosed(f"no progress for {self._tuning.progress_s:g} s")
        return look

    def _look(self, stream: Stream) -> bool:
        """What the kernel knows, into the metrics. True: the peer's kernel has taken bytes since the last look."""
        info, self._looked = stream.info(), time.monotonic()
        stream.hold(self._tuning.paced(self.peer.link.estimate.bandwidth).unsent)
        if self.lane == "small":
            stream.restart()
        moved, self._acked = info.acked > self._acked, info.acked
        if info.rtt:
            with self._sender.change:
                link = self.peer.link
                link.rtt = min(link.rtt, info.rtt) if link.rtt else info.rtt
        counters = self._sender.counters
        counters.set("stream.rtt_ms", round(info.rtt * 1000, 3), **self._labels)
        counters.set("stream.segments_retransmitted", info.retransmitted, **self._labels)
        counters.set("stream.pacing", stream.pacing, **self._labels)
        return moved

    # --- receiving ---

    def _receive(self, stream: Stream) -> None:
        self._received += stream.receive_some()
        self._progress = now = time.monotonic()
        received, at = bytes(self._received), 0
        while len(received) - at >= PREFIX:
            kind, size = parse_prefix(received[at : at + PREFIX], _ANSWERS)
            if len(received) - at < PREFIX + size:
                break
            self._answer(parse(kind, received[at + PREFIX : at + PREFIX + size]), now)
            at += PREFIX + size
        del self._received[:at]

    def _answer(self, answer: object, now: float) -> None:
        if isinstance(answer, Ack):
            frame = self._flying.pop((answer.room, answer.part, answer.position), None)
            if frame is None or frame.load.size != answer.payload:
                raise FrameError("an acknowledgement of something that was not sent")
            with self._sender.change:
                self.peer.acknowledged(frame, now, landed=answer.outcome == "landed")
            if answer.outcome == "landed":
                self._sender.landed(answer.room, answer.payload, now - frame.sent)
        elif isinstance(answer, Cancelled):
            with self._sender.change:
                self.peer.cancelled(answer.room)
        else:
            self._pinged = False

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
