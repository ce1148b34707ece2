"""Other kernels for the same batches, where they are installed. Each is prepared outside the measured call."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable

import torch

from sglang_pdd.kernels.batches import Batch, indptr
from sglang_pdd.kernels.tiles import Shape

Call = Callable[[], object]


class Unfit(Exception):
    """This peer does not serve this batch, or is not installed."""


def _whole(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """``kv_indptr`` and ``kv_indices`` over prefixes and new tokens together; the new ones must be in the pool."""
    q_ends, kv_ends = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
    rows = [
        torch.cat([batch.kv_indices[a:b], batch.new_slots[c:d]])
        for a, b, c, d in zip(kv_ends, kv_ends[1:], q_ends, q_ends[1:], strict=False)
    ]
    batch.k_pool[batch.new_slots] = batch.k_new.to(batch.k_pool.dtype)
    batch.v_pool[batch.new_slots] = batch.v_new.to(batch.v_pool.dtype)
    return indptr([len(row) for row in rows], batch.q.device), torch.cat(rows)


def _news(batch: Batch) -> list[int]:
    return batch.qo_indptr.diff().tolist()


def sglang_extend(name: str, shape: Shape, batch: Batch, out: torch.Tensor, scale: float) -> Call:
    """One of SGLang's Triton kernels for new tokens over a prefix, ``module.function``: for all batches, or for few and
    equally many new tokens. None of them writes the pool, which is left out of its time."""
    module, function = name.split(".")
    attend = getattr(importlib.import_module(f"sglang.kernels.ops.attention.{module}"), function)
    k_new, v_new = batch.k_new.contiguous(), batch.v_new.contiguous()
    ends = (batch.qo_indptr.long(), batch.kv_indptr, batch.kv_indices)
    longest = max(_news(batch))
    pools = (batch.k_pool, batch.v_pool)

    def call() -> bool | None:
        served: bool | None = attend(
            batch.q, k_new, v_new, out, *pools, *ends, None, True, None, longest, 1.0, 1.0, sm_scale=scale
        )
        return served

    if call() is False:
        raise Unfit("not this batch")
    return call


def sglang_decode(shape: Shape, batch: Batch, out: torch.Tensor, scale: float) -> Call:
    """SGLang's Triton decode kernel with its default of 8 splits; one new token a request only."""
    if max(_news(batch)) > 1:
        raise Unfit("one new token a request only")
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    ends, indices = _whole(batch)
    requests, splits = len(ends) - 1, 8
    logits = torch.empty(requests, shape.heads, splits, shape.v_dim, device=out.device)
    lse = torch.empty(requests, shape.heads, splits, device=out.device)
    number = torch.full((requests,), splits, dtype=torch.int32, device=out.device)
    pools = (batch.k_pool, batch.v_pool)
    return lambda: decode_attention_fwd(
        batch.q, *pools, out, ends, indices, logits, lse, number, splits, scale, 1.0, 1.0, has_mla=shape.latent
    )


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """FlashInfer's scratch, one for all batches: they run one after the other."""
    return torch.empty(512 << 20, dtype=torch.uint8, device=device)


def flashinfer(shape: Shape, batch: Batch, out: torch.Tensor, scale: float) -> Call:
    """FlashInfer's batched prefill over a paged cache, or its MLA kernel; pages of one token, as SGLang uses it."""
    import flashinfer as library

    ends, indices = _whole(batch)
    workspace = _workspace(out.device)
    if shape.latent:
        mla = library.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
        rest = shape.qk_dim - shape.v_dim
        kinds = (batch.q.dtype, batch.k_pool.dtype)
        mla.plan(
            batch.qo_indptr, ends, indices.int(), ends.diff(), shape.heads, shape.v_dim, rest, 1, True, scale, *kinds
        )
        q, pool = batch.q, batch.k_pool
        parts = (q[..., : shape.v_dim], q[..., shape.v_dim :], pool[..., : shape.v_dim], pool[..., shape.v_dim :])
        return lambda: mla.run(*parts, out=out)
    paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    last = torch.ones(len(ends) - 1, dtype=torch.int32, device=out.device)
    paged.plan(
        batch.qo_indptr,
        ends,
        indices.int(),
        last,
        shape.heads,
        shape.kv_heads,
        shape.qk_dim,
        1,
        head_dim_vo=shape.v_dim,
        causal=True,
        sm_scale=scale,
        q_data_type=batch.q.dtype,
        kv_data_type=batch.k_pool.dtype,
    )
    pools = (batch.k_pool[:, None], batch.v_pool[:, None])
    return lambda: paged.run(batch.q, pools, out=out)


def flash_attention(version: int, shape: Shape, batch: Batch, out: torch.Tensor, scale: float) -> Call:
    """FA3 or FA4 as SGLang brings them; pages of one token."""
    if shape.latent and version != 3:
        raise Unfit("no MLA with pages")
    library = importlib.import_module(f"sglang.kernels.ops.attention.flash_attention_v{version}")
    ends, indices = _whole(batch)
    lens = ends.diff()
    table = torch.zeros(len(lens), int(lens.max()), dtype=torch.int32, device=out.device)
    for row, (a, b) in enumerate(itertools.pairwise(ends.tolist())):
        table[row, : b - a] = indices[a:b]
    longest = max(_news(batch))
    q, k, v, value_q = batch.q, batch.k_pool[:, None], batch.v_pool[:, None], None
    if shape.latent:
        value_q, q, k = q[..., : shape.v_dim].contiguous(), q[..., shape.v_dim :].contiguous(), k[..., shape.v_dim :]
    return lambda: library.flash_attn_with_kvcache(
        q=q,
        k_cache=k,
        v_cache=v,
        qv=value_q,
        page_table=table,
        cache_seqlens=lens,
        cu_seqlens_q=batch.qo_indptr,
        cu_seqlens_k_new=ends,
        max_seqlen_q=longest,
        softmax_scale=scale,
        causal=True,
        out=out,
    )


DECODE = "sglang decode (Triton)"
PEERS: dict[str, Callable[[Shape, Batch, torch.Tensor, float], Call]] = {
    "sglang extend (Triton)": functools.partial(sglang_extend, "extend_attention.extend_attention_fwd"),
    "sglang verify, split KV (Triton)": functools.partial(sglang_extend, "verify_splitkv.verify_splitkv_fwd"),
    "sglang verify, shared KV (Triton)": functools.partial(sglang_extend, "verify_mla.verify_shared_kv_fwd"),
    DECODE: sglang_decode,
    "FlashInfer": flashinfer,
    "FA3": functools.partial(flash_attention, 3),
    "FA4": functools.partial(flash_attention, 4),
}
