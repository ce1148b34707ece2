"""Which tiles are chosen."""

from __future__ import annotations

import pytest

from sglang_pdd.kernels.tiles import TILES, Chip, Shape, Unsupported, chip_of, choose, halves

H200 = Chip("sm90", 132)


def rows(shape: Shape, most_new: int | None = None) -> list[int]:
    return [tile.m for tile in choose(H200, shape, most_new).tiles]


def test_only_tiles_that_a_request_can_need() -> None:
    gqa = Shape(32, 8, 128, 128)
    assert rows(gqa) == rows(gqa, 256) == [16, 64, 128]
    assert rows(gqa, 1) == rows(gqa, 4) == [16]
    assert rows(gqa, 5) == rows(gqa, 16) == [16, 64]
    assert rows(Shape(32, 1, 128, 128)) == [64, 128], "one token has 32 rows"
    assert rows(Shape(128, 1, 576, 512, latent=True)) == [64], "one token has more rows than any tile"
    assert rows(Shape(16, 1, 576, 512, latent=True)) == [16, 64]


@pytest.mark.parametrize("arch", TILES)
def test_tiles_ascend(arch: str) -> None:
    for tiles in TILES[arch].values():
        assert [tile.m for tile in tiles] == sorted({tile.m for tile in tiles})


@pytest.mark.parametrize(
    "shape",
    [
        Shape(32, 8, 112, 112),
        Shape(32, 8, 128, 64),
        Shape(32, 8, 128, 128, "float32", "float32"),
        Shape(32, 8, 128, 128, kv_dtype="float8_e4m3fnuz"),
        Shape(32, 8, 128, 128, kv_dtype="uint8"),
        Shape(128, 1, 576, 512),
    ],
    ids=str,
)
def test_what_has_no_tiles(shape: Shape) -> None:
    with pytest.raises(Unsupported):
        choose(H200, shape)


def test_halves() -> None:
    assert [halves(d) for d in (64, 80, 96, 192, 576)] == [(64, 0), (64, 16), (64, 32), (128, 64), (512, 64)]
    for dim in (8, 72, 112):
        with pytest.raises(Unsupported):
            halves(dim)


def test_chips() -> None:
    assert chip_of(9, 0, 132) == H200
    assert chip_of(10, 3, 148).arch == "sm100"
    assert chip_of(9, 4, 304, "gfx942:sramecc+:xnack-") == Chip("gfx942", 304)
    assert chip_of(8, 9, 142).arch == "sm89" and chip_of(12, 1, 48).arch == "sm120"
    for capability in ((7, 5), (8, 7), (11, 0)):
        with pytest.raises(Unsupported):
            chip_of(*capability, 100)
    with pytest.raises(Unsupported):
        chip_of(9, 5, 256, "gfx950")
