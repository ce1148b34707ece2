"""Measures the extend-decode kernel on this machine's GPU: ``python -m sglang_pdd.kernels.bench [--check]``.

Needs torch and Triton. Ceilings are the card's own: a copy and a matrix product, measured first. Every figure is the
median of runs timed on the device, each a replayed CUDA graph on other inputs than the run before.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from sglang_pdd.kernels.batches import Batch, error, expect, indptr, make, run
from sglang_pdd.kernels.extend_decode import Plan, extend_decode, this_chip
from sglang_pdd.kernels.peers import DECODE, PEERS, Unfit
from sglang_pdd.kernels.tiles import MLA, Chip, Shape, Unsupported, choose

KINDS = {
    "GQA 4": Shape(32, 8, 128, 128),
    "GQA 8": Shape(64, 8, 128, 128),
    "MLA": Shape(128, 1, 576, 512, latent=True),
}
NEWS, PREFIXES, BATCHES = (1, 4, 16, 64, 256), (4 << 10, 32 << 10, 64 << 10, 128 << 10), (1, 8, 32)
DEVICE = "cuda"
PAGE = 16
RUNS = 15
WORKERS = 16  # of the check: each has the GPU open
AHEAD_CYCLES = 20_000_000  # of the device's clock, about 10 ms: as long as it takes to launch all runs of a case
COLD_BYTES = 256 << 20  # between two uses of the same input at least so much else is read: several times any L2


@dataclass(frozen=True)
class Case:
    """Request ``i`` brings ``news[i]`` tokens over a prefix of ``prefixes[i]``."""

    kind: str
    name: str
    news: tuple[int, ...]
    prefixes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What has to cross the memory's pins at least: KV once, Q and out once."""
        shape = KINDS[self.kind]
        width = shape.qk_dim + (0 if shape.latent else shape.v_dim)
        kv = (sum(self.prefixes) + 2 * sum(self.news)) * shape.kv_heads * width  # new tokens: read and written
        return 2 * (kv + sum(self.news) * shape.heads * (shape.qk_dim + shape.v_dim))

    @property
    def slots(self) -> int:
        """Of the pool, in whole pages."""
        return sum(-(-(n + p) // PAGE) * PAGE for n, p in zip(self.news, self.prefixes, strict=True))

    @property
    def flops(self) -> int:
        """Two products over what each token sees."""
        shape = KINDS[self.kind]
        pairs = sum(n * p + n * (n + 1) // 2 for n, p in zip(self.news, self.prefixes, strict=True))
        return 2 * pairs * shape.heads * (shape.qk_dim + shape.v_dim)


def cases() -> list[Case]:
    """The default set: uniform batches, then ragged ones, in an order that spreads over it if time runs out."""
    uniform = [
        Case(kind, f"{batch} x {new} over {prefix >> 10}K", (new,) * batch, (prefix,) * batch)
        for kind in KINDS
        for new in NEWS
        for prefix in PREFIXES
        for batch in BATCHES
    ]
    random.Random(0).shuffle(uniform)
    lens = tuple(random.Random(1).choices(range(2 << 10, 64 << 10), k=30))
    ragged = [
        Case(kind, f"30 decodes, 2 x {new}, {spread}", (1,) * 30 + (new, new), prefixes)
        for kind in KINDS
        for new in (16, 64, 256)
        for spread, prefixes in (("32K each", (32 << 10,) * 32), ("2K to 64K", (*lens, 64 << 10, 64 << 10)))
    ]
    first = [c for c in uniform if c.prefixes[0] == 64 << 10 and len(c.news) in (1, 8)]
    return first + ragged + [c for c in uniform if c not in first]


# --- timing ---------------------------------------------------------------------------------------------------------


def median_us(calls: Sequence[Callable[[], object]], runs: int = RUNS) -> float:
    """Median device time of a call in microseconds; ``calls`` do the same on different inputs and take turns."""
    graphs = []
    for call in calls:
        call()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(max(runs, len(graphs)) + 2)]
    torch.cuda._sleep(AHEAD_CYCLES)  # all is launched before the first one runs: no launch is in a time
    for i, (begin, end) in enumerate(events):
        begin.record()
        graphs[i % len(graphs)].replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events[2:])


def eager_us(calls: Sequence[Callable[[], object]], runs: int = RUNS) -> float:
    """Microseconds of a call without a graph, as SGLang runs its mixed passes: of the host or the device, whichever is
    slower."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(runs):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / runs * 1e6


def ceilings() -> dict[str, float]:
    """The card's copy bandwidth in bytes/s (read and written) and its bf16 matrix rate in FLOP/s."""
    source, target = (torch.empty(1 << 30, dtype=torch.int32, device=DEVICE) for _ in range(2))
    copy = 2 * source.nbytes / median_us([lambda: target.copy_(source)]) * 1e6
    best = 0.0
    for n in (4096, 8192, 16384):
        a, b, out = (torch.randn(n, n, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
        best = max(best, 2 * n**3 / median_us([functools.partial(torch.mm, a, b, out=out)]) * 1e6)
    return {"copy_bytes_per_s": copy, "matmul_flop_per_s": best}


def slots_for(shape: Shape) -> int:
    """The largest case, as far as a third of the free memory goes."""
    per_slot = 2 * shape.kv_heads * (shape.qk_dim + (0 if shape.latent else shape.v_dim))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return min(max(case.slots for case in cases()), free // 3 // per_slot // PAGE * PAGE)


class Pool:
    """KV for all cases: one pool of random numbers, from which every batch gets pages in random order."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self.k = torch.empty(slots, shape.kv_heads, shape.qk_dim, dtype=torch.bfloat16, device=DEVICE).normal_()
        self.v = self.k[..., : shape.v_dim]
        if not shape.latent:
            self.v = torch.empty(slots, shape.kv_heads, shape.v_dim, dtype=torch.bfloat16, device=DEVICE).normal_()

    def batches(self, case: Case) -> list[Batch]:
        """Batches on pages of their own, so many that none is in the cache when its turn comes again."""
        shape, tokens = KINDS[case.kind], sum(case.news)
        lens = [-(-(n + p) // PAGE) * PAGE for n, p in zip(case.news, case.prefixes, strict=True)]
        number = max(1, min(-(-COLD_BYTES // case.bytes) + 1, len(self.k) // case.slots))
        pages = torch.randperm(len(self.k) // PAGE, device=DEVICE)
        slots = (pages[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
        made = []
        for i in range(number):
            rows = slots[i * sum(lens) : (i + 1) * sum(lens)].split(lens)
            old = torch.cat([row[:p] for row, p in zip(rows, case.prefixes, strict=True)])
            new = torch.cat([r[p : p + n] for r, p, n in zip(rows, case.prefixes, case.news, strict=True)])
            q = torch.randn(tokens, shape.heads, shape.qk_dim, dtype=torch.bfloat16, device=DEVICE)
            k = torch.randn(tokens, shape.kv_heads, shape.qk_dim, dtype=torch.bfloat16, device=DEVICE)
            v = k[..., : shape.v_dim] if shape.latent else torch.randn_like(k[..., : shape.v_dim])
            ends = indptr(case.news, DEVICE), indptr(case.prefixes, DEVICE)
            made.append(Batch(q, k, v, self.k, self.v, new, *ends, old))
        return made


def measure(case: Case, pool: Pool, chip: Chip, with_peers: bool, keep: Callable[[dict[str, Any]], object]) -> None:
    """Times of our kernel and of its peers in microseconds; None with a reason where there is none.

    ``keep`` gets the result with our times, before any peer runs; what peers take is added to it.
    """
    shape = KINDS[case.kind]
    scale = shape.qk_dim**-0.5
    batches = pool.batches(case)
    outs = [torch.empty(len(b.q), shape.heads, shape.v_dim, dtype=b.q.dtype, device=DEVICE) for b in batches]
    plan = Plan(choose(chip, shape, max(case.news)), shape, len(case.news), sum(case.news), DEVICE)
    plan.update(batches[0].qo_indptr, batches[0].kv_indptr)

    def ours(batch: Batch, out: torch.Tensor) -> Callable[[], None]:
        return lambda: extend_decode(*batch.inputs, batch.new_slots, batch.kv_indices, out, plan, scale=scale)

    result: dict[str, Any] = {**dataclasses.asdict(case), "bytes": case.bytes, "flops": case.flops, "peers": {}}
    result["us"] = median_us([ours(batch, out) for batch, out in zip(batches, outs, strict=True)])
    result["eager_us"] = eager_us([ours(batch, out) for batch, out in zip(batches, outs, strict=True)])
    result["plan_us"] = median_us([lambda: plan.update(batches[0].qo_indptr, batches[0].kv_indptr)])
    keep(result)
    for name, peer in PEERS.items() if with_peers else ():
        try:
            theirs = [torch.empty_like(out) for out in outs]
            calls = [peer(shape, batch, out, scale) for batch, out in zip(batches, theirs, strict=True)]
            us = median_us(calls)
            result["peers"][name] = {"us": us, "difference": error(theirs[0], outs[0].double())}
        except Unfit:
            continue
        except Exception as problem:  # not installed, not for this card, not for this shape: said, and gone on
            result["peers"][name] = {"us": None, "why": f"{type(problem).__name__}: {problem}"[:160]}
            torch.cuda.synchronize()


# --- correctness ----------------------------------------------------------------------------------------------------

LIMITS = {"float16": 2e-3, "bfloat16": 1e-2}
CHECKED = (  # qk_dim, v_dim, heads, KV heads
    (64, 64, 8, 2),
    (80, 80, 8, 8),
    (96, 96, 14, 2),
    (128, 128, 32, 8),
    (192, 128, 16, 2),
    (256, 256, 8, 1),
    (576, 512, 128, 1),
    (576, 512, 16, 1),
)
FP8_KINDS = ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz")
DTYPES = (("bfloat16",) * 2, ("float16",) * 2, *(("bfloat16", kind) for kind in FP8_KINDS))
SCALES = (0.4, 2.5)  # of K and V in an fp8 pool, with all masks
LAST_PLACE = 0.26  # of a value in fp8, at most
RAGGED = ((1, 1, 16, 3, 1, 64, 200), (4096, 1, 5000, 0, 33, 2000, 777))


Combination = tuple[tuple[int, int, int, int], tuple[str, str], bool]


def check(chip: Chip) -> bool:
    """The kernel against fp64 on this GPU; prints one line each. Whether all hold.

    Nearly all of the time is the compiler's, so combinations are checked side by side.
    """
    combinations = list(itertools.product(CHECKED, DTYPES, (False, True)))
    context = multiprocessing.get_context("spawn")
    fine = True
    with ProcessPoolExecutor(min(len(combinations), os.cpu_count() or 1, WORKERS), context) as pool:
        for one in [pool.submit(check_one, chip, each) for each in combinations]:
            try:
                verdict, line = one.result()
            except BrokenProcessPool:
                print("FAIL a process of the check has died, and with it the rest of the check", flush=True)
                return False
            print(f"{verdict:5}{line}", flush=True)
            fine &= verdict != "FAIL"
    return fine


def check_one(chip: Chip, combination: Combination) -> tuple[str, str]:
    """``ok``, ``FAIL``, or nothing where there are no tiles; and what was found."""
    dims, (dtype, kv_dtype), masked = combination
    qk_dim, v_dim, heads, kv_heads = dims
    shape = Shape(heads, kv_heads, qk_dim, v_dim, dtype, kv_dtype, latent=(qk_dim, v_dim) == MLA)
    what = f"{qk_dim}/{v_dim}, {heads}/{kv_heads} heads, {dtype}, KV {kv_dtype}{', all masks' if masked else ''}"
    options: dict[str, Any] = {"scale": qk_dim**-0.5}
    is_fp8, k_scale, v_scale = kv_dtype in FP8_KINDS, 1.0, 1.0
    if masked:
        options |= {"window": 100, "cap": 5.0, "sinks": torch.randn(heads, device=DEVICE)}
        if is_fp8:
            k_scale, v_scale = SCALES[0], SCALES[0] if shape.latent else SCALES[1]
    try:
        config = choose(chip, shape)
        batch = make(shape, *RAGGED, page=16, device=DEVICE)
        got = run(config, shape, batch, **options, k_scale=k_scale, v_scale=v_scale)
        batch.k_pool, batch.v_pool = batch.k_pool.double() * k_scale, batch.v_pool.double() * v_scale
        rounded = batch.k_pool[batch.new_slots], batch.v_pool[batch.new_slots]
        for new, there in zip((batch.k_new.double(), batch.v_new.double()), rounded, strict=True):
            if not ((there - new).abs() <= (LAST_PLACE * new.abs() + 1e-2 if is_fp8 else 0.0)).all():
                return "FAIL", f"{what}: the pool does not hold the new tokens"
        batch.k_new, batch.v_new = rounded
        off = [error(*pair) for pair in zip(got, expect(batch, **options), strict=True)]
    except Unsupported as reason:
        return "", f"{what}: {reason}"
    except Exception as problem:  # one line each, so that one run shows them all
        return "FAIL", f"{what}: {type(problem).__name__}: {problem}"[:300]
    good = all(one < LIMITS[dtype] for one in off)
    return "ok" if good else "FAIL", f"{what}: out {off[0]:.1e}, LSE {off[1]:.1e}"


# --- reports --------------------------------------------------------------------------------------------------------


def shares(result: dict[str, Any], top: dict[str, float]) -> tuple[float, float, float]:
    """Of the copy bandwidth, of the matrix rate, and of whichever of the two binds."""
    seconds = result["us"] * 1e-6
    memory = result["bytes"] / seconds / top["copy_bytes_per_s"]
    compute = result["flops"] / seconds / top["matmul_flop_per_s"]
    return memory, compute, max(memory, compute)


def table(results: Sequence[dict[str, Any]], top: dict[str, float]) -> Iterator[str]:
    """Markdown. The last columns: how many times as long the peers take; and as many decode steps as the longest
    request has new tokens, by SGLang's decode kernel where it is there, else by ours."""
    copy, matmul = top["copy_bytes_per_s"] / 1e12, top["matmul_flop_per_s"] / 1e12
    yield f"Measured on this card: copy {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s."
    yield ""
    yield f"| | batch | us | of copy | of matmul | {' | '.join(PEERS)} | as decode steps |"
    yield "|---|---|---|---|---|" + "---|" * (len(PEERS) + 1)
    steps = {
        (r["kind"], r["prefixes"]): r["peers"].get(DECODE, {}).get("us") or r["us"]
        for r in results
        if set(r["news"]) == {1}
    }
    for result in results:
        memory, compute, _ = shares(result, top)
        columns = []
        for peer in PEERS:
            us = result["peers"].get(peer, {}).get("us")
            columns.append(f"{us / result['us']:.2f}x" if us else "")
        step = steps.get((result["kind"], result["prefixes"]))
        columns.append(f"{step * max(result['news']) / result['us']:.1f}x" if step else "")
        cells = (result["kind"], result["name"], f"{result['us']:.0f}", f"{memory:.0%}", f"{compute:.0%}", *columns)
        yield f"| {' | '.join(cells)} |"


def plot(results: Sequence[dict[str, Any]], top: dict[str, float], file: Path) -> None:
    """The roofline, and where each case lies under it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    xs = [2**i for i in range(11)]
    axes.loglog(xs, [min(x * top["copy_bytes_per_s"], top["matmul_flop_per_s"]) / 1e12 for x in xs], "k")
    for kind in KINDS:
        own = [r for r in results if r["kind"] == kind]
        axes.loglog([r["flops"] / r["bytes"] for r in own], [r["flops"] / r["us"] / 1e6 for r in own], ".", label=kind)
    axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.legend()
    figure.savefig(file, dpi=150, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if the check failed."""
    parser = argparse.ArgumentParser(description="Measure the extend-decode kernel on this machine's GPU.")
    parser.add_argument("--check", action="store_true", help="first compare with fp64, on the GPU")
    parser.add_argument("--only-check", action="store_true", help="compare, and measure nothing")
    parser.add_argument("--no-peers", action="store_true", help="leave other kernels out")
    parser.add_argument("--seconds", type=float, default=420, help="start no more cases after this time (default: 420)")
    parser.add_argument("--out", type=Path, default=Path("bench-kernels"), help="folder for JSON, table and plot")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    if not torch.cuda.is_available():
        print(
            "No GPU here, so nothing can be measured: no bandwidth, no FLOP rate, no comparison with other kernels.\n"
            "What a CPU can do: correctness, `TRITON_INTERPRET=1 python -m pytest tests/kernels`;\n"
            "registers, spills and shared memory of all configurations, `python -m sglang_pdd.kernels.resources`."
        )
        return 0
    try:
        chip = this_chip()
    except Unsupported as problem:
        print(problem)
        return 0
    card = {
        "gpu": torch.cuda.get_device_name(),
        "chip": dataclasses.asdict(chip),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python -m sglang_pdd.kernels.bench", *(sys.argv[1:] if argv is None else argv)]),
    }
    print(", ".join(f"{key} {value}" for key, value in card.items()))
    fine = check(chip) if args.check or args.only_check else True
    if args.only_check:
        return 0 if fine else 1

    top = ceilings()
    results: list[dict[str, Any]] = []
    left_out: list[str] = []
    pools: dict[tuple[int, int], Pool] = {}
    args.out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        found = {**card, **top, "left_out": left_out, "results": results}
        (args.out / "results.json").write_text(json.dumps(found, indent=1))

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        memory, compute, _ = shares(result, top)
        took = f"{result['us']:.0f} us, {memory:.0%} of copy, {compute:.0%} of matmul"
        print(f"{result['kind']}, {result['name']}: {took}", flush=True)

    for case in cases():
        shape = KINDS[case.kind]
        layout = (shape.kv_heads, shape.qk_dim)
        if layout not in pools:
            pools[layout] = Pool(shape, slots_for(shape))
        if time.monotonic() - begin > args.seconds:
            left_out.append(f"{case.kind}: {case.name}: no time")
            continue
        if case.slots > len(pools[layout].k):
            left_out.append(f"{case.kind}: {case.name}: no memory")
            continue
        try:
            measure(case, pools[layout], chip, not args.no_peers, keep)
        except Exception as problem:  # of the compiler, of CUDA: what was measured so far is kept
            left_out.append(f"{case.kind}: {case.name}: {type(problem).__name__}: {problem}"[:300])
            fine = False
        write()
    results.sort(key=lambda r: (r["kind"], "decodes" in r["name"], len(r["news"]), r["prefixes"], max(r["news"])))
    write()

    text = "\n".join(table(results, top)) + "\n"
    (args.out / "table.md").write_text(text)
    print(text)
    try:
        plot(results, top, args.out / "roofline.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    if left_out:
        print(f"{len(left_out)} of {len(cases())} cases left out; results.json says which and why")
    print(f"{args.out}/: results.json, table.md, roofline.png; {time.monotonic() - begin:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
