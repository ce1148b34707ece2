"""Memory that a transport may touch: numbered regions, every access checked against their bounds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class BoundsError(ValueError):
    """A place outside of every region; the text says which."""


@dataclass(frozen=True, slots=True)
class Region:
    """``size`` bytes at ``address``, which hold pages of ``unit`` bytes (0: no pages)."""

    address: int
    size: int
    unit: int = 0
    view: memoryview = field(repr=False, compare=False, kw_only=True)

    @staticmethod
    def at(address: int, size: int, unit: int = 0) -> Region:
        """Memory that somebody else keeps alive as long as this region is used. Of no bytes, it only holds a number."""
        if address < 0 or size < 0 or unit < 0:
            raise BoundsError(f"a region of {size} bytes at {address}, pages of {unit}")
        if not size:
            return Region(address, 0, unit, view=memoryview(b""))
        return Region(address, size, unit, view=memoryview((ctypes.c_char * size).from_address(address)).cast("B"))

    @staticmethod
    def of(buffer: bytearray | memoryview, unit: int = 0) -> Region:
        """A writable, contiguous buffer."""
        view = memoryview(buffer).cast("B")
        return Region(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view), unit, view=view)


class Memory(Protocol):
    """What a transport needs of a pool. All methods check bounds (`BoundsError`) and may be called by any thread.

    `Regions` is memory of the host, used in place. For memory of a device, `read` gathers into pinned staging of the
    calling thread and waits for it, `write` hands staging out, and `written` scatters it and waits.
    """

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """What a peer is told: (bytes, bytes of a page) of each region."""

    def locate(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Regions and offsets of addresses of this process."""

    def read(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Host memory that holds these blocks, in order; good until this thread's next call."""

    def write(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Host memory to be filled with these blocks, in order; good until this thread's next call."""

    def written(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """What this thread's last `write` gave has been filled. On return the blocks are where they belong."""


class Regions:
    """Host memory, in the order by which peers number its regions. Immutable."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = tuple(regions)
        self._views = [region.view for region in self.regions]
        self._sizes = [region.size for region in self.regions]
        self._index = _Index([(region.address, region.size) for region in self.regions])

    def __len__(self) -> int:
        return len(self.regions)

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """What a peer is told: (bytes, bytes of a page) of each."""
        return tuple((region.size, region.unit) for region in self.regions)

    def read(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """The blocks themselves.

        Raises:
            BoundsError: a block that is not within its region.
        """
        views, sizes, known = self._views, self._sizes, len(self._views)
        found = []
        for region, offset, length in zip(regions, offsets, lengths, strict=True):
            end = offset + length
            if not 0 <= region < known or offset < 0 or length <= 0 or end > sizes[region]:
                raise BoundsError(f"{length} bytes at {offset} of region {region}")
            found.append(views[region][offset:end])
        return found

    write = read

    def written(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is left to do."""

    def locate(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Regions and offsets of addresses of this process.

        Raises:
            BoundsError: not within one region.
        """
        return self._index.locate(addresses, lengths)


class Remote:
    """A peer's regions, as this side knows them: bases from the engine's own registration, sizes from the peer.

    An address is understood here and never sent.
    """

    def __init__(self, bases: Sequence[int], shape: Sequence[tuple[int, int]]) -> None:
        if len(bases) != len(shape):
            raise BoundsError(f"the peer has {len(shape)} regions, its registration names {len(bases)}")
        self.units = [unit for _, unit in shape]
        self._index = _Index([(base, size) for base, (size, _) in zip(bases, shape, strict=True)])

    def locate(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Regions and offsets of addresses of the peer.

        Raises:
            BoundsError: not within one region.
        """
        return self._index.locate(addresses, lengths)


class _Index:
    """From addresses to regions. Of regions that begin at the same place, the largest is found."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        order = sorted(range(len(spans)), key=lambda region: spans[region])
        self._numbers: Ints = np.array(order, dtype=np.int64)
        self._starts: Ints = np.array([spans[region][0] for region in order], dtype=np.int64)
        self._ends: Ints = self._starts + np.array([spans[region][1] for region in order], dtype=np.int64)

    def locate(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        if not len(self._starts) or ((at < 0) | (lengths <= 0) | (lengths > self._ends[at] - addresses)).any():
            raise BoundsError(f"a block outside of all {len(self._starts)} regions")
        return self._numbers[at], addresses - self._starts[at]
