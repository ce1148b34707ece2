"""KV by stream through SGLang's sending: a manager that calls the hooks as Mooncake's does, and a real transport."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base import KVPoll

from sglang_pdd.config import PddConfig
from sglang_pdd.metrics import Counters
from sglang_pdd.patches import landing, lanes, mooncake, streams
from sglang_pdd.patches import pool as patches_pool
from sglang_pdd.patches.device import DeviceRegions
from sglang_pdd.patches.landing import Landings
from sglang_pdd.patches.streams import Streams
from sglang_pdd.protocol import Landing
from sglang_pdd.wan.frames import room_id
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.regions import BoundsError, Memory, Region, Regions
from sglang_pdd.wan.sender import Sender

LAYERS, PAGE, PAGES = 4, 4096, 64
ROOM = 77
SLOW = 1e6  # bytes/s


def memory(fill: int, staged: bool) -> tuple[list[bytearray], list[Region], Memory]:
    """One region a layer, and one with a metadata slot. ``staged``: as if all but that were on a device."""
    buffers = [bytearray([fill + i]) * (PAGE * PAGES) for i in range(LAYERS)] + [bytearray([fill]) * 64]
    regions = [Region.of(b, PAGE if len(b) > 64 else 64) for b in buffers]
    spans = [(region.address, region.size, region.unit) for region in regions]
    return buffers, regions, DeviceRegions(spans, torch.device("cpu"), LAYERS) if staged else Regions(regions)


@dataclass
class Rank:
    """One rank of MD."""

    session: str
    buffers: list[bytearray]
    regions: list[Region]
    receiver: Receiver
    landings: Landings
    place: Landing
    counters: Counters

    @staticmethod
    def start(session: str, staged: bool = False) -> Rank:
        buffers, regions, pool = memory(0, staged)
        counters = Counters()
        receiver = Receiver(pool, counters)
        host, port = receiver.listen("127.0.0.1")
        place = Landing(host, port, receiver.token)
        return Rank(session, buffers, regions, receiver, Landings(receiver), place, counters)


@dataclass
class Manager:
    """What the streams ask of Mooncake's manager on P, and how it calls them."""

    regions: list[Region]
    ranks: list[Rank]
    is_mla_backend: bool = False
    request_status: dict[int, int] = field(default_factory=dict)
    transfer_infos: dict[int, dict[str, Any]] = field(default_factory=dict)
    decode_kv_args_table: dict[str, Any] = field(default_factory=dict)
    transfer_queues: list[Any] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    concluded: list[int] = field(default_factory=list)
    workers: int = 0
    session_lock: Any = field(default_factory=threading.Lock)
    refused: set[str] = field(default_factory=set)
    kv_item_lens_sum: int = LAYERS * PAGE
    going: Any = field(default_factory=threading.Event)  # cleared: a worker that has a chunk in hand waits

    def __post_init__(self) -> None:
        self.going.set()

    def told(self, room: int, pages: list[int]) -> None:
        """MD's metadata has come."""
        indices = np.array(pages, np.int32)
        self.request_status[room] = KVPoll.WaitingForInput
        self.transfer_infos[room] = {
            rank.session: SimpleNamespace(
                room=room, mooncake_session_id=rank.session, dst_kv_indices=indices, dst_aux_index=0, is_dummy=False
            )
            for rank in self.ranks
        }
        for rank in self.ranks:
            bases = [region.address for region in rank.regions]
            self.decode_kv_args_table[rank.session] = SimpleNamespace(dst_kv_ptrs=bases[:-1], dst_aux_ptrs=bases[-1:])
            rank.landings.open(room, indices.tobytes(), 0)

    def add_transfer_request(
        self, room: int, pages: Any, index_slice: slice, is_last_chunk: bool, aux_index: int | None = None
    ) -> None:
        self.transfer_queues[0].put(SimpleNamespace(room=room, pages=pages, where=index_slice, last=is_last_chunk))

    def transfer_worker(self, queue: Any, executor: Any, staging: Any, index: int) -> None:
        self.workers += 1
        try:
            self._work(queue, executor)
        finally:
            self.workers -= 1

    def _work(self, queue: Any, executor: Any) -> None:
        while (chunk := queue.get()) is not None:
            if self.request_status.get(chunk.room, KVPoll.Failed) == KVPoll.Failed:
                continue
            polls = []
            self.going.wait()
            for session, info in self.transfer_infos[chunk.room].items():
                status = streams.send_pages(Manager._layers, self, session, chunk, info, executor)
                assert status == 0, "Mooncake would refuse the session from now on"
                if chunk.last:
                    polls.append(streams.send_metadata(Manager._slot, self, info, 0, []) == 0)
            if chunk.last and self.request_status.get(chunk.room) != KVPoll.Failed:
                self.request_status[chunk.room] = KVPoll.Success if all(polls) else KVPoll.Failed
            if chunk.last:
                self.concluded.append(chunk.room)

    def _layers(self, session: str, chunk: Any, info: Any, executor: Any) -> int:
        def layer(i: int) -> int:
            near = [self.regions[i].address + page * PAGE for page in chunk.pages]
            far = self.decode_kv_args_table[session].dst_kv_ptrs[i]
            places = [far + int(page) * PAGE for page in info.dst_kv_indices[chunk.where]]
            return mooncake.batch_transfer(refuse, None, session, near, places, [PAGE] * len(near))

        return sum(future.result() for future in [executor.submit(layer, i) for i in range(LAYERS)])

    def _slot(self, info: Any, aux_index: int, aux_ptrs: list[int]) -> int:
        far = self.decode_kv_args_table[info.mooncake_session_id].dst_aux_ptrs[0]
        near = self.regions[-1].address
        return mooncake.batch_transfer(refuse, None, info.mooncake_session_id, [near], [far], [64])

    def update_status(self, room: int, status: int) -> None:
        streams.status_changed(Manager._note, self, room, status)

    def _note(self, room: int, status: int) -> None:
        if room in self.request_status:
            self.request_status[room] = status

    def _unblacklist_session(self, session: str) -> None:
        assert self.session_lock.locked()
        self.refused.discard(session)

    def conclude_failure(self, *, bootstrap_room: int, failure_reason: str) -> None:
        self.failures.setdefault(bootstrap_room, failure_reason)
        self.update_status(bootstrap_room, KVPoll.Failed)


def refuse(*args: Any) -> int:
    raise AssertionError("the engine was called")


def wait_for(what: Any) -> None:
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end, "never"
        time.sleep(0.002)


class World:
    """One rank of P and some of MD."""

    def __init__(self, ranks: int = 1, rate: float | None = None, staged: bool = False) -> None:
        self.ranks = [Rank.start(f"md:{i}", staged) for i in range(ranks)]
        self.buffers, regions, pool = memory(100, staged)
        self.manager = Manager(regions, self.ranks)
        self.sent = 0
        self.sender = Sender("p", pool, Counters(), rate=rate, landed=self._landed)
        self.streams = streams.streams = Streams(self.sender, self.manager)
        self.streams.know([r.session for r in self.ranks], [r.place for r in self.ranks])

    def _landed(self, name: int, size: int, seconds: float) -> None:
        assert self.streams.room(name) is not None and seconds > 0
        self.sent += size

    def begin(self, pages: list[int], room: int = ROOM) -> None:
        self.manager.told(room, pages)
        assert self.streams.open(room, len(pages) * LAYERS * PAGE) is not None

    def chunk(self, pages: range, last: bool, room: int = ROOM) -> None:
        lanes.add_transfer_request(
            Manager.add_transfer_request, self.manager, room, list(pages), slice(pages.start, pages.stop), last
        )

    def close(self) -> None:
        streams.streams = None
        self.sender.shutdown()
        for rank in self.ranks:
            rank.receiver.shutdown()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(**getattr(request, "param", {}))
    yield world
    world.close()


WORLDS = {"one rank": {}, "two ranks": {"ranks": 2}, "staged": {"staged": True}}


@pytest.mark.parametrize("world", WORLDS.values(), indirect=True, ids=WORLDS)
def test_chunks_land_where_the_engine_would_have_put_them(world: World) -> None:
    target = list(np.random.default_rng(1).permutation(PAGES)[:20])
    world.begin(target)
    world.chunk(range(0, 8), last=False)
    world.chunk(range(8, 20), last=True)
    wait_for(lambda: world.manager.concluded)
    assert world.manager.request_status[ROOM] == KVPoll.Success
    for rank in world.ranks:
        for i in range(LAYERS):
            pages = np.frombuffer(rank.buffers[i], np.uint8).reshape(PAGES, PAGE)
            assert (pages[target] == 100 + i).all() and (np.delete(pages, target, 0) == i).all()
        assert rank.buffers[-1] == bytes([100]) * 64
        rank.landings.end(ROOM)
    assert world.sent == len(world.ranks) * (20 * LAYERS * PAGE + 64)
    wait_for(lambda: not world.manager.workers)
    world.streams.close(ROOM)


@pytest.mark.parametrize("world", [{"rate": SLOW, "ranks": 2}, {"rate": SLOW, "staged": True}], indirect=True)
def test_what_has_landed_of_a_room_is_known_by_pages(world: World) -> None:
    target = [int(page) for page in np.random.default_rng(1).permutation(PAGES)]
    name = room_id(ROOM, np.array(target, np.int32).tobytes(), 0)
    world.begin(target)
    world.chunk(range(0, 20), last=False)
    world.chunk(range(20, PAGES), last=True)
    wait_for(lambda: all(max(rank.receiver.pages(name).values(), default=0) > 20 for rank in world.ranks))
    assert all(20 < rank.landings.so_far(ROOM) <= PAGES + 1 for rank in world.ranks)
    for rank in world.ranks:
        assert rank.landings.pages(ROOM, 2) == 0, "another rank of P has brought nothing"
        landed = rank.landings.pages(ROOM, 1)
        assert 20 < landed <= PAGES + 1, "all of the first chunk, some of the second, the metadata at the end"
        for i in range(LAYERS):
            pages = np.frombuffer(rank.buffers[i], np.uint8).reshape(PAGES, PAGE)
            assert (pages[target[:landed]] == 100 + i).all()
        rank.landings.end(ROOM)
        assert rank.landings.pages(ROOM, 1) == rank.landings.so_far(ROOM) == 0
    world.manager.update_status(ROOM, KVPoll.Failed)


@pytest.mark.parametrize("world", [{"rate": SLOW}], indirect=True)
def test_a_failed_room_frees_the_link_at_once_and_its_pages_soon(world: World) -> None:
    world.begin(list(range(PAGES)))  # a second of the link
    world.begin(list(range(4)), room=8)
    world.chunk(range(0, PAGES), last=True)
    wait_for(lambda: world.sent)
    started = time.monotonic()
    landings = world.ranks[0].landings
    landings.close(ROOM)
    wait_for(lambda: landings.quiet(ROOM))
    assert landings.senders(ROOM) == 1
    assert time.monotonic() - started < 0.3
    before = [bytes(buffer) for buffer in world.ranks[0].buffers]
    world.manager.update_status(ROOM, KVPoll.Failed)  # MD's abort
    wait_for(lambda: world.manager.concluded)
    assert time.monotonic() - started < 0.6 and not world.manager.failures
    assert [bytes(buffer) for buffer in world.ranks[0].buffers] == before, "written after it was quiet"
    landings.end(ROOM)
    world.chunk(range(0, 4), last=True, room=8)
    wait_for(lambda: world.manager.concluded == [ROOM, 8])
    assert world.manager.request_status[8] == KVPoll.Success


def test_a_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's pools say "cuda"; the streams' threads would take that for the first one."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert [str(patches_pool._indexed(torch.device(name))) for name in ("cuda", "cuda:1")] == ["cuda:3", "cuda:1"]


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("world", [{"rate": SLOW, "ranks": 2}], indirect=True)
def test_what_nobody_waits_for_lands_after_all_others(world: World, followed: bool) -> None:
    """Also after what came later and is larger; unless somebody comes to wait for it."""
    late, live, follower = 7, 8, 9
    world.begin(list(range(28)), room=late)
    world.chunk(range(0, 28), last=True, room=late)
    assert world.streams.demote(late, True) and not world.streams.demote(live, True)
    world.begin(list(range(28, 62)), room=live)
    world.chunk(range(0, 34), last=True, room=live)
    if followed:
        world.manager.told(follower, [62])
        assert world.streams.open(follower, LAYERS * PAGE, [late]) is not None
    wait_for(lambda: len(world.manager.concluded) == 2)
    assert world.manager.concluded == ([late, live] if followed else [live, late])


@pytest.mark.parametrize("world", [{"rate": SLOW}], indirect=True)
def test_what_others_wait_for_goes_as_early_as_they_would(world: World) -> None:
    first, awaited = 7, 8
    for room, pages in ((first, range(0, 28)), (awaited, range(28, 62))):
        world.begin(list(pages), room=room)
    world.streams.urge(awaited, PAGE)
    world.streams.urge(99, PAGE)  # none of ours
    for room, pages in ((first, range(0, 28)), (awaited, range(0, 34))):
        world.chunk(pages, last=True, room=room)
    wait_for(lambda: len(world.manager.concluded) == 2)
    assert world.manager.concluded == [awaited, first]


def test_a_room_that_is_cancelled_before_its_first_chunk(world: World) -> None:
    world.begin([1, 2, 3])
    world.manager.update_status(ROOM, KVPoll.Failed)
    world.chunk(range(0, 3), last=True)
    wait_for(lambda: not world.manager.workers)
    assert not world.manager.failures and world.sent == 0
    world.streams.close(ROOM)
    world.chunk(range(0, 3), last=True)
    assert world.manager.failures.pop(ROOM) == "the room is over", "or it would go by engine"
    world.begin([1, 2, 3])  # the same request again, in the same pages
    world.chunk(range(0, 3), last=True)
    wait_for(lambda: world.manager.request_status[ROOM] == KVPoll.Success)


@pytest.mark.parametrize("world", [{"rate": SLOW}], indirect=True)
@pytest.mark.parametrize("where", ["before a chunk", "before the last chunk", "waiting for the last to land"])
def test_a_number_that_is_taken_again_while_its_worker_lives(world: World, where: str) -> None:
    manager, last = world.manager, where != "before a chunk"
    world.begin(list(range(PAGES)))
    if where != "waiting for the last to land":
        manager.going.clear()
    world.chunk(range(0, PAGES), last=last)
    wait_for(lambda: manager.workers and (world.sent or not manager.going.is_set()))
    world.ranks[0].landings.end(ROOM)
    world.begin([7, 5])  # the next request
    manager.going.set()
    wait_for(lambda: not manager.workers)
    assert not manager.concluded and not manager.failures, "the next request has heard of the first one's end"
    assert manager.request_status[ROOM] == KVPoll.WaitingForInput
    world.chunk(range(0, 2), last=True)
    wait_for(lambda: manager.concluded)
    assert manager.request_status[ROOM] == KVPoll.Success and not manager.failures


@pytest.mark.parametrize("world", [{"rate": SLOW}], indirect=True)
def test_a_dead_rank_fails_its_rooms_and_is_used_again_once_it_is_back(world: World) -> None:
    world.sender.tuning = type(world.sender.tuning)(give_up_s=0.5)
    world.begin(list(range(PAGES)))
    world.chunk(range(0, PAGES), last=True)
    wait_for(lambda: world.sent)
    world.ranks[0].receiver.shutdown()
    wait_for(lambda: ROOM in world.manager.failures)
    assert "cannot be reached" in world.manager.failures[ROOM]
    world.streams.close(ROOM)
    world.ranks[0] = world.manager.ranks[0] = Rank.start("md:0")
    world.streams.know(["md:0"], ())
    world.streams.know(["md:0"], [world.ranks[0].place])
    world.begin([5], room=9)
    world.chunk(range(0, 1), last=True, room=9)
    wait_for(lambda: world.manager.request_status[9] == KVPoll.Success)


def test_strangers_and_sessions_that_are_gone_go_by_engine(world: World) -> None:
    world.manager.told(ROOM, [1])
    world.streams.know(["md:0"], ())
    assert world.streams.open(ROOM, PAGE) is None and world.streams.lane(ROOM) is None
    world.manager.refused = {"md:0", "other:1"}  # that went wrong
    world.streams.know(["md:0"], [world.ranks[0].place])
    assert world.streams.open(ROOM, PAGE) is not None and world.manager.refused == {"other:1"}


def test_pages_wait_for_whoever_may_still_write(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    landings = world.ranks[0].landings
    monkeypatch.setattr(landing.ingress, "seam", SimpleNamespace(landings=landings))
    acknowledged = threading.Event()

    def stock(manager: Any, room: int, required: int) -> bool:
        return acknowledged.is_set()

    world.begin([1, 2])
    assert not landing.release_safe(stock, None, ROOM, 1), "P may use the engine"
    acknowledged.set()
    assert landing.release_safe(stock, None, ROOM, 1)
    acknowledged.clear()
    landings.end(ROOM)
    world.streams.close(ROOM)
    said = {"is_dummy": False, "bootstrap_room": ROOM, "kv_indices": np.array([1, 2], np.int32), "aux_index": 0}
    world.begin([1, 2])
    landing.before_metadata(None, **said)
    world.chunk(range(0, 2), last=True)
    wait_for(lambda: world.manager.request_status[ROOM] == KVPoll.Success)
    assert landing.release_safe(stock, None, ROOM, 1), "it came by stream"
    assert not landing.release_safe(stock, None, ROOM, 2), "another rank of P may use the engine"


def test_staged_memory_is_the_same_as_memory() -> None:
    generator = np.random.default_rng(7)
    near, _, plain = memory(0, staged=False)
    far, _, staged = memory(0, staged=True)
    for buffer, twin in zip(near, far, strict=True):
        buffer[:] = twin[:] = generator.bytes(len(buffer))
    assert staged.shape == plain.shape
    for grain in (1, 24, 256, PAGE):
        regions = [0, 0, 0, 2, 2, 1, 3]
        starts = generator.permutation(PAGE * PAGES // grain // 4)[: len(regions)] * 4 * grain
        offsets = [int(start) for start in starts]
        lengths = [int(n) * grain for n in generator.integers(1, 5, len(regions))]
        where = (regions, offsets, lengths)
        assert b"".join(staged.read(*where)) == b"".join(plain.read(*where))
        news = generator.bytes(sum(lengths))
        for pool in (plain, staged):
            at = 0
            for view in pool.write(*where):
                view[:] = news[at : at + len(view)]
                at += len(view)
            pool.written(*where)
        assert near == far
    assert bytes(staged.read([LAYERS], [3], [7])[0]) == bytes(far[-1][3:10])


@pytest.mark.parametrize(
    "where",
    [
        ([0], [-1], [1]),
        ([0], [PAGE * PAGES], [1]),
        ([0], [PAGE * PAGES - 1], [2]),
        ([0], [0], [0]),
        ([-1], [0], [1]),
        ([LAYERS + 1], [0], [1]),
        ([0, LAYERS], [0, 0], [1, 1]),
        ([0] * 20, [0] * 20, [PAGE * PAGES] * 20),
    ],
)
def test_staged_memory_has_bounds(where: tuple[list[int], list[int], list[int]]) -> None:
    _, _, staged = memory(0, staged=True)
    for touch in (staged.read, staged.write):
        with pytest.raises(BoundsError):
            touch(*where)


def test_where_streams_are_taken() -> None:
    _, _, pool = memory(0, staged=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = PddConfig(role="main", wan_port=port - 1, advertise="md.example")
    receiver, place = landing.listen(pool, config, 1, Counters())
    try:
        assert place == Landing("md.example", port, receiver.token)
        with pytest.raises(SystemExit, match=f"127.0.0.1:{port}"):
            landing.listen(pool, config, 1, Counters())
    finally:
        receiver.shutdown()
    with pytest.raises(SystemExit, match="without keys"):
        landing.listen(pool, PddConfig(role="main", host="0.0.0.0"), 0, Counters())


@pytest.mark.parametrize("asked, on", [(None, {"cpu"}), ("stream", {"cpu", "cuda:1"}), ("engine", set())])
def test_which_pools_streams_serve(asked: Any, on: set[str]) -> None:
    config = PddConfig(role="main", wan_transport=asked)
    for device in ("cpu", "cuda:1"):
        scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(device=device))
        assert patches_pool.by_stream(scheduler, config) == (device in on)
    if asked == "stream":
        scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(device="xpu"))
        with pytest.raises(SystemExit, match="on xpu, expected cpu or cuda"):
            patches_pool.by_stream(scheduler, config)
