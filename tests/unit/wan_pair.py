"""P's memory and MD's in one process, and the KV streams between them over loopback sockets."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable

from sglang_pdd.metrics import Counters
from sglang_pdd.wan.landing import Landed
from sglang_pdd.wan.peer import Peer
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.regions import Region, Regions
from sglang_pdd.wan.sender import Sender
from sglang_pdd.wan.sockets import Tuning
from sglang_pdd.wan.tls import Identity

# A niced test may stand still for seconds: only where a time-out is the subject is it short.
QUICK = Tuning(progress_s=5.0, idle_s=2.0, give_up_s=20.0, retry_s=(0.02, 0.1))
LONG = 30.0
LAYERS, SIZE, PAGE = 4, 4 << 20, 4096


def wait_for(what: Callable[[], object], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Relay:
    """A TCP proxy that can cut its connections, or hold all bytes back without closing anything."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)  # what waits here has left the sender
        self.address: tuple[str, int] = self._listener.getsockname()
        self._pairs: list[socket.socket] = []
        self._open = threading.Event()
        self._open.set()
        self.refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if self.refusing:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
            except OSError:
                return
            self._pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                self._open.wait()
                sink.sendall(data)
        for sock in (source, sink):
            sock.close()

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for sock in pairs:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def hold(self, held: bool) -> None:
        self._open.clear() if held else self._open.set()

    def close(self) -> None:
        self._listener.close()
        self.hold(False)
        self.cut()


class Pair:
    """P's memory and MD's, and the transport between them."""

    def __init__(
        self,
        *,
        identities: tuple[Identity | None, Identity | None] = (None, None),
        rate: float | None = None,
        relayed: bool = False,
        tuning: Tuning = QUICK,
        memory: Callable[[list[Region]], Regions] = Regions,
    ) -> None:
        self.near = [bytearray(os.urandom(SIZE)) for _ in range(LAYERS)]
        self.far = [bytearray(SIZE) for _ in range(LAYERS)]
        self.sources = memory([Region.of(b, PAGE) for b in self.near])
        self.targets = memory([Region.of(b, PAGE) for b in self.far])
        self.landed: list[Landed] = []
        self.counters, self.receiver_counters = Counters(), Counters()
        self.receiver = Receiver(
            self.targets, self.receiver_counters, identity=identities[1], tuning=tuning, landed=self.landed.append
        )
        address = self.receiver.listen("127.0.0.1")
        self.relay = Relay(address) if relayed else None
        self.address = self.relay.address if self.relay else address
        self.sender = Sender("p", self.sources, self.counters, identity=identities[0], tuning=tuning, rate=rate)
        self.peer = self.connect()

    def connect(self) -> Peer:
        bases = [region.address for region in self.targets.regions]
        return self.sender.peer("md", self.address, self.receiver.token, bases)

    def pages(self, pages: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Blocks of (source page, destination page), layer after layer."""
        return [
            (near.address + a * PAGE, far.address + b * PAGE, PAGE)
            for near, far in zip(self.sources.regions, self.targets.regions, strict=True)
            for a, b in pages
        ]

    def check(self, pages: list[tuple[int, int]]) -> None:
        """Exactly these pages have arrived, in all layers."""
        for near, far in zip(self.near, self.far, strict=True):
            expected = bytearray(SIZE)
            for a, b in pages:
                expected[b * PAGE : (b + 1) * PAGE] = near[a * PAGE : (a + 1) * PAGE]
            assert far == expected

    def scribble(self) -> None:
        for far in self.far:
            far[:] = b"\xee" * SIZE

    def assert_scribbled(self, seconds: float = 0.2) -> None:
        """Nobody writes any more."""
        time.sleep(seconds)
        assert all(far == b"\xee" * SIZE for far in self.far)

    def close(self) -> None:
        self.sender.shutdown()
        self.receiver.shutdown()
        if self.relay:
            self.relay.close()


def shuffled(n: int, seed: int = 0) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    total = SIZE // PAGE
    return list(zip(rng.sample(range(total), n), rng.sample(range(total), n), strict=True))
