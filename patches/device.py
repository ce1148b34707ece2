"""KV that lives on a device, as memory that a transport may touch: through staging, gathered and scattered there.

A frame's blocks are many and small. Copied one by one they would cost a launch each; so they are gathered on the device
into one piece, which crosses the bus at once, on a stream beside the model's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_pdd.wan.frames import MAX_PAYLOAD
from sglang_pdd.wan.regions import BoundsError, Ints, Region, Regions


class DeviceRegions:
    """`Memory` of a device (``Regions`` with the same numbers says where), beside some of the host.

    Args:
        spans: (address, bytes, bytes of a page) of each region.
        device: where the first ``on_device`` of them are; the others are memory of the host.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], device: torch.device, on_device: int) -> None:
        # Where the device's memory is, without a way to touch it.
        places = [Region(a, n, unit, view=memoryview(b"")) for a, n, unit in spans[:on_device]]
        self._places = Regions([*places, *(Region.at(*span) for span in spans[on_device:])])
        self._tensors = [bytes_at(address, size, device) for address, size, _ in spans[:on_device]]
        self._device = device
        self._mine = threading.local()

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """What a peer is told: (bytes, bytes of a page) of each."""
        return self._places.shape

    def locate(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Regions and offsets of addresses of this process."""
        return self._places.locate(addresses, lengths)

    def read(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Staging that holds these blocks, in order; waits for the device."""
        if self._on_host(regions):
            return self._places.read(regions, offsets, lengths)
        size = self._check(regions, offsets, lengths)
        staging = self._staging()
        with staging.working():
            for tensor, rows, piece, grain in self._pieces(staging, regions, offsets, lengths):
                torch.index_select(tensor, 0, rows, out=piece.view(-1, grain))
            staging.host[:size].copy_(staging.near[:size], non_blocking=True)
        return [staging.view[:size]]

    def write(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Staging to be filled with these blocks, in order."""
        if self._on_host(regions):
            return self._places.write(regions, offsets, lengths)
        return [self._staging().view[: self._check(regions, offsets, lengths)]]

    def written(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Scatter what staging has been filled with; waits for the device."""
        if self._on_host(regions):
            return
        size, staging = sum(lengths), self._staging()
        with staging.working():
            staging.near[:size].copy_(staging.host[:size], non_blocking=True)
            for tensor, rows, piece, grain in self._pieces(staging, regions, offsets, lengths):
                tensor.index_copy_(0, rows, piece.view(-1, grain))

    # --- inside ---

    def _pieces(
        self, staging: _Staging, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
        """For each run of blocks of one region: it as rows of ``grain`` bytes, which rows, and their staging."""
        at = 0
        for region, start, stop in _runs(regions):
            rows, grain = _rows(np.array(offsets[start:stop]), np.array(lengths[start:stop]))
            tensor = self._tensors[region]
            size = len(rows) * grain
            whole = len(tensor) // grain * grain
            index = torch.from_numpy(rows).to(self._device, non_blocking=False)
            yield tensor[:whole].view(-1, grain), index, staging.near[at : at + size], grain
            at += size

    def _on_host(self, regions: Sequence[int]) -> bool:
        """Raises `BoundsError` for blocks of both kinds, which no sender of ours puts into one frame."""
        host = {region >= len(self._tensors) for region in regions}
        if len(host) > 1:
            raise BoundsError("a frame of host and device memory")
        return host == {True}

    def _check(self, regions: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int:
        """Bytes of these blocks.

        Raises:
            BoundsError: a block that is not within its region, or too much at once.
        """
        for region, offset, length in zip(regions, offsets, lengths, strict=True):
            if region < 0 or offset < 0 or length <= 0 or offset + length > len(self._tensors[region]):
                raise BoundsError(f"{length} bytes at {offset} of region {region}")
        size = sum(lengths)
        if size > MAX_PAYLOAD:
            raise BoundsError(f"{size} bytes at once, limit {MAX_PAYLOAD}")
        return size

    def _staging(self) -> _Staging:
        """This thread's own."""
        staging: _Staging | None = getattr(self._mine, "staging", None)
        if staging is None:
            staging = self._mine.staging = _Staging.make(self._device)
        return staging


@dataclass(frozen=True, slots=True)
class _Staging:
    host: torch.Tensor  # MAX_PAYLOAD bytes, pinned
    near: torch.Tensor  # as many on the device
    view: memoryview  # of ``host``
    stream: Any  # None on a CPU

    @staticmethod
    def make(device: torch.device) -> _Staging:
        away = device.type != "cpu"
        # Pinning makes a context on the thread's current device, which need not be this one.
        with torch.accelerator.device_index(device.index if away else None):
            host = torch.empty(MAX_PAYLOAD, dtype=torch.uint8, pin_memory=away)
            near = torch.empty(MAX_PAYLOAD, dtype=torch.uint8, device=device)
            stream = torch.Stream(device) if away else None
        return _Staging(host, near, memoryview(host.numpy()), stream)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What is done within is done by the device when this ends."""
        if self.stream is None:
            yield
            return
        with self.stream:
            yield
        self.stream.synchronize()


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Memory of a device as uint8 [size], without a copy."""
    if device.type == "cpu":
        return torch.frombuffer(Region.at(address, size).view, dtype=torch.uint8)
    # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html; also what PyTorch for ROCm understands.
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    memory = type("_Memory", (), {"__cuda_array_interface__": interface})()
    return torch.as_tensor(memory, device=device)


def _runs(regions: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(region, first block, last block + 1)"""
    edges = np.flatnonzero(np.diff(np.array(regions))) + 1
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(regions)], strict=True):
        yield regions[start], start, stop


def _rows(offsets: Ints, lengths: Ints) -> tuple[Ints, int]:
    """The blocks as rows of ``grain`` bytes, the largest that divides them all."""
    grain = int(np.gcd.reduce(np.concatenate([offsets, lengths])))
    counts = lengths // grain
    before = np.cumsum(counts) - counts
    rows = np.repeat(offsets // grain - before, counts) + np.arange(counts.sum())
    return rows, grain
