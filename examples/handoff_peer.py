"""One end of the emulated WAN, for `bench_handoff.py`: what runs inside a network namespace.

    python handoff_peer.py ROLE '{"setting": ...}'

Talks JSON lines: an end that receives prints where it listens, and what came when it is over; an end that sends reads
that place from its standard input, says that it is warm, waits for a line, and prints what it sent. Times are of the
machine's monotonic clock, in seconds: both ends share it.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zmq

from sglang_pdd.keys import Keys
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import Abort, Chunk, Ping, Pong, Tokens
from sglang_pdd.transport import Endpoint

Setting = Mapping[str, Any]
SO_MAX_PACING_RATE = 47  # not in Python's socket module
WARM_UPS = 3
PATIENCE_S = 30.0
GIVE_UP = 3  # failures in a row


def tell(**fields: Any) -> None:
    """One line to the other end's driver."""
    print(json.dumps(fields), flush=True)


def hear() -> dict[str, Any]:
    """One line from the driver."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit("the driver is gone")
    heard: dict[str, Any] = json.loads(line)
    return heard


def pause(rng: random.Random, setting: Setting) -> None:
    """Between two repetitions; of random length, so that they meet the queue in any state."""
    time.sleep(rng.uniform(0.5, 1.5) * setting["pause_ms"] / 1000)


# --- token ids: PDD's own endpoint and message ------------------------------------------------------------------


def ids_receive(setting: Setting) -> None:
    """MD's end: note when each message has been decoded."""
    keys = Keys.load(setting["keys"])
    endpoint = Endpoint("md", keys, Counters())
    tell(endpoint=endpoint.bind(f"tcp://{setting['host']}:0"), key=keys.public)
    arrived: dict[int, tuple[float, int]] = {}
    while True:
        endpoint.poll(1000)
        for peer, message in endpoint.receive():
            now = time.monotonic()
            if isinstance(message, Tokens):
                arrived.update({chunk.room: (now, len(chunk.ids)) for chunk in message.chunks})
            elif isinstance(message, Ping):
                endpoint.send(peer, Pong())
            elif isinstance(message, Abort):
                endpoint.send(peer, Pong())
                tell(arrived=[[room, at, count] for room, (at, count) in arrived.items()])
                endpoint.close()
                return


def ids_send(setting: Setting) -> None:
    """RLD's end: one ``Tokens`` message for each repetition."""
    there = hear()
    endpoint = Endpoint("rld", Keys.load(setting["keys"]), Counters())
    peer = there["endpoint"]
    endpoint.dial(peer, there["key"])
    rng = random.Random(setting["seed"])

    def send(room: int) -> float:
        ids = tuple(rng.randrange(150_000) for _ in range(setting["tokens"]))
        started = time.monotonic()
        if not endpoint.send(peer, Tokens((Chunk(room, 0, ids),), load=1)):
            raise SystemExit("the endpoint has dropped a message")
        return started

    def answered(question: Ping | Abort) -> None:
        endpoint.send(peer, question)
        end = time.monotonic() + PATIENCE_S
        while not endpoint.receive():
            if time.monotonic() > end:
                raise SystemExit("no answer from the other end")
            endpoint.poll(100)

    answered(Ping())
    for index in range(WARM_UPS):
        send(setting["repeat"] + index)
        pause(rng, setting)
    answered(Ping())
    tell(warm=True)
    hear()
    sent = []
    for room in range(setting["repeat"]):
        pause(rng, setting)
        sent.append([room, send(room)])
    answered(Abort(0, "end"))
    tell(sent=sent)
    endpoint.close()


# --- KV: Mooncake's transfer engine -----------------------------------------------------------------------------


class Pool:
    """KV memory of one side: ``regions`` buffers (of each layer K and V), each of ``pages`` pages."""

    def __init__(self, engine: Any, setting: Setting) -> None:
        shape = setting["regions"], setting["pool_pages"], setting["page_bytes"]
        self.memory = np.zeros(shape, dtype=np.uint8)
        self.addresses = [int(region.ctypes.data) for region in self.memory]
        for address, region in zip(self.addresses, self.memory, strict=True):
            if engine.register_memory(address, region.nbytes) != 0:
                raise SystemExit("Mooncake cannot register memory")


def _engine(host: str) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("Mooncake does not start")
    return engine


def kv_receive(setting: Setting) -> None:
    """MD's end: note when the status message says that the KV has landed, and check that it has."""
    engine = _engine(setting["host"])
    pool = Pool(engine, setting)
    status = zmq.Context().socket(zmq.PAIR)
    port = status.bind_to_random_port(f"tcp://{setting['host']}")
    session = f"{setting['host']}:{engine.get_rpc_port()}"
    tell(session=session, addresses=pool.addresses, status=f"tcp://{setting['host']}:{port}")
    arrived = []
    while (index := int(status.recv())) >= 0:
        now = time.monotonic()
        landed = pool.memory[:, setting["target_pages"], :: setting["page_bytes"] - 1]
        arrived.append([index, now, bool((landed == _stamp(index)).all())])
        status.send(b"checked")
    tell(arrived=arrived)


def kv_send(setting: Setting) -> None:
    """The sender's end: what SGLang's transfer worker does, a batch of blocks and then a status message over ZMQ."""
    there = hear()
    engine = _engine(setting["host"])
    pool = Pool(engine, setting)
    status = zmq.Context().socket(zmq.PAIR)
    status.linger = int(PATIENCE_S * 1000)
    status.connect(there["status"])
    blocks = [tuple(block) for block in setting["blocks"]]  # region, source offset, target offset, bytes
    sources = [pool.addresses[region] + offset for region, offset, _, _ in blocks]
    targets = [there["addresses"][region] + offset for region, _, offset, _ in blocks]
    lengths = [length for *_, length in blocks]
    rng = random.Random(setting["seed"])

    def send(index: int) -> list[Any]:
        pool.memory[:] = _stamp(index)
        started = time.monotonic()
        result = engine.batch_transfer_sync_write(there["session"], sources, targets, lengths)
        returned = time.monotonic()
        if result == 0:
            status.send(str(index).encode())
            status.recv()  # nothing may be overwritten before it was checked
        return [index, started, returned - started, int(result)]

    for index in range(WARM_UPS):
        send(setting["repeat"] + index)
    tell(warm=True)
    hear()
    sent = []
    for index in range(setting["repeat"]):
        pause(rng, setting)
        sent.append(send(index))
        tell(done=index + 1)
        if all(entry[-1] != 0 for entry in sent[-GIVE_UP:]) and len(sent) >= GIVE_UP:
            break  # each takes a time-out
    status.send(b"-1")
    tell(sent=sent)
    status.close()  # lingers until all is out
    status.context.term()


def _stamp(index: int) -> int:
    return index % 255 + 1


# --- bulk traffic -----------------------------------------------------------------------------------------------


def bulk_receive(setting: Setting) -> None:
    """Swallow whatever comes, until ended."""
    listener = socket.create_server((setting["host"], 0))
    tell(port=listener.getsockname()[1])

    def swallow(connection: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        while connection.recv_into(buffer):
            pass

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=swallow, args=(connection,), daemon=True).start()


def bulk_send(setting: Setting) -> None:
    """Send on several TCP streams without a pause, until ended. ``pace``: bytes/s of each; null: as fast as it goes."""
    there = hear()

    def pump() -> None:
        with socket.create_connection((setting["to"], there["port"])) as stream:
            if setting["pace"]:
                stream.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", int(setting["pace"])))
            block = memoryview(bytes(1 << 20))
            while True:
                stream.sendall(block)

    for _ in range(setting["streams"]):
        threading.Thread(target=pump, daemon=True).start()
    tell(warm=True)
    hear()


ROLES: dict[str, Callable[[Setting], None]] = {
    "ids-receive": ids_receive,
    "ids-send": ids_send,
    "kv-receive": kv_receive,
    "kv-send": kv_send,
    "bulk-receive": bulk_receive,
    "bulk-send": bulk_send,
}


if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
