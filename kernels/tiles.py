"""Which tile shapes a launch uses. Pure: knows neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Arch = Literal["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "interpreter"]

# Bytes of shared memory that one block may have, and that all blocks of a multiprocessor share.
SHARED = {"sm80": (163 << 10, 164 << 10), "sm90": (227 << 10, 228 << 10), "sm100": (227 << 10, 228 << 10)}
SHARED |= dict.fromkeys(("sm86", "sm89", "sm120"), (99 << 10, 100 << 10))
SHARED["gfx942"] = (64 << 10, 64 << 10)
REGISTERS = 64 << 10  # of a multiprocessor, 32 bits each
MLA = (576, 512)


class Unsupported(ValueError):
    """No tile shapes are known for this shape on this chip."""


@dataclass(frozen=True, slots=True)
class Chip:
    """``cores``: multiprocessors (NVIDIA) or compute units (AMD)."""

    arch: Arch
    cores: int


def chip_of(major: int, minor: int, cores: int, gfx: str = "") -> Chip:
    """The chip of a CUDA capability, or of AMD's architecture name; raises `Unsupported`."""
    if gfx:
        if gfx.startswith("gfx942"):
            return Chip("gfx942", cores)
        raise Unsupported(f"{gfx}: tiles are known for gfx942")
    found: dict[tuple[int, int], Arch] = {(8, 0): "sm80", (8, 6): "sm86", (8, 9): "sm89", (9, 0): "sm90"}
    found |= {(10, 0): "sm100", (10, 3): "sm100", (12, 0): "sm120", (12, 1): "sm120"}
    if (major, minor) not in found:
        known = ", ".join(f"{a}.{b}" for a, b in found)
        raise Unsupported(f"compute capability {major}.{minor}: tiles are known for {known}")
    return Chip(found[major, minor], cores)


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


# For chips with 99 KiB of shared memory a block.
_SMALL: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (Tile(16, 64, 4, 3, 2), Tile(64, 64, 4, 3, 2), Tile(128, 64, 8, 3, 1, True)),
    (80, 80): (Tile(16, 32, 4, 4, 2), Tile(64, 32, 4, 3, 2), Tile(128, 32, 8, 3, 1, True)),
    (96, 96): (Tile(16, 32, 4, 4, 2), Tile(64, 32, 4, 3, 2), Tile(128, 32, 8, 3, 1, True)),
    (128, 128): (Tile(16, 32, 4, 3, 2), Tile(64, 32, 4, 3, 1), Tile(128, 32, 8, 3, 1)),
    (192, 128): (Tile(16, 32, 4, 3, 2), Tile(64, 32, 8, 3, 1), Tile(128, 32, 8, 3, 1)),
    (256, 256): (Tile(16, 32, 8, 3, 1), Tile(64, 32, 8, 2, 1)),
    (576, 512): (Tile(16, 32, 8, 2, 1), Tile(32, 32, 8, 3, 1)),
}
# Arch -> (qk_dim, v_dim) -> tiles. The small tiles wait for memory: what counts is how much is under way, about
# ``per_core * (stages - 2)`` KV tiles, so they read masks they need not and take three stages and more. The large one
# has the multiprocessor to itself. Spills, registers and shared memory: resources.json.
TILES: dict[Arch, dict[tuple[int, int], tuple[Tile, ...]]] = {
    "sm80": {
        (64, 64): (Tile(16, 64, 4, 4, 3), Tile(64, 64, 4, 3, 2), Tile(128, 64, 8, 3, 1, True)),
        (80, 80): (Tile(16, 32, 4, 4, 2), Tile(64, 32, 4, 3, 2), Tile(128, 32, 8, 3, 1, True)),
        (96, 96): (Tile(16, 64, 4, 3, 3), Tile(64, 32, 4, 3, 2), Tile(128, 32, 8, 3, 1, True)),
        (128, 128): (Tile(16, 64, 4, 3, 2), Tile(64, 32, 4, 3, 2), Tile(128, 32, 8, 3, 1)),
        (192, 128): (Tile(16, 32, 4, 3, 3), Tile(64, 32, 8, 3, 1), Tile(128, 32, 8, 3, 1)),
        (256, 256): (Tile(16, 32, 8, 3, 2), Tile(64, 32, 8, 3, 1)),
        (576, 512): (Tile(16, 32, 8, 3, 1), Tile(32, 32, 8, 3, 1)),
    },
    "sm86": _SMALL,
    "sm89": _SMALL,
    "sm120": {**_SMALL, (96, 96): (Tile(16, 64, 4, 2, 3), *_SMALL[96, 96][1:])},
    "sm90": {
        (64, 64): (Tile(16, 64, 4, 4, 4), Tile(64, 64, 4, 4, 3), Tile(128, 64, 8, 4, 1, True)),
        (80, 80): (Tile(16, 32, 4, 5, 3), Tile(64, 64, 4, 4, 2), Tile(128, 64, 8, 4, 1, True)),
        (96, 96): (Tile(16, 64, 4, 3, 4), Tile(64, 64, 4, 4, 2), Tile(128, 64, 8, 4, 1, True)),
        (128, 128): (Tile(16, 64, 4, 3, 3), Tile(64, 32, 4, 5, 2), Tile(128, 64, 8, 4, 1, True)),
        (192, 128): (Tile(16, 64, 4, 3, 2), Tile(64, 32, 4, 4, 2), Tile(128, 64, 8, 3, 1, True)),
        (256, 256): (Tile(16, 32, 8, 3, 2), Tile(64, 32, 8, 4, 1)),
        (576, 512): (Tile(16, 32, 4, 3, 2), Tile(64, 32, 8, 3, 1)),
    },
    "sm100": {
        (64, 64): (Tile(16, 64, 4, 4, 4), Tile(64, 64, 4, 4, 3), Tile(128, 64, 8, 4, 1, True)),
        (80, 80): (Tile(16, 32, 4, 5, 2), Tile(64, 64, 4, 4, 2), Tile(128, 64, 8, 4, 1, True)),
        (96, 96): (Tile(16, 32, 4, 5, 3), Tile(64, 64, 4, 4, 2), Tile(128, 64, 8, 4, 1, True)),
        (128, 128): (Tile(16, 64, 4, 3, 2), Tile(64, 32, 4, 5, 2), Tile(128, 64, 8, 4, 1, True)),
        (192, 128): (Tile(16, 32, 4, 4, 2), Tile(64, 32, 4, 4, 2), Tile(128, 64, 8, 3, 1)),
        (256, 256): (Tile(16, 32, 8, 3, 2), Tile(64, 32, 8, 4, 1)),
        (576, 512): (Tile(16, 32, 4, 3, 2), Tile(32, 32, 8, 3, 1)),
    },
    "gfx942": {
        (64, 64): (Tile(16, 64, 4, 2, 3), Tile(64, 64, 4, 2, 2), Tile(128, 64, 4, 2, 2, True)),
        (80, 80): (Tile(16, 64, 4, 2, 3), Tile(64, 64, 4, 2, 1), Tile(128, 64, 8, 2, 1)),
        (96, 96): (Tile(16, 64, 4, 2, 2), Tile(64, 64, 4, 2, 1), Tile(128, 64, 8, 2, 1)),
        (128, 128): (Tile(16, 64, 4, 2, 2), Tile(64, 64, 4, 2, 1), Tile(128, 32, 4, 2, 1)),
        (192, 128): (Tile(16, 32, 4, 2, 3), Tile(64, 32, 8, 2, 1), Tile(128, 32, 8, 2, 1)),
        (256, 256): (Tile(16, 32, 4, 2, 2), Tile(64, 32, 4, 2, 1)),
        (576, 512): (Tile(16, 16, 4, 2, 2), Tile(64, 16, 4, 2, 1)),
    },
}
# Where converting fp8 takes the last registers.
FP8_TILES: dict[tuple[Arch, tuple[int, int]], tuple[Tile, ...]] = {
    ("sm90", MLA): (Tile(16, 32, 8, 3, 1), Tile(32, 32, 8, 3, 1)),
    ("sm100", MLA): (Tile(16, 32, 8, 3, 1), Tile(32, 32, 8, 3, 1)),
}
FP8: dict[Arch, tuple[str, ...]] = {
    "sm80": ("float8_e5m2",),
    "sm86": ("float8_e5m2",),
    "sm89": ("float8_e4m3fn", "float8_e5m2"),
    "sm120": ("float8_e4m3fn", "float8_e5m2"),
    "sm90": ("float8_e4m3fn", "float8_e5m2"),
    "sm100": ("float8_e4m3fn", "float8_e5m2"),
    "gfx942": ("float8_e4m3fnuz",),
    "interpreter": ("float8_e4m3fn", "float8_e5m2"),
}
_INTERPRETED: tuple[Tile, ...] = (Tile(16, 16, 4, 1, 1), Tile(32, 16, 4, 1, 1, peel=True))


def choose(chip: Chip, shape: Shape, most_new: int | None = None) -> Config:
    """The tiles for a layer on a chip; raises `Unsupported`.

    ``most_new``: no request brings more new tokens than this, which saves launches.
    """
    for dim in (shape.qk_dim, shape.v_dim):
        halves(dim)
    if shape.kv_dtype != shape.dtype and shape.kv_dtype not in FP8[chip.arch]:
        raise Unsupported(f"{shape.kv_dtype} cannot be read on {chip.arch}")
    if chip.arch == "interpreter":
        tiles = _INTERPRETED
    else:
        dims = (shape.qk_dim, shape.v_dim)
        if shape.dtype not in ("bfloat16", "float16") or dims not in TILES[chip.arch] or shape.latent != (dims == MLA):
            raise Unsupported(f"no tiles for {shape} on {chip.arch}")
        tiles = TILES[chip.arch][dims]
        if shape.kv_dtype != shape.dtype:
            tiles = FP8_TILES.get((chip.arch, dims), tiles)
    most_rows = None if most_new is None else most_new * shape.group
    return Config(tuple(_needed(tiles, shape.group, most_rows)), chip.cores)


def _needed(tiles: Sequence[Tile], least_rows: int, most_rows: int | None) -> Iterator[Tile]:
    """Those that a request with this many rows can get."""
    for i, tile in enumerate(tiles):
        is_last = i == len(tiles) - 1
        if tile.m >= least_rows or is_last:
            yield tile
        if most_rows is not None and tile.m >= most_rows:
            return
