"""The attention kernel, interpreted, against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_pdd.kernels.batches import Batch, error, expect, make, run
from sglang_pdd.kernels.extend_decode import Plan
from sglang_pdd.kernels.tiles import Chip, Config, Shape, Tile, choose

TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
DIMS = {
    "64": (64, 64, False),
    "80": (80, 80, False),
    "96": (96, 96, False),
    "128": (128, 128, False),
    "192": (192, 128, False),
    "256": (256, 256, False),
    "mla": (576, 512, True),
}
NEWS, PREFIXES = (1, 5, 1, 17), (37, 16, 1, 70)  # decodes and relays; a page's end, a single token


def small(heads: int = 4, kv_heads: int = 2, dtype: str = "float32", kv_dtype: str = "") -> Shape:
    return Shape(heads, kv_heads, 64, 64, dtype, kv_dtype or dtype)


def check(shape: Shape, batch: Batch, config: Config | None = None, window: int = -1, write: bool = True, **options):
    """Out and LSE hold, and so does what the kernel wrote into the pool."""
    config = config or choose(Chip("interpreter", 4), shape)
    options.setdefault("scale", shape.qk_dim**-0.5)
    want_out, want_lse = expect(batch, window=window, **options)
    out, lse = run(config, shape, batch, window=window, write=write, **options)
    assert error(out, want_out) < TOLERANCE[shape.dtype]
    assert error(lse, want_lse) < TOLERANCE[shape.dtype]
    assert torch.equal(batch.k_pool[batch.new_slots], batch.k_new)
    assert torch.equal(batch.v_pool[batch.new_slots], batch.v_new)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", DIMS)
def test_head_sizes(dims: str, dtype: str) -> None:
    qk_dim, v_dim, latent = DIMS[dims]
    heads, kv_heads = (4, 1) if latent else (4, 2)
    shape = Shape(heads, kv_heads, qk_dim, v_dim, dtype, dtype, latent)
    check(shape, make(shape, NEWS, PREFIXES, page=16))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (7, 1), (10, 2), (20, 1), (40, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    shape = small(heads, kv_heads)
    check(shape, make(shape, NEWS, PREFIXES))


OPTIONS = {
    "window": {"window": 20},
    "window of one": {"window": 0},
    "window beyond everything": {"window": 1000},
    "cap": {"cap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.5},
    "all": {"window": 33, "cap": 5.0, "sinks": True, "scale": 0.3},
}


@pytest.mark.parametrize("name, write", zip(OPTIONS, itertools.cycle((True, False)), strict=False))
def test_options(name: str, write: bool) -> None:
    options = dict(OPTIONS[name])
    shape = small()
    if "sinks" in options:
        options["sinks"] = torch.tensor([-3.0, 0.0, 2.0, 60.0])
    check(shape, make(shape, NEWS, PREFIXES), write=write, **options)


@pytest.mark.parametrize("kv_dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_fp8_pool(kv_dtype: str) -> None:
    """New tokens are rounded like cached ones, and scales go in and out."""
    shape = small(dtype="float16", kv_dtype=kv_dtype)
    batch = make(shape, NEWS, PREFIXES)
    kind = getattr(torch, kv_dtype)
    k_scale, v_scale = 0.5, 2.0
    held_k, held_v = (batch.k_new / k_scale).to(kind), (batch.v_new / v_scale).to(kind)
    # Values that fp8 holds exactly: the interpreter does not carry when it rounds to fp8.
    batch.k_new, batch.v_new = held_k.half() * k_scale, held_v.half() * v_scale
    out, lse = run(choose(Chip("interpreter", 4), shape), shape, batch, scale=0.125, k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(batch.k_pool[batch.new_slots].float(), held_k.float())
    assert torch.equal(batch.v_pool[batch.new_slots].float(), held_v.float())
    batch.k_new, batch.v_new = held_k.double() * k_scale, held_v.double() * v_scale
    batch.k_pool, batch.v_pool = batch.k_pool.double() * k_scale, batch.v_pool.double() * v_scale
    want_out, want_lse = expect(batch, scale=0.125)
    assert error(out, want_out) < 2e-3 and error(lse, want_lse) < 2e-3


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31, 32, 33])
def test_ends_of_pages_and_tiles(prefix: int) -> None:
    shape = small()
    check(shape, make(shape, [1, 16, 17], [prefix] * 3, page=16))


def test_more_pieces_than_tiles() -> None:
    """Two tiles of prefix and a long edge over many blocks: some pieces hold nothing."""
    shape = small(2, 1)
    check(shape, make(shape, [40], [35]), Config((Tile(16, 16, 4, 1, 1),), cores=64))


@pytest.mark.parametrize("peel", [True, False])
def test_both_loops(peel: bool) -> None:
    shape = small()
    check(shape, make(shape, NEWS, PREFIXES), Config((Tile(32, 16, 4, 1, 1, peel),), cores=6), window=40)


def test_strided_inputs() -> None:
    """Q, K and V as views of one fused projection."""
    shape = small()
    batch = make(shape, NEWS, PREFIXES)
    fused = torch.cat([batch.q, batch.k_new, batch.v_new], 1)
    batch.q, batch.k_new, batch.v_new = fused.split([4, 2, 2], 1)
    assert not batch.k_new.is_contiguous()
    check(shape, batch)


def test_slots_far_apart() -> None:
    """Offsets beyond 2**31 elements. The pool is virtual memory of which a few pages are touched."""
    shape = Shape(2, 1, 64, 64, "float16", "float16")
    batch = make(shape, [1, 6], [20, 33])
    near = torch.cat([batch.kv_indices, batch.new_slots])
    stride = (1 << 31) // 64 // 20  # slots between two of ours
    size = (int(near.max()) + 1) * stride + 1
    assert (int(near.max()) * stride) * 64 > 1 << 31
    for name in ("k_pool", "v_pool"):
        far = torch.empty(size, 1, 64, dtype=torch.float16)
        far[near * stride] = getattr(batch, name)[near]
        setattr(batch, name, far)
    batch.kv_indices, batch.new_slots = batch.kv_indices * stride, batch.new_slots * stride
    got = run(choose(Chip("interpreter", 4), shape), shape, batch, scale=0.125)
    written = batch.k_pool[batch.new_slots], batch.v_pool[batch.new_slots]
    for pool in ("k_pool", "v_pool"):  # the reference makes fp64 copies of whole pools
        setattr(batch, pool, getattr(batch, pool)[near * stride])
    batch.kv_indices = torch.arange(len(batch.kv_indices))
    want = expect(batch, scale=0.125)
    assert error(got[0], want[0]) < 2e-3 and error(got[1], want[1]) < 2e-3
    assert torch.equal(written[0], batch.k_new) and torch.equal(written[1], batch.v_new)


def test_a_plan_serves_every_batch_within_its_bounds() -> None:
    """As a captured graph would: the same buffers and grids for other lengths, fewer requests and fewer tokens."""
    shape = small()
    config = choose(Chip("interpreter", 4), shape)
    plan = Plan(config, shape, max_requests=5, max_tokens=30, device="cpu")
    addresses = [t.data_ptr() for t in (plan.items, plan.counts, plan.requests, plan.request_of, plan.part)]
    for news, prefixes in (((1,) * 5, (50, 0, 9, 200, 1)), ((30,), (100,)), ((2, 7), (3, 64)), (NEWS, PREFIXES)):
        batch = make(shape, news, prefixes)
        want = expect(batch, scale=0.125)
        out, lse = run(config, shape, batch, plan, scale=0.125)
        assert error(out, want[0]) < 1e-5 and error(lse, want[1]) < 1e-5
    assert addresses == [t.data_ptr() for t in (plan.items, plan.counts, plan.requests, plan.request_of, plan.part)]


def test_requests_without_new_tokens() -> None:
    shape = small()
    check(shape, make(shape, [0, 3, 0, 1], [10, 40, 0, 40]))


requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 120)), min_size=1, max_size=5)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=requests.filter(lambda r: any(new for new, _ in r)),
    group=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    page=st.sampled_from([1, 4, 16]),
    cores=st.integers(1, 24),
    window=st.sampled_from([-1, -1, 7, 64]),
    dtype=st.sampled_from(sorted(TOLERANCE)),
)
def test_ragged_batches(
    requests: list[tuple[int, int]], group: int, kv_heads: int, page: int, cores: int, window: int, dtype: str
) -> None:
    shape = small(group * kv_heads, kv_heads, dtype)
    news, prefixes = zip(*requests, strict=True)
    check(shape, make(shape, news, prefixes, page=page), choose(Chip("interpreter", cores), shape), window=window)


@pytest.mark.full
@pytest.mark.timeout(3600)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=requests.filter(lambda r: any(new for new, _ in r)),
    dims=st.sampled_from(sorted(DIMS)),
    group=st.integers(1, 17),
    page=st.sampled_from([1, 4, 16, 64]),
    cores=st.integers(1, 200),
    window=st.sampled_from([-1, -1, 0, 7, 64]),
    cap=st.sampled_from([0.0, 0.0, 3.0]),
    sinks=st.booleans(),
    write=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE)),
)
def test_ragged_batches_of_every_kind(requests, dims, group, page, cores, window, cap, sinks, write, dtype) -> None:
    qk_dim, v_dim, latent = DIMS[dims]
    kv_heads = 1 if latent else 2
    shape = Shape(group * kv_heads, kv_heads, qk_dim, v_dim, dtype, dtype, latent)
    batch = make(shape, *zip(*requests, strict=True), page=page)
    options = {"cap": cap, "sinks": torch.linspace(-3, 3, shape.heads) if sinks else None}
    check(shape, batch, choose(Chip("interpreter", cores), shape), window=window, write=write, **options)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("prefix, news", itertools.product((1, 64, 1000, 4096), ((1,), (4, 1), (16, 1, 1), (64,))))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_long_prefixes(prefix: int, news: tuple[int, ...], dtype: str) -> None:
    shape = small(8, 2, dtype)
    check(shape, make(shape, news, [prefix] * len(news), page=16), choose(Chip("interpreter", 16), shape))
