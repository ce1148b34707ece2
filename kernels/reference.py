"""The reference: attention of new tokens over a paged prefix, in fp64, one request after another."""

from __future__ import annotations

import torch


def extend_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    scale: float,
    window: int = -1,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out ``[tokens, heads, v_dim]`` and LSE ``[tokens, heads]`` (natural logarithm, sinks counted), both fp64.

    ``q``: ``[tokens, heads, qk_dim]``; ``k_new``, ``v_new``: ``[tokens, kv_heads, dim]``; pools:
    ``[slots, kv_heads, dim]``. Request ``i`` owns tokens ``qo_indptr[i]:qo_indptr[i + 1]``; its prefix is in the slots
    ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``. ``window``: how many earlier tokens a token sees; negative: all.
    ``cap``: logits become ``cap * tanh(logits / cap)``; 0: they don't. ``sinks``: ``[heads]``, a logit without a value.
    MLA is one KV head whose values are the first ``v_dim`` columns of its keys.
    """
    q, k_new, v_new, k_pool, v_pool = (x.double() for x in (q, k_new, v_new, k_pool, v_pool))
    out = q.new_empty(q.shape[0], q.shape[1], v_new.shape[2])
    lse = q.new_empty(q.shape[0], q.shape[1])
    group = q.shape[1] // k_new.shape[1]
    q_ends, kv_ends = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(q_ends) - 1):
        tokens = slice(q_ends[i], q_ends[i + 1])
        slots = kv_indices[kv_ends[i] : kv_ends[i + 1]].long()
        keys = torch.cat([k_pool[slots], k_new[tokens]]).repeat_interleave(group, 1)
        values = torch.cat([v_pool[slots], v_new[tokens]]).repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q[tokens], keys) * scale
        if cap > 0:
            logits = cap * torch.tanh(logits / cap)
        ahead = torch.arange(keys.shape[0]) - (torch.arange(logits.shape[1]) + len(slots))[:, None]
        logits.masked_fill_(((ahead > 0) | (ahead < -window if window >= 0 else False)).to(q.device), -torch.inf)
        total = logits.logsumexp(2)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()[:, None])
        out[tokens] = torch.einsum("hqk,khd->qhd", (logits - total[:, :, None]).exp(), values)
        lse[tokens] = total.T
    return out, lse
