"""Goodput of the WAN streams on an emulated link, beside plain TCP streams on the same link. Needs root.

    python examples/bench_transport.py --rates 1000,4000 --rtts 10,20,40 --losses 0,0.001

Each push moves the same bytes from one namespace to the other: with 1, 4 and 8 plain TCP streams out of contiguous
memory, and with the transport for each block size, contiguous and shuffled. Kinds take turns; medians are printed, with
the best plain median as 1. With --latency, what a small message suffers beside a push paced to 90 % of the link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from sglang_pdd import keys
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
    ids = zmq.Context().socket(zmq.PULL)
    port = ids.bind_to_random_port(f"tcp://{host}")
    delays: list[float] = []
    threading.Thread(target=_listen, args=(ids, delays), daemon=True).start()
    hello: dict[str, Any] = {
        "stream": [receiver.listen(host), receiver.token.hex()],
        "tls": [secure.listen(host), secure.token.hex()],
        "plain": plain.getsockname(),
        "ids": port,
        "bases": [region.address for region in regions.regions],
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any = None
        if command["do"] == "open":
            receiver.open(command["room"])
            secure.open(command["room"])
        elif command["do"] == "close":
            answer = [zlib.crc32(layer) for layer in memory] if command["check"] else None
            for each in (receiver, secure):
                each.close(command["room"])
        elif command["do"] == "cpu":
            answer = cpu()
        elif command["do"] == "delays":
            answer, delays[:] = list(delays), []
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


def _listen(ids: zmq.Socket[bytes], delays: list[float]) -> None:
    while True:
        (sent,) = struct.unpack_from("<d", ids.recv())
        delays.append(time.monotonic() - sent)


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
        self.ask(do="open", room=room)
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

    def delays(self, seconds: float) -> list[float]:
        """One-way delays in ms of a message each 5 ms."""
        ids = zmq.Context.instance().socket(zmq.PUSH)
        ids.connect(f"tcp://{self.hello['plain'][0]}:{self.hello['ids']}")
        time.sleep(0.3)
        self.ask(do="delays")
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            ids.send(struct.pack("<d", now) + MESSAGE)
            time.sleep(0.005)
        time.sleep(0.5)
        ids.close(0)
        return sorted(1000 * each for each in self.ask(do="delays"))

    def latency(self) -> dict[str, float]:
        idle = self.delays(self.args.latency_s)
        peer = self.peer("paced", 0.9 * self.args.rate * 1e6 / 8)
        stop = threading.Event()

        def saturate() -> None:
            near, far, size = self.regions.regions, self.hello["bases"], len(self.memory[0])
            while not stop.is_set():
                room = next(self.rooms)
                self.ask(do="open", room=room)
                peer.submit(room, [(near[i].address, far[i], size) for i in range(LAYERS)], last=True).wait(120)
                self.ask(do="close", room=room, check=False)

        thread = threading.Thread(target=saturate)
        thread.start()
        time.sleep(1.0)
        loaded = self.delays(self.args.latency_s)
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
    print("ask " + json.dumps({"do": "link"}), flush=True)
    json.loads(sys.stdin.readline())
    latency = bench.latency() if args.latency else None
    for sender in bench.senders:
        sender.shutdown()
    print("done " + json.dumps({"results": results, "latency": latency}), flush=True)


# --- the parent ---------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, rate: float, rtt: float, loss: float) -> dict[str, Any]:
    from wan import Wan

    me = [sys.executable, os.path.abspath(__file__)]
    common = ["--mib", str(args.mib), "--folder", args.folder, "--congestion", args.congestion]
    common += ["--busy"] if args.busy else []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Wan(rate_mbps=rate, delay_ms=rtt / 2, queue_kb=4096 * max(1, rate / 1000)) as wan:
        wan.set("ab", loss=loss, jitter_ms=args.jitter)
        server = wan.start("b", [*me, "--serve", wan.address("b"), *common], **pipes)
        hello = server.stdout.readline()
        here = ["--send", "--rate", str(rate), "--blocks", ",".join(map(str, args.blocks)), "--reps", str(args.reps)]
        here += ["--orders", ",".join(args.orders), "--streams", str(args.streams)]
        here += [f"--{flag}" for flag in ("tls", "latency") if getattr(args, flag)]
        client = wan.start("a", [*me, *here, *common], **pipes)
        client.stdin.write(hello)
        client.stdin.flush()
        for line in client.stdout:
            word, _, rest = line.partition(" ")
            if word == "done":
                return {**json.loads(rest), "link": wan.stats()["ab"]}
            if json.loads(rest)["do"] == "link":
                wan.reset()
            server.stdin.write(rest)
            server.stdin.flush()
            client.stdin.write(server.stdout.readline())
            client.stdin.flush()
    raise SystemExit("the sending side has ended early")


def report(measured: dict[str, Any], mib: int) -> None:
    medians = {name: statistics.median(run["s"] for run in runs) for name, runs in measured["results"].items()}
    best = min(seconds for name, seconds in medians.items() if name.startswith("plain"))
    for name, seconds in medians.items():
        runs = measured["results"][name]
        line = f"  {name:<18} {seconds:7.3f} s  {mib * 8.388608 / seconds:7.0f} Mbit/s  {best / seconds:5.2f}"
        if "cpu_send" in runs[0]:
            scale = 128 / mib
            used = [statistics.median(run[side] for run in runs) * scale for side in ("cpu_send", "cpu_recv")]
            line += f"   CPU for 128 MiB: {used[0]:.2f} + {used[1]:.2f} s"
        print(line)
    if measured["latency"]:
        print("  messages, ms:", "  ".join(f"{name} {value:.2f}" for name, value in measured["latency"].items()))
        link = measured["link"]  # says whether the machine was quiet enough
        print(f"  the emulator, at most: {link['qmax_kb']} KB queued, {link['late_max_us'] / 1000:.1f} ms late")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    numbers = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--rates", type=numbers, default=[1000.0, 4000.0], help="Mbit/s")
    parser.add_argument("--rtts", type=numbers, default=[10.0, 20.0, 40.0], help="ms")
    parser.add_argument("--losses", type=numbers, default=[0.0, 0.001])
    parser.add_argument("--jitter", type=float, default=0.0, help="ms")
    parser.add_argument("--blocks", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--orders", type=lambda text: text.split(","), default=["shuffled", "contiguous"])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--congestion", default="bbr", help="of plain streams, too")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--busy", action="store_true", help="another Python thread is always running on both sides")
    parser.add_argument("--latency-s", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("out/bench_transport.json"))
    for hidden in ("--serve", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.blocks = args.blocks or [4 << 10, 16 << 10, 64 << 10, 256 << 10]
    if args.busy and (args.serve or args.send):
        threading.Thread(target=spin, daemon=True).start()
    if args.serve:
        return serve(args.serve, args.mib, args.folder, args.congestion)
    if args.send:
        return send(args)
    import tempfile

    from wan import obstacle

    if reason := obstacle():
        raise SystemExit(f"no emulated WAN: {reason}")
    everything = []
    with tempfile.TemporaryDirectory() as folder:
        keys.make(folder, ["p", "md"])
        args.folder = folder
        for rate, rtt, loss in itertools.product(args.rates, args.rtts, args.losses):
            print(f"{rate:g} Mbit/s, {rtt:g} ms, loss {loss:g}, {args.congestion}, {args.mib} MiB", flush=True)
            measured = measure(args, rate, rtt, loss)
            report(measured, args.mib)
            everything.append({"rate_mbps": rate, "rtt_ms": rtt, "loss": loss, **measured})
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text(json.dumps({"congestion": args.congestion, "mib": args.mib, "runs": everything}))


if __name__ == "__main__":
    main()
