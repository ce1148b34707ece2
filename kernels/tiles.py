"""Which tile shapes a launch uses. Pure: knows neither torch nor Triton, so it can be read, tested and tabled anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Arch = Literal["sm80", "sm90", "sm100", "gfx942", "interpreter"]

# Bytes of shared memory that one block may have, and that all blocks of a multiprocessor share.
SHARED = {"sm80": (163 << 10, 164 << 10), "sm90": (227 << 10, 228 << 10), "sm100": (227 << 10, 228 << 10)}
SHARED["gfx942"] = (64 << 10, 64 << 10)
REGISTERS = 64 << 10  # of a multiprocessor, 32 bits each
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


class Unsupported(ValueError):
    """No tile shapes are known for this shape on this chip."""


@dataclass(frozen=True, slots=True)
class Chip:
    """``cores``: multiprocessors (NVIDIA) or compute units (AMD)."""

    arch: Arch
    cores: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What one attention layer looks like on one rank.

    ``latent``: MLA after absorption: one KV head, whose values are the first ``v_dim`` columns of its keys.
    ``dtype``, ``kv_dtype``: torch's names, ``bfloat16``, ``float8_e4m3fn``, ...
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    latent: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head: so many rows of the MMA belong to one token."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Tile:
    """``m`` rows (query token x head of the group) against ``n`` cached tokens a step.

    ``stages``: depth of the software pipeline. ``per_core``: how many blocks of it fit a core together; together they
    make one wave. ``peel``: the full tiles of the prefix get a loop without masks, at the price of registers.
    """

    m: int
    n: int
    warps: int
    stages: int
    per_core: int
    peel: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """``tiles``: ascending in ``m``; a request is served by the first that holds all its rows, else by the last."""

    tiles: tuple[Tile, ...]
    cores: int


def halves(dim: int) -> tuple[int, int]:
    """``dim`` as two powers of two, the second 0 or at least 16 (the least that an MMA takes)."""
    high = 1 << (dim.bit_length() - 1)
    low = dim - high
    if dim < 16 or low & (low - 1) or 0 < low < 16:
        raise Unsupported(f"head size {dim} is no sum of two powers of two from 16 up")
    return high, low


def choose(chip: Chip, shape: Shape) -> Config:
    if chip.arch == "interpreter":
        return Config((Tile(16, 16, 4, 1, 1), Tile(32, 16, 4, 1, 1, peel=True)), chip.cores)
    raise Unsupported(chip.arch)
