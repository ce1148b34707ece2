"""The attention backend itself, imported where SGLang makes one: it derives from SGLang's class."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_pdd.kernels.extend_decode import Plan, extend_decode, this_chip
from sglang_pdd.kernels.tiles import MLA, Chip, Config, Shape, Unsupported, choose
from sglang_pdd.patches.attention import better

logger = logging.getLogger(__name__)


class PddTritonAttnBackend(TritonAttnBackend):
    """Takes over extend batches that `better` names, layer by layer where the kernel knows the layer.

    Everything else is SGLang's: decode steps, captured graphs, long prefills, layers with what the kernel lacks. Extend
    passes run outside of captured graphs, so their plans are made anew, for all layers of a pass together.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.served = 0  # batches
        try:
            self.chip: Chip | None = this_chip()
        except Unsupported:
            self.chip = None
        pool = self.token_to_kv_pool
        plain = type(pool) in (MHATokenToKVPool, MLATokenToKVPool) and self.dcp_size == 1
        if not plain or self.enable_deterministic or self.dllm_attention is not None:
            self.chip = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """SGLang's, with room for our plans if this batch is ours: the metadata object carries them."""
        super().init_forward_metadata(forward_batch)
        ours = (
            self.chip is not None
            and (forward_batch.forward_mode.is_extend() and forward_batch.spec_info is None)
            and better(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)
        )
        self.forward_metadata.pdd_plans = {} if ours else None
        if ours and not self.served:
            logger.info("pdd: the first batch for our attention kernel: %s", forward_batch.extend_seq_lens_cpu)
        self.served += ours

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> torch.Tensor:
        """Out ``[tokens, heads * v_dim]``."""
        plan = None
        if k is not None and save_kv_cache and score_mod is None and _known(layer):
            plan = self._plan(layer, q, forward_batch)
        if plan is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks, score_mod, aux_tensors)
        shape, metadata, pool = plan.shape, self.forward_metadata, self.token_to_kv_pool
        out = q.new_empty(q.shape[0], shape.heads, shape.v_dim)
        extend_decode(
            q.view(-1, shape.heads, shape.qk_dim),
            k.view(-1, shape.kv_heads, shape.qk_dim),
            v.view(-1, shape.kv_heads, shape.v_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            forward_batch.out_cache_loc,
            metadata.kv_indices if plan.window < 0 else metadata.window_kv_indices,
            out,
            plan,
            scale=layer.scaling,
            cap=layer.logit_cap,
            sinks=sinks,
        )
        return out.view(q.shape[0], -1)

    def _plan(self, layer: Any, q: torch.Tensor, forward_batch: Any) -> Plan | None:
        """This batch's plan for layers like this one; None: SGLang's kernel serves the layer."""
        metadata, window = self.forward_metadata, layer.sliding_window_size
        plans = getattr(metadata, "pdd_plans", None)  # captured metadata has none
        if plans is None or (window >= 0 and metadata.window_kv_indices is None):
            return None
        k_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        dims = (layer.qk_head_dim, layer.v_head_dim)
        heads = (layer.tp_q_head_num, layer.tp_k_head_num)
        shape = Shape(*heads, *dims, _name(q.dtype), _name(k_pool.dtype), latent=dims == MLA)
        if (shape, window) in plans:
            return plans[shape, window]
        plan = None
        most_new, requests = max(forward_batch.extend_seq_lens_cpu), forward_batch.batch_size
        config = _config(self.chip, shape, most_new)
        if config is not None and k_pool.shape[1:] == (shape.kv_heads, shape.qk_dim):
            plan = Plan(config, shape, requests, q.shape[0], self.device)
            # SGLang packs a window's prefix as a list of its own; distances to the new tokens are the same in it.
            prefixes = metadata.kv_indptr if window < 0 else metadata.window_kv_indptr
            plan.update(metadata.qo_indptr, prefixes[: requests + 1], window)
        plans[shape, window] = plan
        return plan


def _known(layer: Any) -> bool:
    """Whether the kernel computes what this layer means."""
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and layer.xai_temperature_len <= 0
        and layer.k_scale is None
        and (layer.logit_cap == 0 or layer.logit_capping_method == "tanh")
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _config(chip: Chip, shape: Shape, most_new: int) -> Config | None:
    try:
        return choose(chip, shape, most_new)
    except Unsupported:
        return None
