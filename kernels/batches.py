"""Random ragged batches, and the kernel beside its reference: for tests, checks on a GPU and the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_pdd.kernels import reference
from sglang_pdd.kernels.extend_decode import Plan, extend_decode
from sglang_pdd.kernels.tiles import Config, Shape


@dataclass
class Batch:
    """Tensors of one batch, as `extend_decode` takes them."""

    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    new_slots: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, the new K and V, the pools."""
        return (self.q, self.k_new, self.v_new, self.k_pool, self.v_pool)


def make(
    shape: Shape,
    news: Sequence[int],
    prefixes: Sequence[int],
    *,
    page: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Batch:
    """A batch whose request ``i`` brings ``news[i]`` tokens over ``prefixes[i]`` cached ones.

    Its pages are all over the pool. Whatever else the pool holds is NaN, the places of the new tokens too.
    """
    rng = torch.Generator(device).manual_seed(seed)
    kind, kv_kind = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
    tokens, lens = sum(news), [n + p for n, p in zip(news, prefixes, strict=True)]
    pages = [-(-length // page) for length in lens]
    order = torch.randperm(sum(pages) + 1, generator=rng, device=device)
    where, first = [], 0
    for length, number in zip(lens, pages, strict=True):
        own = order[first : first + number, None] * page + torch.arange(page, device=device)
        where.append(own.flatten()[:length])
        first += number
    old = torch.cat([w[:p] for w, p in zip(where, prefixes, strict=True)])
    fresh = torch.cat([w[p:] for w, p in zip(where, prefixes, strict=True)])

    def normal(rows: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(rows, heads, width, generator=rng, device=device)

    def pool(width: int) -> torch.Tensor:
        full = torch.full((len(order) * page, shape.kv_heads, width), torch.nan, device=device)
        full[old] = normal(len(old), shape.kv_heads, width)
        return full.to(kv_kind)

    q = normal(tokens, shape.heads, shape.qk_dim).to(kind)
    k_new, k_pool = normal(tokens, shape.kv_heads, shape.qk_dim).to(kind), pool(shape.qk_dim)
    if shape.latent:
        v_new, v_pool = k_new[..., : shape.v_dim], k_pool[..., : shape.v_dim]
    else:
        v_new, v_pool = normal(tokens, shape.kv_heads, shape.v_dim).to(kind), pool(shape.v_dim)
    return Batch(q, k_new, v_new, k_pool, v_pool, fresh, indptr(news, device), indptr(prefixes, device), old)


def indptr(lens: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """``[0, lens[0], lens[0] + lens[1], ...]``, int32."""
    return torch.tensor([0, *lens], device=device).cumsum(0).int()


def run(
    config: Config,
    shape: Shape,
    batch: Batch,
    plan: Plan | None = None,
    *,
    window: int = -1,
    write: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's out and LSE; what it fails to write is NaN."""
    tokens, device = batch.q.shape[0], batch.q.device
    plan = plan or Plan(config, shape, batch.qo_indptr.shape[0] - 1, tokens, device)
    plan.part.fill_(torch.nan)
    plan.part_lse.fill_(torch.nan)
    plan.update(batch.qo_indptr, batch.kv_indptr, window)
    out = torch.full((tokens, shape.heads, shape.v_dim), torch.nan, dtype=batch.q.dtype, device=device)
    lse = torch.full((tokens, shape.heads), torch.nan, device=device)
    if not write:
        batch.k_pool[batch.new_slots] = batch.k_new.to(batch.k_pool.dtype)
        batch.v_pool[batch.new_slots] = batch.v_new.to(batch.v_pool.dtype)
    extend_decode(*batch.inputs, batch.new_slots, batch.kv_indices, out, plan, lse=lse, write=write, **options)
    return out, lse


def expect(batch: Batch, *, window: int = -1, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's out and LSE."""
    ends = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices)
    return reference.extend_attention(*batch.inputs, *ends, window=window, **options)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest deviation, relative to the largest value; NaN if anything was not written."""
    return float((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30))
