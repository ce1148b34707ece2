"""What the kernels compile to, for chips that are not here. `sglang_pdd.kernels.resources` rewrites the table."""

from __future__ import annotations

import pytest
import torch

from sglang_pdd.kernels import extend_decode, resources
from sglang_pdd.kernels.resources import TARGETS, Build, builds, compile_attention, load, measured, usage
from sglang_pdd.kernels.tiles import REGISTERS, SHARED

TABLE = load()
BUILDS = [build for arch in TARGETS for build in builds(arch)]
# Chip, head size, rows, bf16 pool, masks: all chips, small and large tiles, both kinds of pool, MLA.
SAMPLED = {
    ("sm80", 128, 16, True, False),
    ("sm90", 128, 64, True, True),
    ("sm90", 576, 64, True, False),
    ("sm100", 128, 128, False, True),
    ("gfx942", 128, 64, True, False),
}
SAMPLE = [b for b in BUILDS if (b.arch, b.shape.qk_dim, b.tile.m, b.fused, b.masked) in SAMPLED]


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
    assert len(SAMPLE) == len(SAMPLED)
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


def test_hip_compiles_what_the_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler is told nothing of how large memory is, and so makes one kernel for small and for large pools."""
    from triton.backends.amd.compiler import HIPBackend

    tensor = torch.zeros(64, dtype=torch.bfloat16)
    assert "S" in HIPBackend.get_tensor_specialization(tensor, align=True)
    monkeypatch.setattr(torch.version, "hip", "7")
    (one, none, number) = extend_decode._arguments(tensor, None, 3)
    assert HIPBackend.get_tensor_specialization(one, align=True) == "D" and (none, number) == (None, 3)
    assert one.data_ptr() == tensor.data_ptr() and one.dtype == tensor.dtype


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", TARGETS)
def test_everything(arch: str) -> None:
    assert measured(arch) == {row: taken for row, taken in TABLE.items() if row.startswith(f"{arch} ")}
