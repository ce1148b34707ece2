"""What of a request's sampling goes with a relay, and which requests get none."""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.sampling.sampling_params import SamplingParams

MAX_LOGIT_BIAS = 200  # entries that travel with a relay


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as a map of plain values."""
    wire = {name: getattr(params, name) for name in params.__struct_fields__}
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
    return value is None or isinstance(value, (bool, int, float, str, list, dict, set))


def obstacle(req: Any) -> str | None:
    """Why this request can't be relayed; None if it can. What is named here is served as P-MD."""
    params = req.pdd_sampling
    penalties = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    grammars = (params.json_schema, params.regex, params.ebnf, params.structural_tag)
    features = {
        "grammar": req.grammar is not None or any(grammars),
        "penalties": bool(penalties),
        "min_new_tokens": params.min_new_tokens > 0,
        "custom_logit_processor": bool(req.custom_logit_processor),
        "custom_params": bool(params.custom_params),
        "watermark": params.watermark is not None,
        "beam_search": (params.beam_width or 1) > 1,
        "lora": req.lora_id is not None,
        "multimodal": req.multimodal_inputs is not None,
        "input_embeds": req.input_embeds is not None,
        "session": req.session is not None,
        "hidden_states": bool(req.return_hidden_states),
        "sampling_mask": bool(req.return_sampling_mask),
        "token_ids_logprob": req.return_logprob and req.logprob.token_ids_logprob is not None,
        "logit_bias": len(params.logit_bias or ()) > MAX_LOGIT_BIAS,
    }
    return next((name for name, present in features.items() if present), None)
