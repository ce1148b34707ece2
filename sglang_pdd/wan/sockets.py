"""From an address or an accepted socket to a `Stream`: socket options, TLS, and how streams behave."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
from dataclasses import dataclass, replace

from sglang_pdd.wan.stream import Stream, TlsStream
from sglang_pdd.wan.tls import Identity

HANDSHAKE_S = 5.0
STREAM_RATE = 25e6 / 8  # bytes/s that are worth a stream of their own, also with a packet lost now and then


@dataclass(frozen=True, slots=True)
class Tuning:
    """How streams behave. Times are in seconds, sizes in bytes."""

    streams: int = 8  # to each peer rank; fewer cannot fill a long fat link with the usual socket buffers
    frame: int = 1 << 20
    progress_s: float = 5.0  # without any progress for so long a connection is given up, and made anew
    idle_s: float = 5.0  # an idle stream says so often that it is there
    give_up_s: float = 15.0  # a peer that cannot be reached for so long has lost its transfers
    retry_s: tuple[float, float] = (0.1, 2.0)  # first, and doubled up to
    congestion: str = "bbr"  # where the kernel has it
    unsent: int = 1 << 20  # what a stream's kernel holds that could not leave yet, and no choice can take back

    def paced(self, rate: float) -> Tuning:
        """For a link of ``rate`` bytes/s: what no choice can take back, a frame and the unsent bytes of each stream,
        keeps it busy for 80 ms at most, from 200 Mbit/s on."""
        share = int(rate * 0.04 / self.streams)
        frame = min(self.frame, max(64 << 10, share))
        # With less, a thread that is woken late would leave the link idle, and a link measured slow become slow.
        unsent = min(self.unsent, max(128 << 10, share // 2))
        return replace(self, frame=frame, unsent=unsent)

    def fewer(self, rate: float) -> Tuning:
        """On a link of ``rate`` bytes/s no more streams than keep it busy: what waits in each cannot be taken back."""
        return replace(self, streams=min(self.streams, max(2, math.ceil(rate / STREAM_RATE))))


def connect(address: tuple[str, int], tuning: Tuning, identity: Identity | None) -> Stream:
    """Dial. Blocks for `HANDSHAKE_S` at most, for each address that the host has.

    Raises:
        OSError: no connection, or (``ssl.SSLError``) nobody we know.
    """
    return _prepared(socket.create_connection(address, HANDSHAKE_S), tuning, identity, server=False)


def accepted(sock: socket.socket, tuning: Tuning, identity: Identity | None) -> Stream:
    """Take over an accepted socket. Blocks for `HANDSHAKE_S` at most.

    Raises:
        OSError: the peer has gone, or (``ssl.SSLError``) is nobody we know.
    """
    sock.settimeout(HANDSHAKE_S)
    return _prepared(sock, tuning, identity, server=True)


def _prepared(sock: socket.socket, tuning: Tuning, identity: Identity | None, *, server: bool) -> Stream:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # the kernel's default then
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, tuning.congestion.encode())
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(tuning.progress_s * 1000))
        if identity is None:
            stream = Stream(sock)
        else:
            context = identity.server if server else identity.client
            sock = wrapped = context.wrap_socket(sock, server_side=server)
            name = identity.peer(wrapped.getpeercert(True))
            if name is None:
                raise ssl.SSLError("the certificate is none of the peers'")
            stream = TlsStream(wrapped, name)
        stream.hold(tuning.unsent)
        return stream
    except BaseException:
        sock.close()
        raise
