"""Sender and receiver over loopback sockets: what lands, and in whose turn."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from wan_pair import LAYERS, LONG, PAGE, QUICK, SIZE, Pair, shuffled, wait_for

from sglang_pdd.wan.regions import BoundsError, Region, Regions
from sglang_pdd.wan.sockets import Tuning
from sglang_pdd.wan.tls import Identity


@pytest.mark.parametrize("tls", [False, True])
def test_a_fragmented_pool(make_pair: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make_pair(identities=identities)
    pages = shuffled(700)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages(pages), last=True).wait(LONG) == "landed"
    pair.check(pages)
    assert pair.peer.settled(1)
    spans = pair.receiver.landed(1)
    assert list(spans.values()) == [[(0, 700 * PAGE * LAYERS)]]
    assert [each.complete for each in pair.landed].count(True) == 1 and pair.landed[-1].complete
    assert pair.counters.get("wan.landings") == 1


def test_random_blocks(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
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


def test_many_rooms_at_once_in_parts(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
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


def test_rooms_from_many_threads(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
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


def test_a_slice_of_each_page(make_pair: Callable[..., Pair]) -> None:
    """Ranks of different number: half of the heads of each token."""
    pair = make_pair()
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


def test_landed_pages_come_in_order_while_the_rest_is_on_its_way(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(rate=8e6)
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


def test_addresses_outside_of_the_regions_are_not_submitted(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    near, far = pair.sources.regions[0], pair.targets.regions[0]
    for block in ((near.address - 1, far.address, 8), (near.address, far.address + SIZE - 4, 8)):
        with pytest.raises(BoundsError):
            pair.peer.submit(1, [block])


def test_a_room_that_is_not_open_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
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
def test_memory_behind_staging(make_pair: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make_pair(identities=identities, memory=Device)
    pages = shuffled(700)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages(pages), last=True).wait(LONG) == "landed"
    pair.check(pages)


@pytest.mark.parametrize("side", ["sources", "targets"])
def test_memory_that_breaks_fails_the_transfer(make_pair: Callable[..., Pair], side: str) -> None:
    pair = make_pair(memory=Device)
    getattr(pair, side).broken = True
    for room in (1, 2):
        pair.receiver.open(room)
    ticket = pair.peer.submit(1, pair.pages(shuffled(10)), last=True)
    assert ticket.wait(LONG) == "failed" and "in vain" in ticket.reason
    getattr(pair, side).broken = False
    assert pair.peer.submit(2, pair.pages([(1, 1)])).wait(LONG) == "landed"


def test_a_sender_hears_of_each_frame(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    heard: list[tuple[int, int, float]] = []
    pair.sender.landed = lambda *what: heard.append(what)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages(shuffled(500)), last=True).wait(LONG) == "landed"
    wait_for(lambda: sum(size for _, size, _ in heard) == 500 * LAYERS * PAGE)
    assert {room for room, _, _ in heard} == {1} and all(0 < seconds < LONG for _, _, seconds in heard)


def test_a_small_room_does_not_wait_for_what_streams_hold(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(rate=20e6, tuning=replace(QUICK, streams=2))
    for room in (1, 2):
        pair.receiver.open(room)
    large = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    small = pair.peer.submit(2, pair.pages(shuffled(4, seed=1)), last=True)
    assert small.wait(LONG) == "landed" and large.ending is None
    assert large.wait(LONG) == "landed"


def test_a_slow_link_has_fewer_streams() -> None:
    assert [Tuning().fewer(mbit * 125_000).streams for mbit in (1, 30, 100, 200, 1000)] == [2, 2, 4, 8, 8]
