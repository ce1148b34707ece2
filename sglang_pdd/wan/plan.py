"""From the engine's blocks to frames, in the order of pages, with all layers of a page together.

Engines list blocks layer after layer, so that a transfer that is cut short holds no whole page. Here the same blocks
are put into the order in which a receiver can use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_pdd.wan.frames import MAX_BLOCKS, MAX_PAYLOAD

FRAME = 1 << 20  # bytes
MIN_FRAME = 64 << 10  # bytes; smaller ones cost more than the parallel streams that they buy

_ALIGN = 4096

Block = tuple[int, int, int]  # source address, destination address, bytes
Locate = Callable[[int, int], tuple[int, int]]  # (address, bytes) -> (region, offset)

_Run = tuple[int, int, int, int]  # source region, offset there, offset in the destination's region, bytes
_Piece = tuple[int, int, int, int, int]  # the same, with the destination's region in the middle
_Layers = dict[int, list[_Run]]  # by the destination's region


@dataclass(frozen=True, slots=True)
class Load:
    """What one frame carries: bytes ``[position, position + size)`` in the order of its part, block by block."""

    position: int
    size: int
    source_regions: Sequence[int]
    source_offsets: Sequence[int]
    regions: Sequence[int]
    offsets: Sequence[int]
    lengths: Sequence[int]


def plan(
    blocks: Iterable[Block],
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
        source, destination: find regions and offsets.
        units: bytes of a page in each of the destination's regions.
        frame: bytes to aim at.
        streams: a transfer is cut into at least so many frames, if they don't get smaller than `MIN_FRAME`.

    Raises:
        BoundsError: an address that is in no region.
    """
    layers: _Layers = {}
    order: list[_Piece] = []
    for source_address, address, length in blocks:
        if length > 0:
            near, near_offset = source(source_address, length)
            region, offset = destination(address, length)
            order.append((near, near_offset, region, offset, length))
            layers.setdefault(region, []).append((near, near_offset, offset, length))
    total = sum(piece[4] for piece in order)
    share = -(-total // streams // _ALIGN) * _ALIGN
    size = max(MIN_FRAME, min(frame, MAX_PAYLOAD, share))
    runs = _common_runs(layers, units)
    return list(_loads(order if runs is None else _by_page(layers, runs, size), size))


def _common_runs(layers: _Layers, units: Sequence[int]) -> list[int] | None:
    """Pages of each run of neighbouring pages, if that is the same in all regions."""
    common: list[int] | None = None
    for region, blocks in layers.items():
        unit = units[region]
        if not unit or any(block[3] % unit for block in blocks):
            return _equal_blocks(layers)
        runs = [block[3] // unit for block in blocks]
        if common is None:
            common = runs
        elif runs != common:
            return None
    return common


def _equal_blocks(layers: _Layers) -> list[int] | None:
    """Slices of pages (a rank's heads only): each block counts as a page of its own."""
    counts = {len(blocks) for blocks in layers.values()}
    alike = len(counts) == 1 and all(len({block[3] for block in blocks}) == 1 for blocks in layers.values())
    return [1] * counts.pop() if alike else None


def _by_page(layers: _Layers, runs: Sequence[int], size: int) -> Iterator[_Piece | None]:
    """Pieces in the order of pages; None where a frame should end."""
    page = sum(blocks[0][3] // runs[0] for blocks in layers.values())
    whole = page <= size and len(layers) <= MAX_BLOCKS
    pages, most_runs = max(1, size // page), max(1, MAX_BLOCKS // len(layers))
    left = pages
    group: list[tuple[int, int, int]] = []  # run, first page in it, pages
    for run, length in enumerate(runs):
        start = 0
        while start < length:
            n = min(length - start, left)
            group.append((run, start, n))
            start += n
            left -= n
            if not left or len(group) == most_runs:
                yield from _group(layers, runs, group)
                if whole:
                    yield None
                group, left = [], pages
    yield from _group(layers, runs, group)


def _group(layers: _Layers, runs: Sequence[int], group: list[tuple[int, int, int]]) -> Iterator[_Piece]:
    for region, blocks in layers.items():
        for run, start, n in group:
            near, near_offset, offset, length = blocks[run]
            if n != runs[run]:
                unit = length // runs[run]
                near_offset, offset, length = near_offset + start * unit, offset + start * unit, n * unit
            yield near, near_offset, region, offset, length


def _loads(pieces: Iterable[_Piece | None], size: int) -> Iterator[Load]:
    """Fill frames up to ``size`` bytes. A block that would fit into a frame of its own is not split."""
    position = used = 0
    held: list[_Piece] = []
    for piece in pieces:
        if piece is None:
            if held:
                yield _load(position, used, held)
                position, used, held = position + used, 0, []
            continue
        near, near_offset, region, offset, length = piece
        while length:
            if held and (len(held) == MAX_BLOCKS or used == size or used + length > size >= length):
                yield _load(position, used, held)
                position, used, held = position + used, 0, []
            n = min(length, size - used)
            held.append((near, near_offset, region, offset, n))
            near_offset, offset, length, used = near_offset + n, offset + n, length - n, used + n
    if held:
        yield _load(position, used, held)


def _load(position: int, size: int, pieces: list[_Piece]) -> Load:
    near, near_offsets, regions, offsets, lengths = zip(*pieces, strict=True)
    return Load(position, size, near, near_offsets, regions, offsets, lengths)
