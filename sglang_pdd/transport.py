"""`Endpoint`: everything a node says or hears, over ZMQ. One ROUTER, many DEALERs, nothing blocks."""

from __future__ import annotations

import logging
import re
import socket as os_socket
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from sglang_pdd.keys import Keys
from sglang_pdd.metrics import Counters, LogLimit
from sglang_pdd.protocol import MAX_MESSAGE, Message, ProtocolError, VersionMismatch, decode, encode

LINGER_MS = 200  # a last Stop or Abort gets this long to leave
QUEUE = 4096  # messages a connection holds in either direction
EXPEDITED = 46 << 2  # DSCP EF in the TOS byte: ids overtake KV in the network's queues
HEARTBEAT_MS = 2000
SILENCE_MS = 6000  # without an answer for so long a connection is given up, and dialled again

_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+|\*):(\d{1,5}|\*)")
_NODE = re.compile(rb"[!-~]{1,64}")
_POLLIN, _NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)  # enums are slow, and this runs every step
_log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]


class TransportError(RuntimeError):
    """A connection that must not or cannot be made; the text says why, in one line."""


class Endpoint:
    """A node's sockets. To be used by one thread.

    A peer is named by its node id if it dialled us, and by its endpoint if we dialled it.
    """

    def __init__(self, node: str, keys: Keys | None, counters: Counters) -> None:
        if not _NODE.fullmatch(node.encode()):
            raise TransportError(f"bad node id {node!r}: 1 to 64 printable ASCII characters")
        self.node = node
        self.on_socket: Callable[[Socket], None] | None = None
        self.on_socket_closed: Callable[[Socket], None] | None = None
        self._keys = keys
        self._counters = counters
        self._limit = LogLimit(_log)
        self._context = zmq.Context()  # its own: the ZAP handler is one per context
        self._router: Socket | None = None
        self._dealers: dict[str, tuple[Socket, str]] = {}  # endpoint -> (socket, the server's public key)
        self._sources: list[tuple[Socket, str | None]] = []  # all sockets, and the peer of a DEALER
        self._interest: list[tuple[Socket, int]] = []  # the same, for a poll
        self._turn = 0
        self._zap = None if keys is None else self._guard(keys.peers)

    # --- connections ------------------------------------------------------------------------------------------------

    def bind(self, endpoint: str) -> str:
        """Listen on ``tcp://host:port``; port 0 or ``*`` takes a free one. Returns the endpoint with its real port.

        Raises:
            TransportError: already bound, a bad endpoint, or an address that cannot be had.
        """
        if self._router is not None:
            raise TransportError(f"cannot listen on {endpoint}: this node listens already")
        _check_endpoint(endpoint)
        router = self._socket(zmq.ROUTER, endpoint)
        router.router_handover = True  # a peer that comes back takes its own, half-open connection over
        router.router_mandatory = True  # an unknown peer is an error that we count, not a silent loss
        if self._keys is not None:
            router.curve_server = True
            router.zap_domain = b"pdd"
            router.zap_enforce_domain = True  # without this libzmq admits everybody if the ZAP handler is gone
        try:
            router.bind(re.sub(r":0$", ":*", endpoint))
        except zmq.ZMQError as error:
            router.close(0)
            raise TransportError(f"cannot listen on {endpoint}: {error}") from None
        self._router = router
        self._add(router, None)
        return str(router.getsockopt_string(zmq.LAST_ENDPOINT))

    def dial(self, endpoint: str, public_key: str) -> None:
        """Connect to a node's ROUTER, and go on trying. Dialling again changes nothing, unless the key is another.

        Raises:
            TransportError: a bad endpoint, or (with keys) a server key that is not in the allow-list.
        """
        _check_endpoint(endpoint)
        if "*" in endpoint or endpoint.endswith(":0"):
            raise TransportError(f"cannot dial {endpoint}: a wildcard is no address")
        if self._keys is None:
            public_key = ""
        elif public_key not in self._keys.peers:
            shown = public_key or "no key"
            raise TransportError(f"cannot dial {endpoint}: its key ({shown:.40}) is not among this node's peers")
        if endpoint in self._dealers:
            if self._dealers[endpoint][1] == public_key:
                return
            self.hangup(endpoint)
        try:
            dealer = self._socket(zmq.DEALER, endpoint)
        except zmq.ZMQError as error:  # too many open already
            raise TransportError(f"cannot dial {endpoint}: {error}") from None
        try:
            dealer.identity = self.node.encode()
            if self._keys is not None:
                dealer.curve_serverkey = public_key.encode()
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise TransportError(f"cannot dial {endpoint}: {error}") from None
        self._dealers[endpoint] = (dealer, public_key)
        self._add(dealer, endpoint)

    def hangup(self, endpoint: str) -> None:
        """Close a dialled connection, if there is one."""
        dealer, _ = self._dealers.pop(endpoint, (None, ""))
        if dealer is not None:
            self._remove(dealer)

    def close(self) -> None:
        """Close everything. Takes at most about ``LINGER_MS``; idempotent."""
        for endpoint in list(self._dealers):
            self.hangup(endpoint)
        if self._router is not None:
            self._remove(self._router)
            self._router = None
        self._context.term()  # also ends the ZAP thread
        if self._zap is not None:
            self._zap.join()
            self._zap = None

    @property
    def sockets(self) -> list[Socket]:
        """All sockets, for a poller."""
        return [s for s, _ in self._sources]

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message. False if it was dropped: unknown peer, its queue is full, or it cannot be encoded.

        True says that it was queued: a peer that dies may never see it.
        """
        kind = type(message).__name__
        try:
            data = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            return self._drop("malformed", f"cannot encode {kind} for {peer}: {error}")
        if len(data) > MAX_MESSAGE:
            return self._drop("oversized", f"{kind} for {peer} has {len(data)} bytes, limit {MAX_MESSAGE}")
        try:
            if peer in self._dealers:
                self._dealers[peer][0].send(data, _NOBLOCK)
            elif self._router is not None:
                self._router.send_multipart((peer.encode(), data), _NOBLOCK)
            else:
                return self._drop("no_route", f"{kind} for {peer}: no such peer")
        except zmq.Again:
            return self._drop("full", f"{kind} for {peer}: {QUEUE} messages are waiting already")
        except zmq.ZMQError as error:
            return self._drop("no_route", f"{kind} for {peer}: {error}")
        self._counters.inc("messages.sent", kind=kind)
        return True

    def receive(self, limit: int = 256) -> list[tuple[str, Message]]:
        """What has arrived, as (peer, message), one from each connection in turn. Looks at ``limit`` at most."""
        found = zmq.zmq_poll(self._interest, 0)
        if not found:
            return []
        have = {id(socket) for socket, _ in found}
        ready = [source for source in self._sources if id(source[0]) in have]
        self._turn += 1
        start = self._turn % len(ready)
        ready = ready[start:] + ready[:start]
        received: list[tuple[str, Message]] = []
        while ready:
            for source in tuple(ready):
                if limit <= 0:
                    return received
                try:
                    frames = source[0].recv_multipart(_NOBLOCK)
                except zmq.ZMQError:
                    ready.remove(source)
                    continue
                limit -= 1
                got = self._decode(source[1], frames)
                if got is not None:
                    received.append(got)
        return received

    def poll(self, timeout_ms: int) -> bool:
        """Wait until something can be received, or until the time is over."""
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        return bool(poller.poll(timeout_ms))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _decode(self, peer: str | None, frames: list[bytes]) -> tuple[str, Message] | None:
        if peer is None:  # a ROUTER puts the sender's identity first
            sender = frames.pop(0)
            if not _NODE.fullmatch(sender):
                self._drop("malformed", f"message from {sender.hex():.128}: not a node id")
                return None
            peer = sender.decode()
        if len(frames) != 1:
            self._drop("malformed", f"message from {peer}: {len(frames)} frames")
            return None
        if len(frames[0]) > MAX_MESSAGE:
            self._drop("oversized", f"message from {peer}: {len(frames[0])} bytes, limit {MAX_MESSAGE}")
            return None
        try:
            message = decode(frames[0])
        except VersionMismatch as error:
            self._drop("version", f"message from {peer}: {error}")
            return None
        except ProtocolError as error:
            self._drop("malformed", f"message from {peer}: {error}")
            return None
        self._counters.inc("messages.received", kind=type(message).__name__)
        return peer, message

    def _drop(self, cause: str, text: str) -> bool:
        self._counters.inc("messages.dropped", cause=cause)
        self._limit.warning(cause, f"dropped ({cause}): {text}")
        return False

    def _socket(self, kind: int, endpoint: str) -> Socket:
        socket = self._context.socket(kind)
        socket.linger = LINGER_MS
        socket.sndhwm = socket.rcvhwm = QUEUE
        # Beyond the slack libzmq closes the connection without a word; within it we can count and log.
        socket.maxmsgsize = MAX_MESSAGE + (64 << 10)
        socket.ipv6 = "[" in endpoint
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = socket.heartbeat_ttl = SILENCE_MS
        socket.handshake_ivl = 5000
        socket.connect_timeout = 3000
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 2000
        if _expedited_allowed():
            socket.tos = EXPEDITED
        if self._keys is not None:
            socket.curve_publickey = self._keys.public.encode()
            socket.curve_secretkey = self._keys.secret.encode()
        return socket

    def _add(self, socket: Socket, peer: str | None) -> None:
        self._sources.append((socket, peer))
        self._interest.append((socket, _POLLIN))
        if self.on_socket is not None:
            self.on_socket(socket)

    def _remove(self, socket: Socket) -> None:
        self._sources = [source for source in self._sources if source[0] is not socket]
        self._interest = [(s, _POLLIN) for s, _ in self._sources]
        if self.on_socket_closed is not None:
            self.on_socket_closed(socket)
        socket.close(LINGER_MS)

    def _guard(self, allowed: frozenset[str]) -> threading.Thread:
        zap = self._context.socket(zmq.REP)
        zap.linger = 0
        zap.bind("inproc://zeromq.zap.01")
        thread = threading.Thread(target=self._authenticate, args=(zap, allowed), name="pdd-zap", daemon=True)
        thread.start()
        return thread

    def _authenticate(self, zap: Socket, allowed: frozenset[str]) -> None:
        # RFC 27 (ZAP). Without a handler CURVE admits any client that knows the server's public key.
        allowed_raw = {z85.decode(key.encode()) for key in allowed}
        while True:
            try:
                frames = zap.recv_multipart()
                version, request, _, address, _, mechanism, *credentials = frames
                welcome = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in allowed_raw
                if not welcome:
                    key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else "none"
                    self._counters.inc("connections.refused")
                    text = f"refused a connection from {address.decode()}: its key ({key}) is not among the peers"
                    self._limit.warning("refused", text)
                status = (b"200", b"OK") if welcome else (b"400", b"not in the allow-list")
                zap.send_multipart((version, request, *status, b"", b""))
            except zmq.ZMQError:  # the context was terminated
                break
        zap.close(0)


def _check_endpoint(endpoint: str) -> None:
    # Endpoints come from peers: tcp only, or ipc:// and inproc:// would reach into this machine.
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise TransportError(f"bad endpoint {endpoint!r:.100}: expected tcp://host:port")


def _expedited_allowed() -> bool:
    # libzmq aborts the process if the OS refuses the option, so ask the OS first.
    try:
        with os_socket.socket(os_socket.AF_INET, os_socket.SOCK_STREAM) as probe:
            probe.setsockopt(os_socket.IPPROTO_IP, os_socket.IP_TOS, EXPEDITED)
        return True
    except OSError:
        return False
