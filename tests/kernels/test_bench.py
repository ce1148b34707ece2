"""The benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_pdd.kernels import bench
from sglang_pdd.kernels.bench import Case
from sglang_pdd.kernels.tiles import Chip, Shape


def test_cases() -> None:
    cases = bench.cases()
    uniform = {(c.kind, c.news[0], c.prefixes[0], len(c.news)) for c in cases if "decodes" not in c.name}
    assert len(uniform) == 3 * 5 * 4 * 3 and len(cases) == len(uniform) + 18
    assert {c.news[-2:] for c in cases if "decodes" in c.name} == {(16, 16), (64, 64), (256, 256)}


def test_arithmetic() -> None:
    """One request of 64K tokens, 8 KV heads of 128, bf16: 256 MiB, and 4 * 16 * 32 * 128 FLOP for each of them."""
    case = Case("GQA 4", "", (16,), (1 << 16,))
    assert case.bytes == pytest.approx(256 << 20, rel=0.01)
    assert case.flops == pytest.approx(4 * 16 * 32 * 128 * (1 << 16), rel=0.001)
    assert Case("MLA", "", (1,), (1 << 16,)).bytes == pytest.approx(2 * 576 * (1 << 16), rel=0.01)


def test_it_needs_only_torch_and_triton() -> None:
    """In a checkout, where nothing of this package's is installed."""
    code = "import sys, sglang_pdd.kernels.bench; print({'sglang', 'zmq', 'msgpack', 'matplotlib'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_on_a_cpu_it_says_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    assert "nothing can be measured" in capsys.readouterr().out


@pytest.mark.parametrize("masked", [False, True])
def test_the_check_compares(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "RAGGED", ((1, 5), (40, 0)))
    chip, dims = Chip("interpreter", 4), (64, 64, 4, 2)
    assert bench.check_one(chip, (dims, ("float16", "float16"), masked))[0] == "ok"
    assert bench.check_one(chip, (dims, ("float16", "float8_e4m3fnuz"), masked))[0] == ""
    monkeypatch.setattr(bench, "LAST_PLACE", 0.51)  # the interpreter loses a carry: 1.999 becomes 1
    assert bench.check_one(chip, (dims, ("float16", "float8_e5m2"), masked))[0] == "ok"
    monkeypatch.setattr(bench, "LAST_PLACE", 0.0)
    assert "does not hold" in bench.check_one(chip, (dims, ("float16", "float8_e5m2"), masked))[1]
    monkeypatch.setitem(bench.LIMITS, "float16", 0.0)
    assert bench.check_one(chip, (dims, ("float16", "float16"), masked))[0] == "FAIL"


def test_everything_but_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches, our call, peers that are missing, table and plot, on interpreted kernels."""

    def called(calls: Sequence[Callable[[], object]], runs: int = 0) -> float:
        for call in calls:
            call()
        return 2.0

    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "median_us", called)
    monkeypatch.setattr(bench.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(bench.KINDS, "GQA 4", Shape(2, 1, 64, 64, "float16", "float16"))
    monkeypatch.setattr(bench, "COLD_BYTES", 30_000)
    case = Case("GQA 4", "3 x 2 over 40", (2,) * 3, (40,) * 3)
    pool = bench.Pool(bench.KINDS["GQA 4"], 400)
    batches = pool.batches(case)
    slots = [set(b.kv_indices.tolist()) | set(b.new_slots.tolist()) for b in batches]
    assert len(batches) == 2 and not slots[0] & slots[1]
    results: list[dict[str, Any]] = []
    bench.measure(case, pool, Chip("interpreter", 4), True, results.append)
    results[0]["peers"]["FlashInfer"] = {"us": 3.0, "difference": 0.0}
    results.append({**results[0], "news": (1, 1, 1), "us": 1.0})
    top = {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 8e14}
    lines = list(bench.table(results, top))
    assert lines[0] == "Measured on this card: copy 4.00 TB/s, bf16 matmul 800 TFLOP/s."
    assert "| 1.50x |" in lines[4] and lines[4].endswith("| 1.0x |")
    bench.plot(results, top, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
    json.dumps(results)
