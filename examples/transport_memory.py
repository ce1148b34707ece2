"""KV memory of the ends of `bench_transport.py`, and what a push moves in it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from sglang_pdd.wan.regions import Region, Regions

LAYERS = 16
PAGE = 4096  # bytes

Block = tuple[int, int, int]  # source address, target address, bytes


def moves(seed: int, block: int, layer: int) -> tuple[list[int], list[int]]:
    """Which block of the source goes where, in each layer of so many bytes: no two that are neighbours stay so."""
    rng = random.Random(seed)
    source, target = list(range(layer // block)), list(range(layer // block))
    rng.shuffle(source)
    rng.shuffle(target)
    return source, target


class Memory:
    """KV memory of one side: a buffer for each layer."""

    def __init__(self, mib: int, content: bool) -> None:
        size = (mib << 20) // LAYERS
        fill = [random.Random(layer).randbytes(1 << 16) if content else bytes(1 << 16) for layer in range(LAYERS)]
        self.layers = [bytearray(each * (size >> 16)) for each in fill]
        self.regions = Regions(Region.of(layer, PAGE) for layer in self.layers)

    @property
    def bases(self) -> list[int]:
        return [region.address for region in self.regions.regions]

    def blocks(self, bases: Sequence[int], seed: int, block: int) -> list[Block]:
        """All of it, to the same layers elsewhere, in `moves`."""
        pairs = list(zip(*moves(seed, block, len(self.layers[0])), strict=True))
        return [
            (near + a * block, far + b * block, block)
            for near, far in zip(self.bases, bases, strict=True)
            for a, b in pairs
        ]

    def sums(self) -> list[int]:
        """A checksum of each layer."""
        return [zlib.crc32(layer) for layer in self.layers]

    def sums_after(self, seed: int, block: int) -> list[int]:
        """What `sums` is where these `moves` went."""
        source, target = moves(seed, block, len(self.layers[0]))
        place = dict(zip(target, source, strict=True))
        views = [memoryview(layer) for layer in self.layers]
        order = [place[at] * block for at in range(len(place))]
        return [zlib.crc32(b"".join(view[at : at + block] for at in order)) for view in views]
