"""`Receiver`: listens for streams, and writes what they bring into this process's regions, for rooms that are open."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable

from sglang_pdd.metrics import Counters, LogLimit
from sglang_pdd.wan.frames import (
    SOUND,
    Ack,
    Cancel,
    Cancelled,
    Data,
    FrameError,
    Hello,
    Outcome,
    Ping,
    Pong,
    Reject,
    Welcome,
)
from sglang_pdd.wan.frames import encode as encoded
from sglang_pdd.wan.landing import Claim, Landed, Landings
from sglang_pdd.wan.regions import BoundsError, Memory
from sglang_pdd.wan.sockets import HANDSHAKE_S, Tuning, accepted
from sglang_pdd.wan.stream import Stream, StreamClosed
from sglang_pdd.wan.tls import Identity

MAX_STREAMS = 512
MAX_STRANGERS = 64  # connections that have not said who they are
IDLES = 4  # missed signs of life after which a sender is gone
GRACE_S = 0.5  # what a frame of a closed room has to end by itself

_log = logging.getLogger(__name__)


class Receiver:
    """All methods may be called by any thread, and return at once unless they say otherwise.

    Args:
        memory: what may be written.
        identity: for TLS; without, only loopback is listened on, unless ``insecure``.
        landed: called from a stream's thread for every frame that has landed; must be quick.
    """

    def __init__(
        self,
        memory: Memory,
        counters: Counters,
        *,
        identity: Identity | None = None,
        insecure: bool = False,
        tuning: Tuning | None = None,
        landed: Callable[[Landed], None] = lambda landed: None,
    ) -> None:
        self.token = os.urandom(16)  # what a sender must have been told; another life has another
        self._memory = memory
        self._counters = counters
        self._identity = identity
        self._insecure = insecure
        self._tuning = tuning or Tuning()
        self._on_landed = landed
        self._limit = LogLimit(_log)
        self._change = threading.Condition()  # guards all below
        self._landings = Landings()
        self._closed_at: dict[int, float] = {}  # rooms that are not quiet yet
        self._strangers: dict[socket.socket, None] = {}  # in the order of their coming
        self._streams: dict[tuple[int, int], Stream] = {}  # by session and number
        self._threads: set[threading.Thread] = set()
        self._listener: socket.socket | None = None
        self._ended = False

    # --- rooms ---

    def open(self, room: int) -> None:
        """Frames of this room may be written from now on. To be called before a sender is told where to write."""
        with self._change:
            self._landings.open(room)

    def close(self, room: int) -> bool:
        """No frame of this room will be written any more, but those that have begun. True: there are none.

        If not, ask `quiet` before its memory is used for anything else.
        """
        with self._change:
            if self._landings.close(room):
                self._closed_at.setdefault(room, time.monotonic())
            return room not in self._closed_at

    def quiet(self, room: int) -> bool:
        """Is nothing being written for this closed room? A frame that takes too long is cut off with its stream."""
        with self._change:
            claims = self._landings.writing(room)
            if not claims:
                self._closed_at.pop(room, None)
            elif time.monotonic() - self._closed_at.get(room, 0.0) > GRACE_S:
                for claim in claims:
                    _stream(claim).abort()
            return not claims

    def wait_quiet(self, room: int, timeout: float = 5.0) -> bool:
        """`quiet`, waited for."""
        deadline = time.monotonic() + timeout
        while not self.quiet(room):
            if time.monotonic() > deadline:
                return False
            with self._change:
                self._change.wait(0.05)
        return True

    def landed(self, room: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """What an open room has: spans of bytes by (session, part)."""
        with self._change:
            return self._landings.landed(room)

    def pages(self, room: int) -> dict[int, int]:
        """How many pages an open room has, from the first on, by each session that has sent something for it."""
        with self._change:
            return self._landings.pages(room)

    # --- life ---

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Accept streams at this address; port 0 takes a free one. Returns the real address.

        Raises:
            OSError: the address cannot be had, or must not: it is not loopback, and there are no keys.
        """
        if self._identity is None and not self._insecure and not _is_loopback(host):
            raise PermissionError(f"not listening on {host} without keys: give --pdd-keys, or --pdd-insecure")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._start(self._accept, self._listener)
        address = self._listener.getsockname()
        return str(address[0]), int(address[1])

    def shutdown(self) -> None:
        """Close everything, and wait until nothing writes any more. Idempotent."""
        with self._change:
            self._ended = True
            sockets = [stream.sock for stream in self._streams.values()] + list(self._strangers)
            threads = list(self._threads)
        if self._listener is not None:
            _shut(self._listener)
            self._listener.close()
        for sock in sockets:
            _shut(sock)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(HANDSHAKE_S)

    # --- a stream's thread ---

    def _start(self, target: Callable[[socket.socket], None], sock: socket.socket) -> None:
        def run() -> None:
            try:
                target(sock)
            finally:
                with self._change:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="pdd-stream-in", daemon=True)
        with self._change:
            self._threads.add(thread)
            thread.start()  # within, or `shutdown` might join it before it has started

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                with self._change:
                    if self._ended:
                        return
                time.sleep(0.1)  # out of file descriptors: others may close
                continue
            with self._change:
                if self._ended or len(self._threads) > MAX_STREAMS:
                    sock.close()
                    continue
                if len(self._strangers) >= MAX_STRANGERS:
                    _shut(next(iter(self._strangers)))  # the oldest: a real sender needs no time
                self._strangers[sock] = None
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        stream, key = None, None
        try:
            stream = accepted(sock, self._tuning, self._identity)
            key = self._welcome(sock, stream)
            if key is not None:
                self._receive(stream, key[0])
        except (FrameError, BoundsError) as error:
            self._refused("malformed", f"closing a stream: {error}")
        except StreamClosed as error:
            _log.debug("stream closed: %s", error)
        except OSError as error:
            cause = "handshake" if key is None else "lost"
            self._refused(cause, f"a stream ended: {error}")
        except Exception as error:  # of a pool that is not plain memory; the sender will try again, or give up
            _log.exception("stream of %r", key)
            self._refused("bug", f"{type(error).__name__}: {error}")
        finally:
            with self._change:
                self._strangers.pop(sock, None)
                if key is not None and self._streams.get(key) is stream:
                    del self._streams[key]
                self._change.notify_all()
            if stream is not None:
                stream.close()
            sock.close()

    def _welcome(self, sock: socket.socket, stream: Stream) -> tuple[int, int] | None:
        stream.blocking(HANDSHAKE_S)
        hello = stream.read_frame((Hello,))
        assert isinstance(hello, Hello)
        if not hmac.compare_digest(hello.token, self.token):
            self._refused("token", f"refused a stream of {hello.node!r}: it was not told of this server's present life")
            stream.write(encoded(Reject("wrong token: this server has been started anew, or is another")))
            return None
        key = (hello.session, hello.stream)
        with self._change:
            while (older := self._streams.get(key)) is not None:  # given up by the sender
                older.abort()
                self._change.wait(HANDSHAKE_S)
            self._streams[key] = stream
            self._strangers.pop(sock, None)
            if self._ended:
                raise StreamClosed("shutting down")
        stream.blocking(self._tuning.progress_s)
        stream.write(encoded(Welcome(self._memory.shape)))
        return key

    def _receive(self, stream: Stream, session: int) -> None:
        patience = math.ceil(IDLES * self._tuning.idle_s / self._tuning.progress_s)
        while True:
            frame = stream.read_frame((Data, Cancel, Ping), patience)
            if isinstance(frame, Data):
                self._data(stream, session, frame)
            elif isinstance(frame, Cancel):
                with self._change:
                    settled = self._landings.cancel(frame.room, session)
                if settled:
                    stream.write(encoded(Cancelled(frame.room)))
            else:
                stream.write(encoded(Pong()))

    def _data(self, stream: Stream, session: int, data: Data) -> None:
        views = self._memory.write(data.regions, data.offsets, data.lengths)
        claim = self._begin(stream, session, data)
        landed, settled = None, False
        outcome: Outcome = "landed"
        if isinstance(claim, Claim):
            written = False
            try:
                seal = bytearray(1)
                stream.fill([*views, memoryview(seal)])
                self._memory.written(data.regions, data.offsets, data.lengths)
                written = seal == SOUND
            finally:
                with self._change:
                    landed, settled = self._landings.end(claim, written)
                    self._change.notify_all()
            outcome = "landed" if written else "discarded"
        else:
            stream.skip(data.payload + 1)
            outcome = claim
            self._counters.inc("stream.skipped", cause="duplicate" if outcome == "landed" else "closed")
        if landed is not None:
            try:
                self._on_landed(landed)
            except Exception as error:  # the stream goes on, or one bug would cost the peer its connection
                self._refused("bug", f"{type(error).__name__}: {error}")
        answer = encoded(Ack(data.room, data.part, data.position, data.payload, outcome))
        stream.write(answer + encoded(Cancelled(data.room)) if settled else answer)

    def _begin(self, stream: Stream, session: int, data: Data) -> Claim | Outcome:
        with self._change:
            while isinstance(claim := self._landings.begin(data, session, stream), list):
                for rival in claim:
                    _stream(rival).abort()
                self._change.wait(HANDSHAKE_S)
            return claim

    def _refused(self, cause: str, text: str) -> None:
        self._counters.inc("stream.refused", cause=cause)
        self._limit.warning(cause, text)


def _stream(claim: Claim) -> Stream:
    assert isinstance(claim.stream, Stream)
    return claim.stream


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
