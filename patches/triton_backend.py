"""The attention backend itself, imported where SGLang makes one: it derives from SGLang's class."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_pdd.kernels.batches import indptr
from sglang_pdd.kernels.extend_decode import Plan, extend_decode, this_chip
from sglang_pdd.kernels.tiles import MLA, Chip, Config, Shape, Unsupported, choose
from sglang_pdd.patches.attention import MOST_NEW, better

logger = logging.getLogger(__name__)


class PddTritonAttnBackend(TritonAttnBackend):
    """Takes over extend batches that `better` names, layer by layer where the kernel knows the layer.

    Everything else is SGLang's: decode steps, captured graphs, long prefills, layers with what the kernel lacks. Extend
    passes run outside of captured graphs, so their plans are made anew, for all layers of a pass together.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.served = 0  # batches
        self.chip: Chip | None = None
        try:
            self.chip = self._usable_chip()
            self._compile(model_runner.model, model_runner.dtype)
        except Unsupported as reason:
            logger.info("pdd: all attention is SGLang's own: %s", reason)
        except Exception:  # a compiler that fails must not keep the server from starting
            self.chip = None
            logger.exception("pdd: our kernel cannot be compiled here; all attention is SGLang's own")
        else:
            logger.info("pdd: extend passes over long prefixes go to our kernel")

    def _usable_chip(self) -> Chip:
        pool = self.token_to_kv_pool
        if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool) or getattr(pool, "is_quantized_kv_cache", False):
            raise Unsupported(f"the layout of {type(pool).__name__}")
        if self.dcp_size > 1 or self.enable_deterministic or self.dllm_attention is not None:
            raise Unsupported("decode context parallelism, deterministic inference or a diffusion model")
        return this_chip()

    def _compile(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """All that the model's layers may need: the first relayed request must not hold up the running ones for it."""
        layers = [layer for layer in model.modules() if isinstance(layer, RadixAttention) and _known(layer)]
        for layer in {(_dims(layer), layer.sliding_window_size, layer.logit_cap): layer for layer in layers}.values():
            fit = self._fit(layer, dtype, MOST_NEW)
            if fit is None:
                continue
            shape, config = fit
            news = [max(1, tile.m // shape.group) for tile in config.tiles]  # a request for each
            ends = indptr(news, self.device)
            plan = Plan(config, shape, len(news), sum(news), self.device)
            plan.update(ends, indptr([1] * len(news), self.device), layer.sliding_window_size)
            q = torch.zeros(sum(news), shape.heads, shape.qk_dim, dtype=dtype, device=self.device)
            # Slot 0 is SGLang's for what nobody reads.
            slots = torch.zeros(sum(news), dtype=torch.int64, device=self.device)
            out = q.new_empty(sum(news), shape.heads, shape.v_dim)
            kv = q[:, : shape.kv_heads]
            self._run(layer, plan, q, kv, kv[..., : shape.v_dim], slots, slots[: len(news)], out)

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
        shape, metadata = plan.shape, self.forward_metadata
        out = q.new_empty(q.shape[0], shape.heads, shape.v_dim)
        q, k = q.view(-1, shape.heads, shape.qk_dim), k.view(-1, shape.kv_heads, shape.qk_dim)
        v = v.view(-1, shape.kv_heads, shape.v_dim)
        prefixes = metadata.kv_indices if plan.window < 0 else metadata.window_kv_indices
        self._run(layer, plan, q, k, v, forward_batch.out_cache_loc, prefixes, out, sinks)
        return out.view(q.shape[0], -1)

    def _run(
        self,
        layer: Any,
        plan: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        prefixes: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        pool = self.token_to_kv_pool
        k_scale, v_scale = (1.0, 1.0) if layer.k_scale is None else (layer.k_scale_float, layer.v_scale_float)
        extend_decode(
            q,
            k,
            v,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            slots,
            prefixes,
            out,
            plan,
            scale=layer.scaling,
            cap=layer.logit_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=k_scale if plan.shape.latent else v_scale,  # values are keys
        )

    def _plan(self, layer: Any, q: torch.Tensor, forward_batch: Any) -> Plan | None:
        """This batch's plan for layers like this one; None: SGLang's kernel serves the layer."""
        metadata, window = self.forward_metadata, layer.sliding_window_size
        plans = getattr(metadata, "pdd_plans", None)  # captured metadata has none
        if plans is None or (window >= 0 and metadata.window_kv_indices is None):
            return None
        key = (_dims(layer), layer.k_scale is None, window)
        if key in plans:
            return plans[key]
        plan, requests = None, forward_batch.batch_size
        fit = self._fit(layer, q.dtype, max(forward_batch.extend_seq_lens_cpu))
        if fit is not None:
            shape, config = fit
            plan = Plan(config, shape, requests, q.shape[0], self.device)
            # SGLang packs a window's prefix as a list of its own; distances to the new tokens are the same in it.
            prefixes = metadata.kv_indptr if window < 0 else metadata.window_kv_indptr
            plan.update(metadata.qo_indptr.int(), prefixes[: requests + 1], window)
        plans[key] = plan
        return plan

    def _fit(self, layer: Any, dtype: torch.dtype, most_new: int) -> tuple[Shape, Config] | None:
        """How the kernel serves this layer; None: not at all."""
        pool, dims = self.token_to_kv_pool.get_key_buffer(layer.layer_id), _dims(layer)
        shape = Shape(*dims, _name(dtype), _name(pool.dtype), latent=dims[2:] == MLA)
        if pool.shape[1:] != (shape.kv_heads, shape.qk_dim) or (layer.k_scale is not None and dtype == pool.dtype):
            return None
        config = _config(self.chip, shape, most_new)
        return None if config is None else (shape, config)


def _dims(layer: Any) -> tuple[int, int, int, int]:
    """Heads, KV heads, size of a key, size of a value."""
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim


def _known(layer: Any) -> bool:
    """Whether the kernel computes what this layer means."""
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and layer.xai_temperature_len <= 0
        and (layer.logit_cap == 0 or layer.logit_capping_method == "tanh")
        and (layer.k_scale is None) == (layer.k_scale_float is None or layer.v_scale_float is None)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _config(chip: Chip, shape: Shape, most_new: int) -> Config | None:
    try:
        return choose(chip, shape, most_new)
    except Unsupported:
        return None
