"""From the engine's blocks to frames, in the order of pages, with all layers of a page together.

Engines list blocks layer after layer, so that a transfer that is cut short holds no whole page. Here the same blocks
are put into the order in which a receiver can use them. In numpy, because a fragmented pool has 256 blocks in each MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_pdd.wan.frames import MAX_BLOCKS, MAX_PAYLOAD
from sglang_pdd.wan.regions import BoundsError, Ints

FRAME = 1 << 20  # bytes
MIN_FRAME = 64 << 10  # bytes; smaller ones cost more than the parallel streams that they buy
_ALIGN = 4096

Block = tuple[int, int, int]  # source address, destination address, bytes
Locate = Callable[[Ints, Ints], tuple[Ints, Ints]]  # (addresses, lengths) -> (regions, offsets)


@dataclass(frozen=True, slots=True)
class Load:
    """What one frame carries: bytes ``[position, position + size)`` in the order of its part, block by block.

    ``pages``: the part has so many, and its order is theirs, all regions of one together; 0: its order is another.
    """

    position: int
    size: int
    source_regions: Sequence[int]
    source_offsets: Sequence[int]
    regions: Sequence[int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    pages: int = 0


@dataclass(frozen=True, slots=True)
class _Moves:
    """Blocks, as five columns of any common shape."""

    source_regions: Ints
    source_offsets: Ints
    regions: Ints
    offsets: Ints
    lengths: Ints

    def load(self, position: int, columns: slice, pages: int) -> Load:
        """A frame of these columns of a table that has a row for each layer."""
        near, near_offsets, regions, offsets, lengths = (each[:, columns].ravel().tolist() for each in _columns(self))
        return Load(position, sum(lengths), near, near_offsets, regions, offsets, lengths, pages)


def plan(
    blocks: Iterable[Block] | Ints,
    source: Locate,
    destination: Locate,
    units: Sequence[int],
    *,
    frame: int = FRAME,
    streams: int = 1,
) -> list[Load]:
    """Cut blocks into frames.

    If every region gets the same pages (the usual case), frames hold whole pages as long as a page of all regions fits
    into one, and page ``k`` has landed when bytes ``[k * b, (k + 1) * b)`` have, with ``b`` the bytes of a page in all
    regions. Else frames follow the order of the blocks.

    Args:
        blocks: also as an array of shape (blocks, 3), int64.
        source, destination: find regions and offsets.
        units: bytes of a page in each of the destination's regions.
        frame: bytes to aim at.
        streams: a transfer is cut into at least so many frames, if they don't get smaller than `MIN_FRAME`.

    Raises:
        BoundsError: an address that is in no region.
    """
    try:
        table = np.asarray(blocks if isinstance(blocks, np.ndarray) else list(blocks), dtype=np.int64).reshape(-1, 3)
    except OverflowError:
        raise BoundsError("an address or a length beyond all memory") from None
    near, far, lengths = table[table[:, 2] != 0].T
    if not len(lengths):
        return []
    moves = _Moves(*source(near, lengths), *destination(far, lengths), lengths)
    share = -(-int(lengths.sum()) // streams // _ALIGN) * _ALIGN
    size = max(MIN_FRAME, min(frame, MAX_PAYLOAD, share))
    layers = _by_layer(moves)
    known = np.asarray(units, dtype=np.int64)
    pages = None if layers is None else _pages(layers, known)
    if layers is None or pages is None:
        return list(_in_order(moves, size))
    runs, unit = pages
    count = _count(layers, runs, known)
    page = int(unit.sum())
    if page > size or len(unit) > MAX_BLOCKS:
        pieces, _ = _cut(layers, runs, unit, 1)
        return list(_in_order(_Moves(*(each.T.ravel() for each in _columns(pieces))), size, count))
    return list(_whole_pages(layers, runs, unit, size // page, count))


def _columns(moves: _Moves) -> tuple[Ints, ...]:
    return moves.source_regions, moves.source_offsets, moves.regions, moves.offsets, moves.lengths


def _by_layer(moves: _Moves) -> _Moves | None:
    """As a table with a row for each of the destination's regions, if each comes once and has as many blocks."""
    ends = np.append(np.flatnonzero(np.diff(moves.regions)) + 1, len(moves.regions))
    rows, width = len(ends), int(ends[0])
    if (ends != np.arange(1, rows + 1) * width).any() or len(np.unique(moves.regions[::width])) != rows:
        return None
    return _Moves(*(each.reshape(rows, width) for each in _columns(moves)))


def _pages(layers: _Moves, units: Ints) -> tuple[Ints, Ints] | None:
    """(pages of each run of neighbouring pages, bytes of a page in each layer), if all layers have the same pages."""
    unit = units[layers.regions[:, 0]]
    if (unit > 0).all() and not (layers.lengths % unit[:, None]).any():
        runs = layers.lengths // unit[:, None]
        return (runs[0], unit) if (runs == runs[0]).all() else None
    if (layers.lengths == layers.lengths[:, :1]).all():
        # Slices of pages, a rank's heads only: each counts as a page of its own.
        return np.ones(layers.lengths.shape[1], dtype=np.int64), layers.lengths[:, 0]
    return None


def _count(layers: _Moves, runs: Ints, units: Ints) -> int:
    """Pages of the destination, if all layers have the same ones, and each as many runs or slices of it; else 0."""
    unit = units[layers.regions[:, :1]]
    if not unit.all():
        return 0
    places = layers.offsets // unit
    if (places != places[0]).any():
        return 0
    if (layers.lengths[0] == runs * unit[0]).all():
        return int(runs.sum())
    edges = np.flatnonzero(np.diff(places[0], prepend=-1, append=-1))
    slices = np.diff(edges)
    return len(slices) if (slices == slices[0]).all() else 0


def _cut(layers: _Moves, runs: Ints, unit: Ints, every: int) -> tuple[_Moves, Ints]:
    """The same with runs cut at each ``every``-th page, and the first page of each column."""
    starts = np.append(0, np.cumsum(runs))
    first = np.union1d(starts[:-1], np.arange(0, starts[-1], every))
    pages = np.diff(np.append(first, starts[-1]))
    run = np.searchsorted(starts, first, side="right") - 1
    skipped = (first - starts[run]) * unit[:, None]
    pieces = _Moves(
        layers.source_regions[:, run],
        layers.source_offsets[:, run] + skipped,
        layers.regions[:, run],
        layers.offsets[:, run] + skipped,
        pages * unit[:, None],
    )
    return pieces, first


def _whole_pages(layers: _Moves, runs: Ints, unit: Ints, pages: int, count: int) -> Iterator[Load]:
    """Frames of at most ``pages`` of ``count`` pages."""
    pieces, first = _cut(layers, runs, unit, pages)
    edges: NDArray[np.intp] = np.flatnonzero(np.diff(first // pages)) + 1
    most = MAX_BLOCKS // len(unit)
    page = int(unit.sum())
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(first)], strict=True):
        for at in range(start, stop, most):
            yield pieces.load(int(first[at]) * page, slice(at, min(at + most, stop)), count)


def _in_order(moves: _Moves, size: int, pages: int = 0) -> Iterator[Load]:
    """Fill frames up to ``size`` bytes. A block that would fit into a frame of its own is not split."""
    position = used = 0
    held: list[tuple[int, int, int, int, int]] = []
    for near, near_offset, region, offset, length in zip(*(each.tolist() for each in _columns(moves)), strict=True):
        while length:
            if held and (len(held) == MAX_BLOCKS or used == size or used + length > size >= length):
                yield _load(position, used, held, pages)
                position, used, held = position + used, 0, []
            n = min(length, size - used)
            held.append((near, near_offset, region, offset, n))
            near_offset, offset, length, used = near_offset + n, offset + n, length - n, used + n
    yield _load(position, used, held, pages)


def _load(position: int, size: int, blocks: Sequence[tuple[int, int, int, int, int]], pages: int) -> Load:
    near, near_offsets, regions, offsets, lengths = zip(*blocks, strict=True)
    return Load(position, size, near, near_offsets, regions, offsets, lengths, pages)
