"""One connection, plain or TLS: bytes in and out of scattered memory, what the kernel knows, what it is told."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from dataclasses import dataclass

from sglang_pdd.wan.frames import PREFIX, Frame, parse, parse_prefix

SCRAP = 256 << 10  # bytes read at once into nowhere

_MAX_PACING_RATE = 47
_NOTSENT_LOWAT = 25
_SILENCE = (BlockingIOError, TimeoutError)  # says the kernel's time-out; Python's
_AGAIN = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


class StreamClosed(ConnectionError):
    """The peer has gone, or has made no progress for too long."""


@dataclass(frozen=True, slots=True)
class Info:
    """What the kernel knows of a connection."""

    rtt: float = 0.0  # seconds
    acked: int = 0  # bytes that the peer's kernel has
    retransmitted: int = 0  # segments


class Stream:
    """A connection that is used by one thread. Any thread may call `abort`."""

    def __init__(self, sock: socket.socket, peer: str = "") -> None:
        self.sock = sock
        self.peer = peer  # the name of its certificate, "" without TLS
        self.pacing = 0  # bytes/s, 0: none

    # --- blocking -----------------------------------------------------------------------------------------------------

    def blocking(self, timeout: float) -> None:
        """From now on calls wait for ``timeout`` seconds of silence at most."""
        # In the kernel, so that one call can fill all of a frame: Python's own timeouts make the socket non-blocking.
        self.sock.settimeout(None)
        value = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def read(self, n: int, patience: int = 0) -> bytes:
        """Exactly ``n`` bytes.

        Raises:
            StreamClosed: see `fill`.
        """
        data = bytearray(n)
        self.fill([memoryview(data)], patience)
        return bytes(data)

    def read_frame(self, allowed: tuple[type[Frame], ...], patience: int = 0) -> Frame:
        """The next frame, without its payload.

        Raises:
            FrameError: malformed, or not allowed now.
            StreamClosed: see `fill`.
        """
        kind, size = parse_prefix(self.read(PREFIX, patience), allowed)
        return parse(kind, self.read(size) if size else b"")

    def fill(self, views: list[memoryview], patience: int = 0) -> None:
        """Read exactly into these buffers, in order; ``patience``: that many time-outs before anything has come are no
        failure.

        Raises:
            StreamClosed: end of the stream, or silence. Some of the buffers may have been written to.
        """
        begun = False
        while views:
            try:
                got = self._receive_into(views)
            except _SILENCE:
                if begun or patience <= 0:
                    raise StreamClosed("nothing came for too long") from None
                patience -= 1
                continue
            if got == 0:
                raise StreamClosed("closed by the peer")
            views, begun = _rest(views, got), True

    def skip(self, n: int) -> None:
        """Read ``n`` bytes into nowhere.

        Raises:
            StreamClosed: see `fill`.
        """
        scrap = bytearray(min(n, SCRAP))
        while n:
            piece = min(n, len(scrap))
            self.fill([memoryview(scrap)[:piece]])
            n -= piece

    def write(self, data: bytes) -> None:
        """Send everything, waiting as long as needed within the time-out.

        Raises:
            OSError: the peer has gone, or takes nothing.
        """
        self.sock.sendall(data)

    # --- non-blocking -------------------------------------------------------------------------------------------------

    def send_some(self, views: list[memoryview]) -> list[memoryview]:
        """Send what the socket takes now. Returns what is left.

        Raises:
            OSError: the peer has gone.
        """
        try:
            return _rest(views, self.sock.sendmsg(views))
        except BlockingIOError:
            return views

    def receive_some(self) -> bytes:
        """What has come, or most of it; empty if nothing has.

        Raises:
            OSError: the peer has gone.
        """
        try:
            data = self.sock.recv(64 << 10)
        except _AGAIN:
            return b""
        if not data:
            raise StreamClosed("closed by the peer")
        return data

    # --- both ---------------------------------------------------------------------------------------------------------

    def pace(self, rate: float) -> None:
        """At most ``rate`` bytes/s, where the kernel can."""
        value = max(1, int(rate))
        if value != self.pacing:
            kind = "=I" if value < 1 << 32 else "=Q"
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack(kind, value))
                self.pacing = value

    def hold(self, n: int) -> None:
        """The kernel is to hold at most about ``n`` bytes that cannot leave yet."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, n)

    def restart(self) -> None:
        """Begin BBR anew, with the window as it is: every 10 s it nearly stops for 0.2 s, to see the shortest RTT."""
        with contextlib.suppress(OSError):
            known = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
            if known == b"bbr":
                for name in (b"reno", known):  # the same again would change nothing
                    self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)

    def info(self) -> Info:
        """What the kernel says; zeros where it says nothing."""
        try:
            raw = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return Info(
                struct.unpack_from("=I", raw, 68)[0] / 1e6,  # tcpi_rtt
                struct.unpack_from("=Q", raw, 120)[0],  # tcpi_bytes_acked
                struct.unpack_from("=I", raw, 100)[0],  # tcpi_total_retrans
            )
        except (OSError, struct.error):
            return Info()

    def abort(self) -> None:
        """End it now: a thread that waits in it returns with an error."""
        with contextlib.suppress(OSError):
            # The base class's: SSLSocket.shutdown would turn it into a plain socket under the other thread's feet.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _receive_into(self, views: list[memoryview]) -> int:
        """As much as one call brings."""
        return self.sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]


class TlsStream(Stream):
    """TLS has no scatter/gather here: everything goes through contiguous memory."""

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        super().__init__(sock, peer)
        self._staging = bytearray()

    def blocking(self, timeout: float) -> None:
        self.sock.settimeout(timeout)

    def fill(self, views: list[memoryview], patience: int = 0) -> None:
        if len(views) == 1:
            return super().fill(views, patience)
        n = sum(map(len, views))
        if len(self._staging) < n:
            self._staging = bytearray(n)
        staging = memoryview(self._staging)
        super().fill([staging[:n]], patience)
        at = 0
        for view in views:
            view[:] = staging[at : at + len(view)]
            at += len(view)

    def send_some(self, views: list[memoryview]) -> list[memoryview]:
        if len(views) > 1:
            views = [memoryview(b"".join(views))]
        while views:
            try:
                sent = self.sock.send(views[0])
            except _AGAIN:
                break
            views = [views[0][sent:]] if sent < len(views[0]) else []
        return views

    def receive_some(self) -> bytes:
        data = b""
        while piece := super().receive_some():  # a poll does not see what TLS has read already
            data += piece
        return data

    def _receive_into(self, views: list[memoryview]) -> int:
        return self.sock.recv_into(views[0])


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers of which ``done`` bytes are done."""
    for at, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[at + 1 :]] if done else views[at:]
        done -= len(view)
    return []
