"""The processes of bench_transport.py: both ends of the transport, and a listener and a speaker of small messages."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import zmq

from sglang_pdd.metrics import Counters
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.regions import Region, Regions
from sglang_pdd.wan.sender import Sender
from sglang_pdd.wan.sockets import Tuning
from sglang_pdd.wan.tls import Identity

LAYERS = 16
PLAIN = (1, 4, 8)  # streams
FRAME = 1 << 20
MESSAGE = b"x" * 570  # and a time stamp: about 100 token ids with logprobs


def pool(mib: int) -> list[bytearray]:
    size = (mib << 20) // LAYERS
    return [bytearray(random.Random(layer).randbytes(1 << 16) * (size >> 16)) for layer in range(LAYERS)]


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spin() -> None:
    """What a scheduler's thread does to the others: it holds the interpreter lock as long as it can."""
    while True:
        sum(range(1000))


# --- the receiving side -------------------------------------------------------------------------------------------


def serve(host: str, mib: int, folder: str, congestion: str) -> None:
    """Obeys commands, one JSON object a line."""
    memory = [bytearray(len(layer)) for layer in pool(mib)]
    regions = Regions(Region.of(layer, 4096) for layer in memory)
    tuning = Tuning(congestion=congestion)
    receiver = Receiver(regions, Counters(), insecure=True, tuning=tuning)
    secure = Receiver(regions, Counters(), identity=Identity(f"{folder}/md"), tuning=tuning)
    plain = socket.create_server((host, 0))
    threading.Thread(target=_plain_server, args=(plain, congestion), daemon=True).start()
    hello: dict[str, Any] = {
        "stream": [receiver.listen(host), receiver.token.hex()],
        "tls": [secure.listen(host), secure.token.hex()],
        "plain": plain.getsockname(),
        "bases": [region.address for region in regions.regions],
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any = None
        if command["do"] == "open":
            for room in command["rooms"]:
                receiver.open(room)
                secure.open(room)
        elif command["do"] == "close":
            answer = [zlib.crc32(layer) for layer in memory] if command["check"] else None
            for each in (receiver, secure):
                each.close(command["room"])
        elif command["do"] == "cpu":
            answer = cpu()
        print(json.dumps(answer), flush=True)


def _plain_server(listener: socket.socket, congestion: str) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_plain_sink, args=(sock,), daemon=True).start()


def _plain_sink(sock: socket.socket) -> None:
    buffer = memoryview(bytearray(FRAME))
    while head := sock.recv(8, socket.MSG_WAITALL):
        (left,) = struct.unpack("<Q", head)
        while left:
            left -= sock.recv_into(buffer[: min(left, FRAME)], 0, socket.MSG_WAITALL)
        sock.sendall(b"k")


# --- small messages, from and to processes of their own -----------------------------------------------------------


def listen(host: str) -> None:
    """One-way delays in ms, as JSON, when a last, empty message has come."""
    ids = zmq.Context().socket(zmq.PULL)
    print(ids.bind_to_random_port(f"tcp://{host}"), flush=True)
    delays = []
    while message := ids.recv():
        delays.append(1000 * (time.monotonic() - struct.unpack_from("<d", message)[0]))
    print(json.dumps(sorted(delays)), flush=True)


def speak(address: str, seconds: float) -> None:
    """A message each 5 ms."""
    ids = zmq.Context().socket(zmq.PUSH)
    ids.connect(f"tcp://{address}")
    time.sleep(0.3)
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        ids.send(struct.pack("<d", now) + MESSAGE)
        time.sleep(0.005)
    ids.send(b"")
    ids.close(5000)


# --- the sending side ---------------------------------------------------------------------------------------------


class Bench:
    """Runs beside P: commands to the receiving side go through the parent's pipes."""

    def __init__(self, args: argparse.Namespace, ask: Callable[..., Any], hello: dict[str, Any]) -> None:
        self.args, self.ask, self.hello = args, ask, hello
        self.memory = pool(args.mib)
        self.regions = Regions(Region.of(layer, 4096) for layer in self.memory)
        self.rooms = itertools.count(1)
        self.peers: dict[str, Any] = {}
        self.plain: dict[int, list[socket.socket]] = {}
        self.senders: list[Sender] = []

    def peer(self, kind: str, rate: float | None = None) -> Any:
        if kind not in self.peers:
            tuning = Tuning(congestion=self.args.congestion, streams=self.args.streams)
            identity = Identity(f"{self.args.folder}/p") if kind == "tls" else None
            sender = Sender("p", self.regions, Counters(), identity=identity, tuning=tuning, rate=rate)
            self.senders.append(sender)
            (host, port), token = self.hello["tls" if kind == "tls" else "stream"]
            self.peers[kind] = sender.peer(kind, (host, port), bytes.fromhex(token), self.hello["bases"])
        return self.peers[kind]

    def push_plain(self, streams: int) -> float:
        if streams not in self.plain:
            self.plain[streams] = [socket.create_connection(tuple(self.hello["plain"])) for _ in range(streams)]
            for sock in self.plain[streams]:
                sock.setsockopt(socket.IPPROTO_TCP, 13, self.args.congestion.encode())
        socks = self.plain[streams]
        share = (self.args.mib << 20) // streams
        data = memoryview(bytearray(FRAME))

        def send(sock: socket.socket) -> None:
            sock.sendall(struct.pack("<Q", share))
            for at in range(0, share, FRAME):
                sock.sendall(data[: min(FRAME, share - at)])
            sock.recv(1)

        begun = time.monotonic()
        threads = [threading.Thread(target=send, args=(sock,)) for sock in socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - begun

    def push(self, block: int, order: str, kind: str = "stream", check: bool = True) -> dict[str, float]:
        pages = len(self.memory[0]) // block
        rng = random.Random(block)
        source, target = list(range(pages)), list(range(pages))
        if order == "shuffled":
            rng.shuffle(source)
            rng.shuffle(target)
        length = block if order == "shuffled" else block * pages
        blocks = [
            (near.address + a * block, far + b * block, length)
            for near, far in zip(self.regions.regions, self.hello["bases"], strict=True)
            for a, b in zip(source, target, strict=True)
            if order == "shuffled" or a == 0
        ]
        room, peer = next(self.rooms), self.peer(kind)
        self.ask(do="open", rooms=[room])
        there, here, begun = self.ask(do="cpu"), cpu(), time.monotonic()
        ending = peer.submit(room, blocks, last=True).wait(120)
        seconds = time.monotonic() - begun
        result = {"s": seconds, "cpu_send": cpu() - here, "cpu_recv": self.ask(do="cpu") - there}
        got = self.ask(do="close", room=room, check=check)
        if ending != "landed" or (check and got != self._expected(block, source, target)):
            raise SystemExit(f"{kind}, blocks of {block}: {ending}, or the bytes differ")
        return result

    def _expected(self, block: int, source: list[int], target: list[int]) -> list[int]:
        place = dict(zip(target, source, strict=True))
        views = [memoryview(layer) for layer in self.memory]
        return [
            zlib.crc32(b"".join(view[place[b] * block : (place[b] + 1) * block] for b in range(len(place))))
            for view in views
        ]

    def latency(self) -> dict[str, float]:
        idle = self.ask(do="delays")
        self.ask(do="reset")
        peer = self.peer("paced", 0.9 * self.args.rate * 1e6 / 8)
        stop = threading.Event()

        near, far, size = self.regions.regions, self.hello["bases"], len(self.memory[0])
        blocks = [(near[i].address, far[i], size) for i in range(LAYERS)]
        rooms = [next(self.rooms) for _ in range(10_000)]
        self.ask(do="open", rooms=rooms)

        def saturate() -> None:
            for room in rooms:
                if stop.is_set():
                    return
                peer.submit(room, blocks, last=True).wait(120)

        thread = threading.Thread(target=saturate)
        thread.start()
        time.sleep(1.0)
        loaded = self.ask(do="delays")
        stop.set()
        thread.join()
        return {
            f"{name}_p{p}": values[min(len(values) - 1, len(values) * p // 100)]
            for name, values in (("idle", idle), ("loaded", loaded))
            for p in (50, 99)
        } | {"samples": len(loaded)}


def send(args: argparse.Namespace) -> None:
    """Runs in the sending namespace; the other side's pipes come as standard input and output of this process."""
    lock = threading.Lock()

    def ask(**command: Any) -> Any:
        with lock:
            print("ask " + json.dumps(command), flush=True)
            return json.loads(sys.stdin.readline())

    bench = Bench(args, ask, json.loads(sys.stdin.readline()))
    kinds: dict[str, Callable[[], Any]] = {
        f"plain {n}": lambda n=n: {"s": bench.push_plain(n)}
        for n in PLAIN  # type: ignore[misc]
    }
    for block, order in itertools.product(args.blocks, args.orders):
        kinds[f"{block >> 10}K {order}"] = lambda b=block, o=order: bench.push(b, o)  # type: ignore[misc]
    if args.tls:
        kinds["TLS 64K shuffled"] = lambda: bench.push(64 << 10, "shuffled", "tls")
    for kind in kinds.values():
        kind()  # opens its connections, and their windows
    results: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(args.reps):
        for name, kind in kinds.items():
            results[name].append(kind())
    latency = bench.latency() if args.latency else None
    for sender in bench.senders:
        sender.shutdown()
    print("done " + json.dumps({"results": results, "latency": latency}), flush=True)
