"""What the kernels take of a chip, found without one: registers, spills and shared memory of every configuration.

python -m sglang_pdd.kernels.resources        # compiles everything for every chip and rewrites resources.json
python -m sglang_pdd.kernels.resources sm90   # one chip; what is in Triton's cache is not compiled again
"""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from sglang_pdd.kernels.extend_decode import attend_kernel, merge_kernel, write_kernel
from sglang_pdd.kernels.plan import ITEM, REQUEST, WAVES, plan_kernel
from sglang_pdd.kernels.tiles import FP8, MLA, TILES, Arch, Chip, Shape, Tile, choose, halves

TABLE = Path(__file__).resolve().with_name("resources.json")
TARGETS: dict[Arch, GPUTarget] = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm86": GPUTarget("cuda", 86, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2": "fp8e5",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a thread: ``registers``, ``spills`` (bytes of stack; AMD: and registers). Of a block: bytes of ``shared``."""

    registers: int
    spills: int
    shared: int


@dataclass(frozen=True, slots=True)
class Build:
    """One compilation of the attention kernel. ``masked``: with window, cap and sinks."""

    arch: Arch
    shape: Shape
    tile: Tile
    masked: bool
    fused: bool

    @property
    def row(self) -> str:
        """Its row in the table, which holds the most that the variants of a tile take."""
        kv = self.shape.kv_dtype.removeprefix("float8_")
        tile = self.tile
        peel = " peeled" if tile.peel else ""
        dims = f"{self.shape.qk_dim}/{self.shape.v_dim}"
        return f"{self.arch} {dims} {kv}: {tile.m} x {tile.n}, {tile.warps} warps, {tile.stages} stages{peel}"


def builds(arch: Arch) -> Iterator[Build]:
    """Everything that the launcher can choose on a chip, as far as it matters to the compiler.

    With an fp8 pool only what takes the most: all masks.
    """
    for qk_dim, v_dim in TILES[arch]:
        latent = (qk_dim, v_dim) == MLA
        for kv_dtype in ("bfloat16", FP8[arch][0]):
            for masked in (False, True) if kv_dtype == "bfloat16" else (True,):
                # One head a group: no tile is too small.
                wide = Shape(1, 1, qk_dim, v_dim, kv_dtype=kv_dtype, latent=latent)
                usual = Shape(
                    128 if latent else 32, 1 if latent else 8, qk_dim, v_dim, kv_dtype=kv_dtype, latent=latent
                )
                for tile in choose(Chip(arch, 1), wide).tiles:
                    yield Build(arch, usual, tile, masked, fused=kv_dtype == "bfloat16")


def compile_attention(build: Build) -> CompiledKernel:
    """Ahead of time, for arguments as the launcher passes them: aligned pointers and strides."""
    shape, tile = build.shape, build.tile
    (k0, k1), (v0, v1) = halves(shape.qk_dim), halves(shape.v_dim)
    new, pool = TYPES[shape.dtype], TYPES[shape.kv_dtype]
    types = dict.fromkeys(("q_ptr", "k_new", "v_new", "out_ptr"), f"*{new}")
    types |= dict.fromkeys(("k_pool", "v_pool"), f"*{pool}")
    types |= dict.fromkeys(("part_ptr", "part_lse_ptr"), "*fp32")
    types |= dict.fromkeys(("new_slots", "kv_indices"), "*i64")
    types |= dict.fromkeys(("qo_indptr", "kv_indptr", "items", "count"), "*i32")
    types |= dict.fromkeys(("scale", "cap", "k_scale", "v_scale"), "fp32")
    constants: dict[str, Any] = {
        **{"lse_ptr": None, "HEADS": shape.kv_heads, "GROUP": shape.group, "K0": k0, "K1": k1, "V0": v0, "V1": v1},
        **{"LATENT": shape.latent, "CAP": build.masked, "WINDOW": build.masked, "FUSED": build.fused},
        **{"PEEL": tile.peel, "ITEM": ITEM, "BLOCK_M": tile.m, "BLOCK_N": tile.n},
    }
    if build.masked:
        types["sinks_ptr"] = f"*{new}"
    else:
        constants["sinks_ptr"] = None
    return _compile(build.arch, attend_kernel, types, constants, tile.warps, tile.stages)


def compile_others(arch: Arch) -> Iterator[tuple[str, CompiledKernel]]:
    """The plan, the merge and the write kernel, in their largest form."""
    types = dict.fromkeys(plan_kernel.arg_names[:6], "*i32")
    constants: dict[str, Any] = {"HEADS": 8, "GROUP": 4, "BLOCK_M": 16, "BLOCK_N": 64}
    constants |= {"WAVES": WAVES, "ITEM": ITEM, "REQUEST": REQUEST, "BLOCK_B": 1024}
    yield "plan", _compile(arch, plan_kernel, types, constants, 4, 3)
    types = {"out_ptr": "*bf16", "part_ptr": "*fp32", "part_lse_ptr": "*fp32", "sinks_ptr": "*bf16"}
    types |= dict.fromkeys(("qo_indptr", "requests", "request_of"), "*i32")
    constants = {"lse_ptr": None, "HEADS": 1, "GROUP": 128, "V": 512, "REQUEST": REQUEST, "BLOCK_V": 512, "BLOCK_S": 8}
    yield "merge", _compile(arch, merge_kernel, types, constants, 4, 3)
    types = dict.fromkeys(("k_new", "v_new"), "*bf16")
    types |= dict.fromkeys(("k_pool", "v_pool"), "*fp8e5") | {"new_slots": "*i64", "k_scale": "fp32", "v_scale": "fp32"}
    constants = {"K0": 256, "K1": 0, "V0": 256, "V1": 0, "LATENT": False}
    yield "write", _compile(arch, write_kernel, types, constants, 4, 3)


def _compile(
    arch: Arch, kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> CompiledKernel:
    """What has neither type nor value is an integer. Strides and pointers are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name][0] == "*" or name.startswith("stride_")]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=TARGETS[arch], options={"num_warps": warps, "num_stages": stages})


def usage(kernel: CompiledKernel, arch: Arch) -> Usage:
    """Read from the AMD assembly's own account, or from the cubin by the ``cuobjdump`` that Triton brings."""
    if arch == "gfx942":
        text = kernel.asm["amdgcn"]
        fields = dict(re.findall(r"\.(\w+_count|private_segment_fixed_size):\s*(\d+)", text))
        spills = sum(int(fields[f]) for f in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"))
        return Usage(int(fields["vgpr_count"]), spills, kernel.metadata.shared)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found, text
    return Usage(int(found[1]), int(found[2]) + int(found[3]), kernel.metadata.shared)


def most(one: Usage, other: Usage) -> Usage:
    """The larger of each."""
    return Usage(max(one.registers, other.registers), max(one.spills, other.spills), max(one.shared, other.shared))


def load() -> dict[str, Usage]:
    """The table in the repository."""
    return {row: Usage(*numbers) for row, numbers in json.loads(TABLE.read_text()).items()}


def markdown(table: dict[str, Usage]) -> Iterator[str]:
    """The bf16 part for docs/kernels.md, of chips with tiles of their own that have been compiled."""
    for arch, shapes in TILES.items():
        if arch in ("sm86", "sm120") or f"{arch} plan" not in table:
            continue
        yield f"| {arch} | 16 rows | 32 or 64 rows | 128 rows |"
        yield "|---|---|---|---|"
        for dims in shapes:
            cells = {}
            for build in builds(arch):
                if (build.shape.qk_dim, build.shape.v_dim) == dims and build.fused:
                    taken, tile = table[build.row], build.tile
                    cell = f"x {tile.n}: {taken.registers} r, {taken.shared / 1024:.0f} K, {tile.per_core}"
                    cells[16 if tile.m == 16 else 128 if tile.m == 128 else 64] = cell
            yield f"| {dims[0]} / {dims[1]} | {' | '.join(cells.get(m, '') for m in (16, 64, 128))} |"
        yield ""


def measured(arch: Arch) -> dict[str, Usage]:
    """All rows of a chip, compiled on all cores."""
    found = {f"{arch} {name}": usage(kernel, arch) for name, kernel in compile_others(arch)}
    wanted = list(builds(arch))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for build, taken in zip(wanted, pool.map(_taken, wanted), strict=True):
            print(build.row, "masked" if build.masked else "plain", taken, flush=True)
            found[build.row] = most(taken, found.get(build.row, taken))
    return found


def _taken(build: Build) -> Usage:
    return usage(compile_attention(build), build.arch)


def main() -> None:
    """Rewrite the table, and print its part for the documentation."""
    for arch in [arch for arch in TARGETS if arch in sys.argv[1:]] or TARGETS:
        found = load() if TABLE.exists() else {}
        found = {row: numbers for row, numbers in found.items() if not row.startswith(f"{arch} ")} | measured(arch)
        lines = [f"  {json.dumps(row)}: {json.dumps(astuple(taken))}" for row, taken in sorted(found.items())]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(*markdown(load()), sep="\n")


if __name__ == "__main__":
    main()
