"""Sender and receiver over loopback sockets: what lands, what never does, and what happens when a connection breaks."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_pdd import keys
from sglang_pdd.keys import KeysError
from sglang_pdd.metrics import Counters
from sglang_pdd.wan import frames
from sglang_pdd.wan.frames import SOUND, SPOILT, Ack, Cancel, Cancelled, Data, Hello, Ping, Pong, Reject, Welcome
from sglang_pdd.wan.landing import Landed
from sglang_pdd.wan.peer import Peer
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.regions import BoundsError, Region, Regions
from sglang_pdd.wan.sender import Sender
from sglang_pdd.wan.sockets import Tuning, connect
from sglang_pdd.wan.stream import Stream
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


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def pair(**options: object) -> Pair:
        pairs.append(Pair(**options))  # type: ignore[arg-type]
        return pairs[-1]

    before = threading.active_count()
    yield pair
    for each in pairs:
        each.close()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("pdd-stream")])
    assert threading.active_count() <= before + 50


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("keys")
    keys.make(folder, ["p", "md"])
    keys.make(folder / "other", ["p", "md"])
    return folder


def shuffled(n: int, seed: int = 0) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    total = SIZE // PAGE
    return list(zip(rng.sample(range(total), n), rng.sample(range(total), n), strict=True))


# --- what lands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
def test_a_fragmented_pool(make: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make(identities=identities)
    pages = shuffled(700)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages(pages), last=True).wait(LONG) == "landed"
    pair.check(pages)
    assert pair.peer.settled(1)
    spans = pair.receiver.landed(1)
    assert list(spans.values()) == [[(0, 700 * PAGE * LAYERS)]]
    assert [each.complete for each in pair.landed].count(True) == 1 and pair.landed[-1].complete
    assert pair.counters.get("wan.landings") == 1


def test_random_blocks(make: Callable[..., Pair]) -> None:
    pair = make()
    rng = random.Random(1)
    expected = [bytearray(SIZE) for _ in range(LAYERS)]
    cuts = sorted(rng.sample(range(1, SIZE), 300))
    blocks = []
    for start, stop in itertools.pairwise(cuts):
        layer, length = rng.randrange(LAYERS), rng.randint(1, stop - start)
        source_layer, source = rng.randrange(LAYERS), rng.randrange(SIZE - length)
        expected[layer][start : start + length] = pair.near[source_layer][source : source + length]
        near, far = pair.sources.regions[source_layer], pair.targets.regions[layer]
        blocks.append((near.address + source, far.address + start, length))
    rng.shuffle(blocks)
    pair.receiver.open(1)
    assert pair.peer.submit(1, blocks).wait(LONG) == "landed"
    assert pair.far == expected


def test_many_rooms_at_once_in_parts(make: Callable[..., Pair]) -> None:
    pair = make()
    pages = shuffled(900)
    tickets = []
    for room in range(30):
        pair.receiver.open(room)
        pair.peer.open(room, 30 * PAGE * LAYERS)
        for part in range(3):
            chunk = pages[room * 30 + part * 10 : room * 30 + part * 10 + 10]
            tickets.append(pair.peer.submit(room, pair.pages(chunk), last=part == 2))
    assert [ticket.wait(LONG) for ticket in tickets] == ["landed"] * 90
    pair.check(pages)
    assert sorted(each.room for each in pair.landed if each.complete) == list(range(30))
    assert pair.counters.get("wan.landings") == 30
    assert pair.peer.submit(3, pair.pages(pages[:1])).wait(1) == "failed"  # its parts would be numbered anew


def test_rooms_from_many_threads(make: Callable[..., Pair]) -> None:
    pair = make()
    pages = shuffled(400)
    endings: list[str | None] = []

    def send(first: int) -> None:
        for room in range(first, first + 10):
            pair.receiver.open(room)
            ticket = pair.peer.submit(room, pair.pages(pages[room * 10 : room * 10 + 10]), last=True)
            endings.append(ticket.wait(LONG))

    threads = [threading.Thread(target=send, args=(first,)) for first in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert endings == ["landed"] * 40
    pair.check(pages)


def test_a_slice_of_each_page(make: Callable[..., Pair]) -> None:
    """Ranks of different number: half of the heads of each token."""
    pair = make()
    blocks = [
        (near.address + token * 512, far.address + (999 - token) * 1024 + 512, 512)
        for near, far in zip(pair.sources.regions, pair.targets.regions, strict=True)
        for token in range(1000)
    ]
    pair.receiver.open(1)
    assert pair.peer.submit(1, blocks, last=True).wait(LONG) == "landed"
    for near, far in zip(pair.near, pair.far, strict=True):
        for token in (0, 1, 500, 999):
            at = (999 - token) * 1024
            assert far[at + 512 : at + 1024] == near[token * 512 : token * 512 + 512]
            assert far[at : at + 512] == bytes(512)


def test_landed_pages_come_in_order_while_the_rest_is_on_its_way(make: Callable[..., Pair]) -> None:
    pair = make(rate=8e6)
    pages = shuffled(1000)
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(pages), last=True)
    wait_for(lambda: len(pair.landed) >= 12)
    ((start, stop),) = next(iter(pair.receiver.landed(1).values()))[:1]
    assert start == 0 and ticket.ending is None
    for a, b in pages[: stop // (PAGE * LAYERS)]:
        assert all(
            far[b * PAGE : b * PAGE + PAGE] == near[a * PAGE : a * PAGE + PAGE]
            for near, far in zip(pair.near, pair.far, strict=True)
        )


def test_addresses_outside_of_the_regions_are_not_submitted(make: Callable[..., Pair]) -> None:
    pair = make()
    near, far = pair.sources.regions[0], pair.targets.regions[0]
    for block in ((near.address - 1, far.address, 8), (near.address, far.address + SIZE - 4, 8)):
        with pytest.raises(BoundsError):
            pair.peer.submit(1, [block])


def test_a_room_that_is_not_open_is_refused(make: Callable[..., Pair]) -> None:
    pair = make()
    ticket = pair.peer.submit(5, pair.pages(shuffled(500)), last=True)
    assert ticket.wait(LONG) == "refused"
    pair.check([])
    assert pair.receiver_counters.get("stream.skipped", cause="closed") > 0


class Device(Regions):
    """Memory that cannot be read or written in place: all goes through staging of the calling thread."""

    def __init__(self, regions: list[Region]) -> None:
        super().__init__(regions)
        self._staging = threading.local()
        self.broken = False

    def _stage(self, *blocks: Sequence[int]) -> memoryview:
        if self.broken:
            raise RuntimeError("the device has gone")
        views = super().read(*blocks)
        if not hasattr(self._staging, "memory"):
            self._staging.memory = bytearray(2 << 20)
        self._staging.views = views
        return memoryview(self._staging.memory)[: sum(map(len, views))]

    def read(self, *blocks: Sequence[int]) -> list[memoryview]:
        staging = self._stage(*blocks)
        staging[:] = b"".join(self._staging.views)
        return [staging]

    def write(self, *blocks: Sequence[int]) -> list[memoryview]:
        return [self._stage(*blocks)]

    def written(self, *blocks: Sequence[int]) -> None:
        at = 0
        for view in self._staging.views:
            view[:] = self._staging.memory[at : at + len(view)]
            at += len(view)


@pytest.mark.parametrize("tls", [False, True])
def test_memory_behind_staging(make: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make(identities=identities, memory=Device)
    pages = shuffled(700)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages(pages), last=True).wait(LONG) == "landed"
    pair.check(pages)


@pytest.mark.parametrize("side", ["sources", "targets"])
def test_memory_that_breaks_fails_the_transfer(make: Callable[..., Pair], side: str) -> None:
    pair = make(memory=Device)
    getattr(pair, side).broken = True
    for room in (1, 2):
        pair.receiver.open(room)
    ticket = pair.peer.submit(1, pair.pages(shuffled(10)), last=True)
    assert ticket.wait(LONG) == "failed" and "in vain" in ticket.reason
    getattr(pair, side).broken = False
    assert pair.peer.submit(2, pair.pages([(1, 1)])).wait(LONG) == "landed"


# --- what never does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
def test_after_a_cancellation_nothing_is_written(make: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make(identities=identities, rate=16e6)
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: len(pair.landed) >= 3)
    before = time.monotonic()
    pair.peer.cancel(1)
    assert ticket.wait(LONG) == "cancelled"
    assert time.monotonic() - before < 0.5
    pair.scribble()
    assert pair.peer.settled(1)
    pair.assert_scribbled()
    assert pair.peer.submit(1, pair.pages([(0, 0)])).wait(1) == "failed"
    pair.receiver.open(2)
    assert pair.peer.submit(2, pair.pages([(1, 1)])).wait(LONG) == "landed"


def test_pages_that_are_used_again_at_once_have_not_landed(make: Callable[..., Pair]) -> None:
    """The sender's owner puts something else into its pages when the room is cancelled, in the midst of a frame."""
    pair = make(relayed=True, tuning=replace(QUICK, streams=1, unsent=64 << 10))
    assert pair.relay is not None
    pages = shuffled(1000)
    for room in range(5):
        pair.receiver.open(room)
        before, landed = [bytes(layer) for layer in pair.near], len(pair.landed)
        ticket = pair.peer.submit(room, pair.pages(pages), last=True)
        wait_for(lambda: len(pair.landed) > landed + 2)  # noqa: B023
        pair.relay.hold(True)
        time.sleep(0.05)  # the next frame has begun, there and here
        pair.peer.cancel(room)
        for layer in pair.near:
            layer[:] = os.urandom(SIZE)
        pair.relay.hold(False)
        assert ticket.wait(LONG) == "cancelled"
        (whole,) = pair.receiver.pages(room).values()
        assert 0 < whole < len(pages)
        for near, far in pages[:whole]:
            for old, new in zip(before, pair.far, strict=True):
                assert old[near * PAGE : (near + 1) * PAGE] == new[far * PAGE : (far + 1) * PAGE]


def test_a_closed_room_is_quiet_at_once(make: Callable[..., Pair]) -> None:
    """The receiver's owner needs no word from the sender to use its pages again."""
    pair = make(rate=16e6)
    for attempt in range(5):
        pair.receiver.open(attempt)
        ticket = pair.peer.submit(attempt, pair.pages(shuffled(1000)), last=True)
        wait_for(lambda: pair.landed and pair.landed[-1].room == attempt)  # noqa: B023
        if not pair.receiver.close(attempt):
            assert pair.receiver.wait_quiet(attempt, 1.0)
        pair.scribble()
        pair.assert_scribbled(0.1)
        assert ticket.wait(LONG) == "refused"


def test_a_room_is_quiet_soon_even_if_its_sender_hangs(make: Callable[..., Pair]) -> None:
    pair = make(relayed=True, tuning=replace(QUICK, progress_s=5.0, streams=1))
    pair.receiver.open(1)
    pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    assert pair.relay is not None
    pair.relay.hold(True)  # most likely in the middle of a frame
    pair.receiver.close(1)
    assert pair.receiver.wait_quiet(1, 1.0)
    pair.scribble()
    pair.relay.hold(False)
    pair.assert_scribbled()


def test_a_cancellation_before_anything_was_sent(make: Callable[..., Pair]) -> None:
    pair = make(rate=1e6)
    for room in (1, 2):
        pair.receiver.open(room)
    pair.peer.submit(1, pair.pages(shuffled(10)), last=True)
    ticket = pair.peer.submit(2, pair.pages(shuffled(1000)), last=True)
    pair.peer.cancel(2)
    assert ticket.wait(1) == "cancelled"
    pair.peer.cancel(3)  # before it was submitted
    assert pair.peer.submit(3, pair.pages([(1, 1)])).wait(1) == "failed"


def test_a_room_that_is_opened_again_begins_anew(make: Callable[..., Pair]) -> None:
    pair = make()
    for life in range(3):
        pair.scribble()
        pair.receiver.open(1)
        assert pair.receiver.pages(1) == {}
        pair.peer.open(1)
        if life == 1:
            pair.peer.cancel(1)
            continue
        pages = shuffled(20, life)
        tickets = [pair.peer.submit(1, pair.pages(pages[:10])), pair.peer.submit(1, pair.pages(pages[10:]), last=True)]
        assert [ticket.wait(LONG) for ticket in tickets] == ["landed", "landed"]
        assert list(pair.receiver.pages(1).values()) == [20]
        assert pair.receiver.close(1)


def test_a_sender_hears_of_each_frame(make: Callable[..., Pair]) -> None:
    pair = make()
    heard: list[tuple[int, int, float]] = []
    pair.sender.landed = lambda *what: heard.append(what)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages(shuffled(500)), last=True).wait(LONG) == "landed"
    wait_for(lambda: sum(size for _, size, _ in heard) == 500 * LAYERS * PAGE)
    assert {room for room, _, _ in heard} == {1} and all(0 < seconds < LONG for _, _, seconds in heard)


def test_a_small_room_does_not_wait_for_what_streams_hold(make: Callable[..., Pair]) -> None:
    pair = make(rate=20e6, tuning=replace(QUICK, streams=2))
    for room in (1, 2):
        pair.receiver.open(room)
    large = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    small = pair.peer.submit(2, pair.pages(shuffled(4, seed=1)), last=True)
    assert small.wait(LONG) == "landed" and large.ending is None
    assert large.wait(LONG) == "landed"


def test_a_slow_link_has_fewer_streams() -> None:
    assert [Tuning().fewer(mbit * 125_000).streams for mbit in (1, 30, 100, 200, 1000)] == [2, 2, 4, 8, 8]


# --- what breaks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
def test_a_broken_transfer_is_resumed(make: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make(identities=identities, relayed=True, rate=16e6)
    assert pair.relay is not None
    pages = shuffled(1000)
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(pages), last=True)
    for n in (3, 12, 24):
        wait_for(lambda: len(pair.landed) >= n)  # noqa: B023
        pair.relay.cut()
    assert ticket.wait(LONG) == "landed"
    pair.check(pages)
    snapshot = pair.counters.snapshot()
    assert sum(n for name, n in snapshot.items() if name.startswith("stream.reconnects")) >= 3
    assert sum(n for name, n in snapshot.items() if name.startswith("stream.retransmitted")) >= 1
    assert sum(each.stop - each.start for each in pair.landed) == 1000 * PAGE * LAYERS  # each byte was written once


def test_a_connection_without_progress_is_made_anew(make: Callable[..., Pair]) -> None:
    pair = make(relayed=True, tuning=replace(QUICK, progress_s=0.4))
    assert pair.relay is not None
    pages = shuffled(1000)
    pair.receiver.open(1)
    wait_for(lambda: pair.peer.any_up)
    pair.relay.hold(True)
    ticket = pair.peer.submit(1, pair.pages(pages), last=True)
    assert ticket.wait(0.2) is None
    wait_for(lambda: any(name.startswith("stream.reconnects") for name in pair.counters.snapshot()))
    pair.relay.cut()
    pair.relay.hold(False)
    assert ticket.wait(LONG) == "landed"
    pair.check(pages)


def test_an_unreachable_peer_fails_its_transfers_and_recovers(make: Callable[..., Pair]) -> None:
    pair = make(relayed=True, rate=8e6, tuning=replace(QUICK, give_up_s=0.5))
    assert pair.relay is not None
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    pair.relay.refusing = True
    pair.relay.cut()
    assert ticket.wait(LONG) == "failed" and "cannot be reached" in ticket.reason
    pair.relay.refusing = False
    pair.receiver.close(1)
    pair.scribble()
    pair.receiver.open(2)
    wait_for(lambda: pair.peer.any_up)
    assert pair.peer.submit(2, pair.pages([(1, 1)]), last=True).wait(LONG) == "landed"
    assert pair.far[0][PAGE : 2 * PAGE] == pair.near[0][PAGE : 2 * PAGE]


def test_a_cancellation_survives_a_broken_connection(make: Callable[..., Pair]) -> None:
    pair = make(relayed=True, rate=8e6)
    assert pair.relay is not None
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    pair.relay.hold(True)
    pair.peer.cancel(1)
    pair.relay.cut()
    pair.relay.hold(False)
    assert ticket.wait(LONG) == "cancelled"
    pair.scribble()
    pair.assert_scribbled()


def test_a_receiver_that_dies_and_another_life(make: Callable[..., Pair]) -> None:
    pair = make(rate=8e6, tuning=replace(QUICK, give_up_s=0.5))
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    pair.receiver.shutdown()
    pair.scribble()
    assert ticket.wait(LONG) == "failed"
    pair.assert_scribbled(0.1)
    old, pair.receiver = pair.peer, Receiver(pair.targets, Counters(), tuning=QUICK)
    pair.address = pair.receiver.listen("127.0.0.1")
    assert pair.connect() is not old
    pair.receiver.open(1)
    assert pair.connect().submit(1, pair.pages([(3, 3)])).wait(LONG) == "landed"


def test_dropping_a_peer_ends_its_tickets(make: Callable[..., Pair]) -> None:
    pair = make(rate=1e6)
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    pair.sender.drop("md")
    assert ticket.wait(0) == "failed"
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(0) == "failed"


def test_idle_streams_stay(make: Callable[..., Pair]) -> None:
    pair = make(tuning=replace(QUICK, idle_s=0.1))
    wait_for(lambda: pair.peer.any_up)
    time.sleep(0.7)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "landed"
    assert not [name for name in pair.counters.snapshot() if "reconnects" in name]


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_pages_are_whole_or_untouched(make: Callable[..., Pair], seed: int) -> None:
    """Rooms with pages of their own, while connections break and hang and rooms are cancelled and closed at random."""
    pair = make(relayed=True, rate=40e6, tuning=replace(QUICK, progress_s=1.0))
    assert pair.relay is not None
    rng = random.Random(seed)
    rooms, each = 24, 40
    sources = rng.sample(range(SIZE // PAGE), rooms * each)
    targets = rng.sample(range(SIZE // PAGE), rooms * each)
    pages = [list(zip(sources[r * each :][:each], targets[r * each :][:each], strict=True)) for r in range(rooms)]
    tickets, closed = {}, set()

    def scribble(room: int) -> None:
        assert pair.receiver.wait_quiet(room)
        scribble_all(pair, pages[room])
        closed.add(room)

    for room in range(rooms):
        pair.receiver.open(room)
        tickets[room] = pair.peer.submit(room, pair.pages(pages[room]), last=True)
        time.sleep(rng.random() * 0.03)
        victim, dice = rng.randrange(room + 1), rng.random()
        if dice < 0.2:
            pair.relay.cut()
        elif dice < 0.3:
            pair.relay.hold(True)
            time.sleep(0.05)
            pair.relay.hold(False)
        elif dice < 0.5:
            pair.peer.cancel(victim)
        elif dice < 0.7 and tickets[victim].ending is None:
            pair.receiver.close(victim)
            scribble(victim)
    for room, ticket in tickets.items():
        ending = ticket.wait(LONG)
        assert ending in ("landed", "cancelled", "refused")
        if ending == "cancelled" and room not in closed:
            scribble_all(pair, pages[room])  # the acknowledgement alone must do
            closed.add(room)
    time.sleep(0.2)
    for room in range(rooms):
        for near, far in zip(pair.near, pair.far, strict=True):
            for a, b in pages[room]:
                wanted = b"\xee" * PAGE if room in closed else near[a * PAGE : (a + 1) * PAGE]
                assert far[b * PAGE : (b + 1) * PAGE] == wanted


def scribble_all(pair: Pair, pages: list[tuple[int, int]]) -> None:
    for far in pair.far:
        for _, b in pages:
            far[b * PAGE : (b + 1) * PAGE] = b"\xee" * PAGE


# --- strangers ----------------------------------------------------------------------------------------------------


def dial(pair: Pair, token: bytes | None = None, session: int = 9, stream: int = 0) -> Stream:
    raw = connect(pair.address, QUICK, None)
    raw.blocking(2.0)
    raw.write(frames.encode(Hello("x", pair.receiver.token if token is None else token, session, stream)))
    return raw


def answer(raw: Stream) -> frames.Frame:
    return raw.read_frame((Welcome, Reject, Ack, Cancelled, Pong))


def one_page(room: int = 1, region: int = 0, offset: int = 0, size: int = PAGE) -> bytes:
    return frames.encode(Data(room, 0, 0, 0, size, size, (region,), (offset,), (size,)))


def test_a_duplicate_is_acknowledged_and_not_written(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.receiver.open(1)
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    for payload in (b"a", b"b"):
        raw.write(one_page() + payload * PAGE + SOUND)
        assert answer(raw) == Ack(1, 0, 0, PAGE, "landed")
        assert pair.far[0][:PAGE] == b"a" * PAGE
    assert pair.receiver_counters.get("stream.skipped", cause="duplicate") == 1
    raw.write(frames.encode(Ping()))
    assert answer(raw) == Pong()
    raw.write(frames.encode(Cancel(1)) + one_page(size=8) + b"c" * 8 + SOUND)
    assert answer(raw) == Cancelled(1) and answer(raw) == Ack(1, 0, 0, 8, "discarded")
    raw.close()


def test_a_spoilt_payload_has_not_landed(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.receiver.open(1)
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    raw.write(one_page() + b"a" * PAGE + SPOILT)
    assert answer(raw) == Ack(1, 0, 0, PAGE, "discarded")
    assert not pair.landed and set(pair.receiver.pages(1).values()) <= {0}
    raw.write(one_page() + b"b" * PAGE + SOUND)
    assert answer(raw) == Ack(1, 0, 0, PAGE, "landed") and pair.far[0][:PAGE] == b"b" * PAGE
    raw.close()


def test_the_same_frame_on_another_stream_takes_over(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.receiver.open(1)
    first, second = dial(pair, stream=0), dial(pair, stream=1)
    assert isinstance(answer(first), Welcome) and isinstance(answer(second), Welcome)
    first.write(one_page() + b"a" * 100)  # and hangs
    wait_for(lambda: pair.far[0][:1] == b"a")
    second.write(one_page() + b"b" * PAGE + SOUND)
    assert answer(second) == Ack(1, 0, 0, PAGE, "landed")
    assert pair.far[0][:PAGE] == b"b" * PAGE
    with pytest.raises(OSError, match=r"closed|reset"):
        first.read(1)
    first.close()
    second.close()


def test_a_sender_that_comes_back_replaces_its_old_stream(make: Callable[..., Pair]) -> None:
    pair = make()
    first = dial(pair)
    assert isinstance(answer(first), Welcome)
    second = dial(pair)
    assert isinstance(answer(second), Welcome)
    with pytest.raises(OSError, match=r"closed|reset"):
        first.read(1)
    first.close()
    second.close()


def test_garbage_on_a_welcomed_stream(make: Callable[..., Pair]) -> None:
    """A frame with some bytes changed, again and again: refused, or written where its own table says."""
    pair = make()
    pair.receiver.open(1)
    rng = random.Random(3)
    for _ in range(60):
        raw = dial(pair, session=rng.getrandbits(63))
        assert isinstance(answer(raw), Welcome)
        forged = bytearray(one_page(room=9, region=1) + b"x" * PAGE + SOUND)
        for _ in range(rng.randint(1, 4)):
            forged[rng.randrange(80)] = rng.randrange(256)
        with contextlib.suppress(OSError, frames.FrameError):
            raw.write(bytes(forged))
            raw.sock.shutdown(socket.SHUT_WR)
            answer(raw)
        raw.close()
    pair.check([])
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "landed"


@pytest.mark.parametrize(
    "forged, cause",
    [
        (one_page(region=LAYERS) + b"x" * PAGE + SOUND, "malformed"),
        (one_page(offset=SIZE - 1) + b"x" * PAGE, "malformed"),
        (one_page(offset=1 << 63) + b"x" * PAGE, "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (b"PW\x04\x00\xff\xff\xff\xff", "malformed"),
        (frames.encode(Welcome(())), "malformed"),
        (frames.encode(Hello("x", b"", 0, 0)), "malformed"),
    ],
)
def test_forged_frames_change_nothing(make: Callable[..., Pair], forged: bytes, cause: str) -> None:
    pair = make()
    pair.receiver.open(1)
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    raw.write(forged)
    with pytest.raises(OSError):
        answer(raw)
    raw.close()
    pair.check([])
    assert pair.receiver_counters.get("stream.refused", cause=cause) == 1
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "landed"  # others are not concerned


def test_who_was_not_told_of_this_receiver(make: Callable[..., Pair]) -> None:
    pair = make()
    raw = dial(pair, token=b"t" * 16)
    assert isinstance(answer(raw), Reject)
    raw.close()
    assert pair.receiver_counters.get("stream.refused", cause="token") == 1


def test_strangers_cannot_keep_a_sender_out(make: Callable[..., Pair]) -> None:
    pair = make()
    silent = [socket.create_connection(pair.address) for _ in range(40)]
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    for sock in [raw.sock, *silent]:
        sock.close()


def test_only_loopback_without_keys(folders: Path) -> None:
    regions = Regions([Region.of(bytearray(10))])
    for host in ("0.0.0.0", "::", "example.com", ""):
        with pytest.raises(PermissionError, match="--pdd-keys"):
            Receiver(regions, Counters()).listen(host)
    identity = Identity(folders / "md")
    for receiver in (Receiver(regions, Counters(), insecure=True), Receiver(regions, Counters(), identity=identity)):
        receiver.listen("0.0.0.0")
        receiver.shutdown()


# --- TLS ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client, server", [("other/p", "md"), ("p", "other/md"), (None, "md"), ("p", None)])
def test_wrong_certificates(make: Callable[..., Pair], folders: Path, client: str | None, server: str | None) -> None:
    identities = tuple(Identity(folders / name) if name else None for name in (client, server))
    pair = make(identities=identities, tuning=replace(QUICK, give_up_s=0.4))
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "failed"
    pair.check([])


def test_a_name_belongs_to_a_certificate(folders: Path) -> None:
    identity = Identity(folders / "p")
    der = ssl.PEM_cert_to_DER_cert((folders / "md/tls.crt").read_text())
    assert identity.peer(der) == "md"
    assert identity.peer(ssl.PEM_cert_to_DER_cert((folders / "other/md/tls.crt").read_text())) is None
    assert identity.peer(None) is None


def test_identities_that_cannot_be_used(tmp_path: Path) -> None:
    keys.make(tmp_path, ["p"])
    folder = tmp_path / "p"
    os.chmod(folder / "tls.key", 0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        Identity(folder)
    os.chmod(folder / "tls.key", 0o600)
    (folder / "peers/p.crt").write_text("nothing\n")
    with pytest.raises(KeysError, match=r"p\.crt"):
        Identity(folder)
    (folder / "peers/p.crt").unlink()
    with pytest.raises(KeysError, match=r"no \*\.crt"):
        Identity(folder)
    (folder / "tls.key").unlink()
    with pytest.raises(KeysError, match="adds what older folders lack"):
        Identity(folder)
