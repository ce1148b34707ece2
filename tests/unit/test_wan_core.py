"""The parts of the transport that do no I/O: frames, regions, the plan, landings."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pdd.wan import frames
from sglang_pdd.wan.frames import Ack, Cancel, Cancelled, Data, Frame, FrameError, Hello, Ping, Pong, Reject, Welcome
from sglang_pdd.wan.landing import Claim, Landings, Spans
from sglang_pdd.wan.plan import MIN_FRAME, Load, plan
from sglang_pdd.wan.regions import BoundsError, Ints, Region, Regions, Remote

PAGE = 4096
ALL = (Hello, Welcome, Reject, Data, Ack, Cancel, Cancelled, Ping, Pong)


def read(data: bytes, allowed: tuple[type[Frame], ...] = ALL) -> Frame:
    kind, size = frames.parse_prefix(data[: frames.PREFIX], allowed)
    assert len(data) == frames.PREFIX + size
    return frames.parse(kind, data[frames.PREFIX :])


def data(room: int = 7, part: int = 0, parts: int = 0, position: int = 0, total: int = 30, **table: object) -> Data:
    lengths = table.get("lengths", (10, 20))
    offsets, regions = table.get("offsets", (5, 100)), table.get("regions", (0, 1))
    pages = table.get("pages", 0)
    return Data(room, part, parts, position, total, sum(lengths), regions, offsets, lengths, pages)  # type: ignore[arg-type]


# --- frames -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        Hello("p-1", b"t" * 16, (1 << 64) - 1, 3),
        Welcome(((1 << 40, 4096), (10, 0))),
        Reject("no"),
        data(),
        data(parts=1, position=70, total=100, pages=5),
        Ack(1, 2, 3, 4, "discarded"),
        Cancel(1 << 63),
        Cancelled(0),
        Ping(),
        Pong(),
    ],
)
def test_frames_survive_the_wire(frame: Frame) -> None:
    assert read(frames.encode(frame)) == frame


@pytest.mark.parametrize(
    "frame, why",
    [
        (data(lengths=(10, 0)), "payload"),
        (data(lengths=(frames.MAX_PAYLOAD, 1), total=1 << 40), "payload"),
        (data(position=1), "bytes 1"),
        (data(pages=7), "7 equal pages"),
        (data(total=29), "bytes 0"),
        (data(total=frames.MAX_TRANSFER + 1), "bytes 0"),
        (data(part=2, parts=2), "part 2"),
        (data(lengths=(), offsets=(), regions=()), "0 blocks"),
        (data(lengths=(1,) * 1001, offsets=(0,) * 1001, regions=(0,) * 1001, total=2000), "limit"),
        (Hello("n" * 257, b"", 0, 0), "text"),
        (Hello("n", b"t" * 65, 0, 0), "token"),
        (Hello("n", b"", 0, 1 << 10), "integer"),
        (Welcome(((1 << 63, 0),)), "integer"),
    ],
)
def test_frames_that_are_refused(frame: Frame, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        read(frames.encode(frame))


def test_a_payload_that_lies_about_its_blocks() -> None:
    honest = data()
    with pytest.raises(FrameError, match="payload"):
        read(frames.encode(Data(7, 0, 0, 0, 40, 31, honest.regions, honest.offsets, honest.lengths)))


def test_another_version_and_another_turn() -> None:
    hello = frames.encode(Hello("n", b"", 0, 0)).replace(b"\x95\x02", b"\x95\x03")
    with pytest.raises(FrameError, match="stream version 3, expected 2"):
        read(hello)
    with pytest.raises(FrameError, match="must not come now"):
        read(frames.encode(data()), (Hello,))
    with pytest.raises(FrameError, match="limit 1024"):  # a stranger's frame, before anything is read for it
        frames.parse_prefix(b"PW\x01\x00\xff\xff\x00\x00", (Hello,))


def test_a_bootstrap_room_that_is_used_again_has_another_name() -> None:
    first = frames.room_id(7, b"pages", 3)
    assert first == frames.room_id(7, b"pages", 3) < 1 << 64
    assert (
        len({first, frames.room_id(8, b"pages", 3), frames.room_id(7, b"other", 3), frames.room_id(7, b"pages", 4)})
        == 4
    )
    assert read(frames.encode(Cancel(first))) == Cancel(first)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ALL), st.binary(max_size=200))
def test_garbage_raises_only_frame_errors(kind: type[Frame], body: bytes) -> None:
    try:
        frames.parse(kind.kind, body)
    except FrameError as error:
        assert "\n" not in str(error)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_still_within_the_limits(at: int, value: int) -> None:
    raw = bytearray(frames.encode(data()))
    raw[at % len(raw)] = value
    try:
        kind, size = frames.parse_prefix(bytes(raw[: frames.PREFIX]), (Data,))
        frame = frames.parse(kind, bytes(raw[frames.PREFIX : frames.PREFIX + size]))
    except FrameError:
        return
    assert isinstance(frame, Data)
    assert sum(frame.lengths) == frame.payload <= frames.MAX_PAYLOAD
    assert frame.position + frame.payload <= frame.total <= frames.MAX_TRANSFER
    assert len(frame.lengths) == len(frame.offsets) == len(frame.regions) <= frames.MAX_BLOCKS


# --- regions ------------------------------------------------------------------------------------------------------


def located(regions: Regions | Remote, address: int, length: int) -> tuple[int, int]:
    region, offset = regions.locate(np.array([address]), np.array([length]))
    return int(region[0]), int(offset[0])


def test_views_are_the_memory_itself() -> None:
    first, second = bytearray(100), bytearray(50)
    address = Region.of(first).address
    regions = Regions([Region.at(address, 100, 10), Region.at(0, 0), Region.of(second)])
    assert regions.shape == ((100, 10), (0, 0), (50, 0))
    views = regions.read((0, 2, 0), (10, 0, 99), (5, 50, 1))
    views[0][:] = b"abcde"
    views[1][:] = b"x" * 50
    assert first[10:15] == b"abcde" and second == b"x" * 50
    assert located(regions, address + 10, 90) == (0, 10)


@pytest.mark.parametrize(
    "block", [(2, 0, 1), (-1, 0, 1), (0, 100, 1), (0, 99, 2), (0, -1, 1), (0, 0, 0), (0, 0, -1), (1, 1 << 63, 1)]
)
def test_nothing_outside_of_a_region(block: tuple[int, int, int]) -> None:
    regions = Regions([Region.of(bytearray(100)), Region.of(bytearray(50))])
    with pytest.raises(BoundsError):
        regions.read(*((each,) for each in block))


def test_addresses_of_a_peer() -> None:
    remote = Remote([5000, 1000], [(100, 4), (50, 2)])
    assert located(remote, 5000, 100) == (0, 0)
    assert located(remote, 1049, 1) == (1, 49)
    for address, length in ((4999, 2), (5099, 2), (1050, 1), (0, 1), (5000, 0), (999, 1), (5000, (1 << 63) - 1)):
        with pytest.raises(BoundsError):
            located(remote, address, length)
    with pytest.raises(BoundsError, match="1 regions, its registration names 2"):
        Remote([1, 2], [(1, 0)])


# --- the plan -----------------------------------------------------------------------------------------------------


def where(addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """A region every 2^32 bytes."""
    return addresses >> 32, addresses & 0xFFFFFFFF


def layered(layers: int, runs: list[int], unit: int, rng: random.Random) -> list[tuple[int, int, int]]:
    """What the engine hands over: layer after layer, runs of neighbouring pages at shuffled places."""
    starts = [sum(runs[:i]) for i in range(len(runs))]
    order = rng.sample(range(len(runs)), len(runs))
    places = {run: sum(runs[other] for other in order[: order.index(run)]) for run in range(len(runs))}
    return [
        ((layer << 32) + starts[run] * unit, (layer << 32) + places[run] * unit, n * unit)
        for layer in range(layers)
        for run, n in enumerate(runs)
    ]


def bytes_moved(loads: list[Load], step: int) -> list[tuple[int, int, int, int]]:
    return [
        (region, offset + i, near, near_offset + i)
        for load in loads
        for near, near_offset, region, offset, length in zip(
            load.source_regions, load.source_offsets, load.regions, load.offsets, load.lengths, strict=True
        )
        for i in range(0, length, step)
    ]


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 12),
    runs=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    unit=st.sampled_from([64, 4096, 65536, 1 << 20]),
    known=st.booleans(),
    streams=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_every_byte_once_and_pages_in_order(
    layers: int, runs: list[int], unit: int, known: bool, streams: int, seed: int
) -> None:
    runs = runs if unit < 65536 else [min(n, 3) for n in runs[:4]]
    blocks = layered(layers, runs, unit, random.Random(seed))
    loads = plan(blocks, where, where, [unit if known else 0] * layers, streams=streams)
    position = 0
    for load in loads:
        assert load.position == position and load.size == sum(load.lengths) <= frames.MAX_PAYLOAD
        assert len(load.lengths) <= frames.MAX_BLOCKS
        position += load.size
    assert position == sum(length for _, _, length in blocks)
    if unit > 4096:
        assert sum(len(load.lengths) for load in loads) >= len(blocks)
        return
    step = unit
    expected = [
        (dst >> 32, (dst & 0xFFFFFFFF) + i, src >> 32, (src & 0xFFFFFFFF) + i)
        for src, dst, length in blocks
        for i in range(0, length, step)
    ]
    moved = bytes_moved(loads, step)
    assert sorted(moved) == sorted(expected)
    assert {load.pages for load in loads} == {sum(runs) if known else 0}
    if known:  # each frame ends with whole pages, and they come in the order of the source here
        page = unit * layers
        for load in loads:
            if page <= MIN_FRAME:
                assert load.size % page == 0
                pages = {offset // unit for offset in load.source_offsets}
                assert min(pages) == load.position // page


def test_a_page_larger_than_a_frame_keeps_its_layers_together() -> None:
    blocks = layered(8, [1, 2], 1 << 20, random.Random(0))
    loads = plan(blocks, where, where, [1 << 20] * 8)
    assert [load.size for load in loads] == [1 << 20] * 24
    assert [load.source_offsets[0] >> 20 for load in loads] == [0] * 8 + [1] * 8 + [2] * 8


def sliced(pages: list[int], tokens: int, layers: int = 2) -> list[tuple[int, int, int]]:
    """Half of each of a page's tokens, as a rank sends that has half of the heads."""
    size = PAGE // tokens // 2
    places = [(page, token) for page in pages for token in range(tokens)]
    return [
        ((layer << 32) + page * PAGE // 2 + token * size, (layer << 32) + page * PAGE + token * 2 * size, size)
        for layer in range(layers)
        for page, token in places
    ]


@pytest.mark.parametrize("tokens", [1, 4])
def test_slices_of_pages_are_counted_by_page(tokens: int) -> None:
    blocks = sliced([3, 4, 9], tokens)
    assert {load.pages for load in plan(blocks, where, where, [PAGE] * 2)} == {3}
    assert {load.pages for load in plan(blocks, where, where, [0] * 2)} == {0}


def test_pages_that_differ_between_layers_are_not_counted() -> None:
    first, second = sliced([3, 4], 1), sliced([4, 3], 1)
    mixed = first[:2] + second[2:]  # by layer
    assert {load.pages for load in plan(mixed, where, where, [PAGE] * 2)} == {0}
    uneven = [block for i, block in enumerate(sliced([3, 4], 4)) if i % 8]  # without the first token
    assert {load.pages for load in plan(uneven, where, where, [PAGE] * 2)} == {0}


def test_small_transfers_use_all_streams() -> None:
    blocks = layered(4, [16], 16 << 10, random.Random(0))
    assert [load.size for load in plan(blocks, where, where, [16 << 10] * 4, streams=4)] == [256 << 10] * 4
    assert len(plan(blocks, where, where, [16 << 10] * 4, streams=1)) == 1
    assert len(plan(blocks[:1], where, where, [16 << 10] * 4, streams=100)) == 4  # MIN_FRAME


def test_what_is_no_kv_keeps_its_order() -> None:
    blocks = [(0, 64, 8), (1 << 32, 3 << 32, 128), (8, 0, 4), (9, 9, 0)]
    (load,) = plan(blocks, where, where, [0, 0, 0, 0])
    assert (load.regions, load.offsets, load.lengths) == ((0, 3, 0), (64, 0, 0), (8, 128, 4))
    assert plan([], where, where, []) == []
    with pytest.raises(BoundsError):
        plan([(1 << 64, 0, 1)], where, where, [])


# --- landings -----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_spans_are_a_set(pieces: list[tuple[int, int]]) -> None:
    spans, model = Spans(), set[int]()
    for start, n in pieces:
        assert spans.overlaps(start, start + n) == bool(model & set(range(start, start + n)))
        assert spans.holds(start, start + n) == (set(range(start, start + n)) <= model)
        spans.add(start, start + n)
        model |= set(range(start, start + n))
    assert spans.covered == len(model)
    assert {i for a, b in spans.spans for i in range(a, b)} == model
    assert all(b < c for (_, b), (c, _) in zip(spans.spans, spans.spans[1:], strict=False))


def begun(landings: Landings, frame: Data, session: int = 1, stream: object = "s") -> Claim:
    claim = landings.begin(frame, session, stream)
    assert isinstance(claim, Claim)
    return claim


def test_only_open_rooms_are_written() -> None:
    landings = Landings()
    assert landings.begin(data(), 1, "s") == "discarded"
    landings.open(7)
    landed, settled = landings.end(begun(landings, data()), True)
    assert landed is not None and (landed.start, landed.stop, landed.complete, settled) == (0, 30, False, False)
    assert landings.begin(data(), 1, "s") == "landed"  # again
    assert landings.close(7) == [] and landings.begin(data(), 1, "s") == "discarded"


def test_a_closed_room_is_quiet_when_its_last_frame_has_ended() -> None:
    landings = Landings()
    landings.open(7)
    first, second = begun(landings, data(total=60)), begun(landings, data(position=30, total=60), stream="t")
    assert landings.close(7) == [first, second]
    landings.open(7)  # for somebody else
    assert landings.end(first, True) == (None, False) and landings.writing(7) == [second]
    assert landings.end(second, False) == (None, False) and not landings.writing(7)
    assert landings.landed(7) == {}


def test_the_same_bytes_are_never_written_twice_at_once() -> None:
    landings = Landings()
    landings.open(7)
    old = begun(landings, data(), stream="dead")
    assert landings.begin(data(), 1, "new") == [old]
    begun(landings, data(), session=2)  # another rank of the sender's: other bytes
    landings.end(old, False)
    landings.end(begun(landings, data(), stream="new"), True)
    assert landings.landed(7) == {(1, 0): [(0, 30)], (2, 0): []}


def test_completion_needs_all_parts_and_their_number() -> None:
    landings = Landings()
    landings.open(7)

    def land(frame: Data, session: int = 1) -> bool:
        landed, _ = landings.end(begun(landings, frame, session), True)
        assert landed is not None
        return landed.complete

    assert not land(data(part=1, parts=2))
    assert not land(data(total=60))
    assert land(data(parts=1), session=2)  # which says nothing of session 1
    assert land(data(position=30, total=60))
    assert landings.begin(data(part=3, parts=4), 1, "s") == "discarded"  # it was said to be two
    assert landings.begin(data(total=61), 1, "s") == "discarded"  # it was said to be 60 bytes


def test_landed_pages_are_counted_from_the_first_on() -> None:
    landings = Landings()
    landings.open(7)

    def land(frame: Data, session: int = 1) -> int:
        landings.end(begun(landings, frame, session), True)
        return landings.pages(7)[session]

    assert landings.pages(7) == {}
    begun(landings, data(position=60, total=120, pages=4), session=3)
    assert landings.pages(7) == {3: 0}
    assert land(data(position=30, total=60, pages=6)) == 0, "the first page is missing"
    assert land(data(part=1, total=30, pages=1)) == 0
    assert land(data(total=60, pages=6)) == 7
    assert land(data(part=2, total=120, pages=3)) == 7, "30 of 40 bytes"
    assert land(data(part=2, position=30, total=120, pages=3)) == 8
    assert land(data(total=30), session=2) == 0, "in another order"
    assert landings.pages(7) == {1: 8, 2: 0, 3: 0}
    assert landings.begin(data(part=2, position=60, total=120, pages=4), 1, "s") == "discarded"
    landings.close(7)
    assert landings.pages(7) == {}


def test_a_cancellation_is_complete_when_nothing_is_being_written() -> None:
    landings = Landings()
    landings.open(7)
    mine, other = begun(landings, data(total=60)), begun(landings, data(), session=2)
    assert not landings.cancel(7, 1)
    assert landings.begin(data(position=30, total=60), 1, "s") == "discarded"
    assert landings.cancel(7, 3) and landings.cancel(8, 1)
    assert landings.end(other, True)[1] is False
    assert landings.end(mine, True)[1] is True
    assert landings.cancel(7, 1)


def test_a_cancellation_after_the_room_was_closed() -> None:
    landings = Landings()
    landings.open(7)
    claim = begun(landings, data())
    landings.close(7)
    assert not landings.cancel(7, 1)
    assert landings.end(claim, True) == (None, True)
    assert landings.cancel(7, 1)
