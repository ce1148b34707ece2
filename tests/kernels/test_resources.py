"""What the kernels compile to, for chips that are not here. `sglang_pdd.kernels.resources` rewrites the table."""

from __future__ import annotations

import pytest

from sglang_pdd.kernels import resources
from sglang_pdd.kernels.resources import TARGETS, Build, Usage, builds, compile_attention, compile_others, load, usage
from sglang_pdd.kernels.tiles import REGISTERS, SHARED

TABLE = load()
ALL = [build for arch in TARGETS for build in builds(arch)]
# Not compiled yet in their present form: to be dropped when the table is rewritten.
UNTABLED = {b.row for b in ALL if not b.fused or (b.arch == "gfx942" and b.shape.qk_dim > 128 and b.row not in TABLE)}
BUILDS = [build for build in ALL if build.row not in UNTABLED]
# One small and one large tile a chip, both kinds of pool, with and without masks, MLA.
SAMPLE = [b for b in BUILDS if b.shape.qk_dim == 128 and b.fused and not b.masked and b.tile.m != 64]
SAMPLE += [b for b in BUILDS if b.arch == "sm90" and b.tile.m == 64 and b.masked and b.shape.qk_dim in (64, 128, 576)]


def name(build: Build) -> str:
    return build.row + (", masked" if build.masked else "")


def test_the_table_has_everything_that_can_be_chosen_and_nothing_else() -> None:
    others = {f"{arch} {kernel}" for arch in TARGETS for kernel in ("plan", "merge", "write")}
    assert set(TABLE) == {build.row for build in BUILDS} | others


@pytest.mark.parametrize("row", sorted(TABLE))
def test_nothing_spills(row: str) -> None:
    assert TABLE[row].spills == 0


@pytest.mark.parametrize("build", {build.row: build for build in BUILDS}.values(), ids=name)
def test_it_fits_as_often_as_the_launcher_counts_on(build: Build) -> None:
    taken, tile = TABLE[build.row], build.tile
    block, core = SHARED[build.arch]
    assert taken.shared <= block
    if build.arch == "gfx942":
        # 512 registers a lane of each of 4 SIMDs, given out in eights; all of LDS can be one block's.
        per_simd = 512 // (-(-taken.registers // 8) * 8) * 4 // tile.warps
        assert tile.per_core <= min(per_simd, core // max(taken.shared, 1))
    else:
        # Registers go to warps in units of 256; the driver takes 1 KiB a block.
        per_warp = -(-taken.registers * 32 // 256) * 256
        assert tile.per_core <= min(REGISTERS // (per_warp * tile.warps), core // (taken.shared + 1024))


@pytest.mark.parametrize("build", SAMPLE, ids=name)
def test_sample(build: Build) -> None:
    """It is what the table says; the tensor cores and asynchronous copies that the chip has are used."""
    kernel = compile_attention(build)
    taken, most = usage(kernel, build.arch), TABLE[build.row]
    assert resources.most(taken, most) == most
    if "ptx" in kernel.asm:
        ptx = kernel.asm["ptx"]
        assert ptx.count("cp.async.cg.shared.global") >= 4 and "st.local" not in ptx
        if build.tile.m >= 64:
            assert {"sm80": "mma.sync", "sm90": "wgmma.mma_async", "sm100": "tcgen05.mma"}[build.arch] in ptx
    else:
        assert "v_mfma" in kernel.asm["amdgcn"]


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", TARGETS)
def test_everything(arch: str) -> None:
    found: dict[str, Usage] = {f"{arch} {kernel}": usage(k, arch) for kernel, k in compile_others(arch)}
    for build in builds(arch):
        taken = usage(compile_attention(build), arch)
        found[build.row] = resources.most(taken, found.get(build.row, taken))
    assert all(taken.spills == 0 for taken in found.values())
    assert {row: found[row] for row in found.keys() - UNTABLED} == {
        row: taken for row, taken in TABLE.items() if row.startswith(f"{arch} ")
    }
