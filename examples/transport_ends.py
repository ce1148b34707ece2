"""What `bench_transport.py` runs inside the network namespaces.

    python transport_ends.py ROLE '{"setting": ...}'

An end says hello, then obeys: JSON objects, one a line, in and out. Times are of the machine's monotonic clock, in
seconds: all ends share it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import socket
import struct
import sys
import threading
import time
from typing import Any

from transport_engines import MooncakeSource, MooncakeTarget, NixlSource, NixlTarget
from transport_memory import LAYERS, PAGE, Memory

from sglang_pdd.keys import Keys
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import Abort, Chunk, Ping, Pong, Tokens
from sglang_pdd.transport import Endpoint
from sglang_pdd.wan.landing import Landed
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.sender import Sender
from sglang_pdd.wan.sockets import Tuning
from sglang_pdd.wan.tls import Identity

MARK = "@"  # begins what an end says; libraries may print, too
FRAME = 1 << 20
PATIENCE_S = 120.0
IDS = tuple(range(100))
BETWEEN_IDS_S = 0.005


def cpu() -> float:
    """Seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spin() -> None:
    """What a scheduler's thread does to the others: it holds the interpreter lock as long as it can."""
    while True:
        sum(range(1000))


# --- streams, ours and plain ------------------------------------------------------------------------------------


class Target:
    """Beside MD: takes streams, with and without TLS, and plain ones."""

    def __init__(self, host: str, mib: int, keys: str, congestion: str, **_: Any) -> None:
        self.memory = Memory(mib, content=False)
        tuning = Tuning(congestion=congestion)
        self.landed: dict[int, float] = {}
        common: dict[str, Any] = {"tuning": tuning, "landed": self._landed}
        self.receivers = {
            "stream": Receiver(self.memory.regions, Counters(), insecure=True, **common),
            "tls": Receiver(self.memory.regions, Counters(), identity=Identity(f"{keys}/md"), **common),
        }
        plain = socket.create_server((host, 0))
        threading.Thread(target=self._accept, args=(plain,), daemon=True).start()
        self.hello = {
            **{name: [receiver.listen(host), receiver.token.hex()] for name, receiver in self.receivers.items()},
            "plain": plain.getsockname(),
            "bases": self.memory.bases,
        }

    def _landed(self, landed: Landed) -> None:
        if landed.complete:
            self.landed[landed.room] = time.monotonic()

    def open(self, rooms: list[int]) -> None:
        """These may be written to."""
        for receiver, room in itertools.product(self.receivers.values(), rooms):
            receiver.open(room)

    def close(self, rooms: list[int]) -> list[float | None]:
        """They are over. When each has landed."""
        for receiver, room in itertools.product(self.receivers.values(), rooms):
            receiver.close(room)
        return [self.landed.pop(room, None) for room in rooms]

    def sums(self) -> list[int]:
        return self.memory.sums()

    def cpu(self) -> float:
        return cpu()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=self._sink, args=(sock,), daemon=True).start()

    @staticmethod
    def _sink(sock: socket.socket) -> None:
        buffer = memoryview(bytearray(FRAME))
        while head := sock.recv(8, socket.MSG_WAITALL):
            (left,) = struct.unpack("<Q", head)
            while left:
                left -= sock.recv_into(buffer[: min(left, FRAME)], 0, socket.MSG_WAITALL)
            sock.sendall(b"k")


class Source:
    """Beside P."""

    def __init__(self, mib: int, keys: str, congestion: str, streams: int, there: dict[str, Any], **_: Any) -> None:
        self.memory = Memory(mib, content=True)
        self.keys = keys
        self.congestion = congestion
        self.tuning = Tuning(congestion=congestion, streams=streams)
        self.there = there
        self.hello = None
        self.peers: dict[tuple[str, float | None], Any] = {}
        self.plain: dict[int, list[socket.socket]] = {}
        self.bulk: threading.Thread | None = None
        self.busy = threading.Event()

    def push_plain(self, streams: int) -> dict[str, Any]:
        """As many bytes as a push has, out of one contiguous buffer over so many TCP streams. Seconds until the other
        side has said that it has them."""
        if streams not in self.plain:
            self.plain[streams] = [socket.create_connection(tuple(self.there["plain"])) for _ in range(streams)]
            for sock in self.plain[streams]:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion.encode())
        share = len(self.memory.layers) * len(self.memory.layers[0]) // streams
        data = memoryview(bytearray(FRAME))

        def send(sock: socket.socket) -> None:
            sock.sendall(struct.pack("<Q", share))
            for at in range(0, share, FRAME):
                sock.sendall(data[: min(FRAME, share - at)])
            sock.recv(1)

        begun = time.monotonic()
        threads = [threading.Thread(target=send, args=(sock,)) for sock in self.plain[streams]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"s": time.monotonic() - begun}

    def push(self, kind: str, room: int, block: int) -> dict[str, Any]:
        """All memory, in blocks whose order the room's number gives. Seconds until its acknowledgement is here."""
        blocks = self.memory.blocks(self.there["bases"], room, block)
        peer = self._peer(kind)
        here, begun = cpu(), time.monotonic()
        ending = peer.submit(room, blocks, last=True).wait(PATIENCE_S)
        seconds = time.monotonic() - begun
        used = cpu() - here
        return {"s": seconds, "cpu_send": used, "ending": ending, "sums": self.memory.sums_after(room, block)}

    def saturate(self, rooms: list[int], size: int, rate: float | None) -> None:
        """Until `rest`: two transfers of ``size`` bytes are always on their way. ``rate``: bytes/s, None: no limit."""
        peer = self._peer("stream", rate)
        share = min(size // LAYERS, len(self.memory.layers[0]))
        blocks = [(near, far, share) for near, far in zip(self.memory.bases, self.there["bases"], strict=True)]
        self.busy.set()

        def work() -> None:
            ahead = []
            for room in rooms:
                ahead.append(peer.submit(room, blocks, last=True))
                if len(ahead) > 1:
                    ahead.pop(0).wait(PATIENCE_S)
                if not self.busy.is_set():
                    break
            for ticket in ahead:
                ticket.wait(PATIENCE_S)

        self.bulk = threading.Thread(target=work)
        self.bulk.start()

    def rest(self) -> bool:
        """End `saturate`, and wait for what is on its way. Had it enough rooms?"""
        assert self.bulk is not None
        enough = self.bulk.is_alive()
        self.busy.clear()
        self.bulk.join()
        return enough

    def trickle(self, rooms: list[int], pages: int, rate: float, every_s: float) -> list[float]:
        """One small transfer after another, of so many pages of all layers, at random distances. When each was
        submitted."""
        peer, rng, begun = self._peer("stream", rate), random.Random(rooms[0]), []
        tickets = []
        for room in rooms:
            time.sleep(rng.uniform(0.5, 1.5) * every_s)
            places = rng.sample(range(len(self.memory.layers[0]) // PAGE), pages)
            blocks = [
                (near + place * PAGE, far + place * PAGE, PAGE)
                for near, far in zip(self.memory.bases, self.there["bases"], strict=True)
                for place in places
            ]
            begun.append(time.monotonic())
            tickets.append(peer.submit(room, blocks, last=True))
        for ticket in tickets:
            ticket.wait(PATIENCE_S)
        return begun

    def _peer(self, kind: str, rate: float | None = None) -> Any:
        if (kind, rate) not in self.peers:
            identity = Identity(f"{self.keys}/p") if kind == "tls" else None
            sender = Sender("p", self.memory.regions, Counters(), identity=identity, tuning=self.tuning, rate=rate)
            (host, port), token = self.there[kind]
            self.peers[kind, rate] = sender.peer(kind, (host, port), bytes.fromhex(token), self.there["bases"])
        return self.peers[kind, rate]


# --- token ids: PDD's own endpoint and message ------------------------------------------------------------------


class Listener:
    """MD's endpoint."""

    def __init__(self, host: str, keys: str, **_: Any) -> None:
        hurry()
        mine = Keys.load(f"{keys}/md")
        self.endpoint = Endpoint("md", mine, Counters())
        self.hello = {"endpoint": self.endpoint.bind(f"tcp://{host}:0"), "key": mine.public}

    def listen(self) -> dict[int, float]:
        """When each message was decoded, until the last one."""
        arrived: dict[int, float] = {}
        while True:
            self.endpoint.poll(1000)
            for peer, message in self.endpoint.receive():
                now = time.monotonic()
                if isinstance(message, Tokens):
                    arrived.update({chunk.room: now for chunk in message.chunks})
                elif isinstance(message, Ping | Abort):
                    self.endpoint.send(peer, Pong())
                if isinstance(message, Abort):
                    return arrived


class Speaker:
    """RLD's endpoint."""

    def __init__(self, keys: str, there: dict[str, Any], **_: Any) -> None:
        hurry()
        self.endpoint = Endpoint("rld", Keys.load(f"{keys}/p"), Counters())
        self.peer = there["endpoint"]
        self.endpoint.dial(self.peer, there["key"])
        self.hello = None

    def speak(self, seconds: float) -> dict[int, float]:
        """A message of 100 ids each 5 ms. When each was sent."""
        self._ask(Ping())
        sent = {}
        end = time.monotonic() + seconds
        for index in itertools.count():
            sent[index] = time.monotonic()
            if sent[index] > end:
                del sent[index]
                break
            if not self.endpoint.send(self.peer, Tokens((Chunk(index, 0, IDS),), load=1)):
                raise SystemExit("the endpoint has dropped a message")
            time.sleep(BETWEEN_IDS_S)
        self._ask(Abort(0, "end"))
        return sent

    def _ask(self, question: Ping | Abort) -> None:
        self.endpoint.send(self.peer, question)
        end = time.monotonic() + PATIENCE_S
        while not self.endpoint.receive():
            if time.monotonic() > end:
                raise SystemExit("no answer from the other end")
            self.endpoint.poll(100)


def hurry() -> None:
    """Real-time priority where that is allowed, as the emulator has: what is measured is the network, not who of all
    that shares this machine's cores is next."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))


ROLES: dict[str, Any] = {
    "target": Target,
    "source": Source,
    "mooncake-target": MooncakeTarget,
    "mooncake-source": MooncakeSource,
    "nixl-target": NixlTarget,
    "nixl-source": NixlSource,
    "listener": Listener,
    "speaker": Speaker,
}


def main() -> None:
    setting = json.loads(sys.argv[2])
    if setting.get("busy"):
        threading.Thread(target=spin, daemon=True).start()
    end = ROLES[sys.argv[1]](**setting)
    print(MARK + json.dumps(end.hello), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(MARK + json.dumps(getattr(end, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
