"""What of a request's sampling goes with a relay, and which requests get none."""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pdd.protocol import MAX_ENTRIES, MAX_NAMED_IDS, MAX_PROCESSOR, MAX_ROOMS, MAX_TEXT, Request


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as a map of plain values."""
    wire = {name: getattr(params, name) for name in params.__struct_fields__}
    wire["custom_params"] = _own_params(params.custom_params)
    return {k: sorted(v) if isinstance(v, set) else v for k, v in wire.items() if _plain(v)}


def sampling_from_wire(wire: dict[str, Any]) -> SamplingParams:
    """Raises ValueError for anything that is not a valid set of parameters."""
    known = set(SamplingParams.__struct_fields__)
    if unknown := set(wire) - known:
        raise ValueError(f"unknown sampling parameters {sorted(unknown)}")
    wire = dict(wire)
    if wire.get("stop_token_ids") is not None:
        wire["stop_token_ids"] = set(wire["stop_token_ids"])
    params = SamplingParams(**wire)
    return msgspec.convert(msgspec.to_builtins(params), SamplingParams)


def _plain(value: Any) -> bool:
    """Does it fit into a message?"""
    if isinstance(value, dict):
        return len(value) <= MAX_ENTRIES and all(isinstance(k, str) and _plain(v) for k, v in value.items())
    if isinstance(value, (list, set)):
        return len(value) <= MAX_ROOMS and all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def request_of(req: Any) -> Request:
    """What a relay must know of P's request."""
    return Request(
        req.origin_input_ids,
        sampling_to_wire(req.pdd_sampling),
        req.return_logprob,
        req.logprob.top_logprobs_num if req.return_logprob else 0,
        tuple(req.logprob.token_ids_logprob or ()) if req.return_logprob else (),
        req.custom_logit_processor or "",
        bool(req.require_reasoning),
        req.extra_key or "",
        req.cache_salt or "",
    )


def obstacle(req: Any) -> str | None:
    """Why this request can't be relayed; None if it can. What is named here is served as P-MD."""
    params = req.pdd_sampling
    sendable = (_plain(_own_params(getattr(params, name))) for name in params.__struct_fields__)
    features = {
        "beam_search": (params.beam_width or 1) > 1,
        "watermark": params.watermark is not None,
        "lora": req.lora_id is not None,
        "multimodal": req.multimodal_inputs is not None,
        "input_embeds": req.input_embeds is not None or req.positional_embed_overrides is not None,
        "session": req.session is not None,
        "hidden_states": bool(req.return_hidden_states),
        "sampling_mask": bool(req.return_sampling_mask),
        "parameters": not all(sendable),
        "named_ids": req.return_logprob and len(req.logprob.token_ids_logprob or ()) > MAX_NAMED_IDS,
        "logit_processor": len(req.custom_logit_processor or "") > MAX_PROCESSOR,
        "cache_key": max(len(req.extra_key or ""), len(req.cache_salt or "")) > MAX_TEXT,
        "routed_experts": req.return_routed_experts or req.return_indexer_topk,
    }
    return next((name for name, present in features.items() if present), None)


def _own_params(params: Any) -> Any:
    """Custom parameters without what SGLang has added for custom logit processors."""
    return {k: v for k, v in params.items() if k != "__req__"} if isinstance(params, dict) else params
