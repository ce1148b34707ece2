"""Output logprobs between SGLang's request and the wire."""

from __future__ import annotations

from typing import Any

from sglang_pdd.protocol import UNKNOWN, Logprobs


def output_logprobs(req: Any, start: int, stop: int) -> Logprobs | None:
    """Logprobs of the request's output tokens in [start, stop); None if it asked for none."""
    if not req.return_logprob:
        return None
    source, k = req.logprob, req.logprob.top_logprobs_num
    rows = range(start, stop)
    return Logprobs(
        tuple(source.output_token_logprobs_val[start:stop]),
        k,
        tuple(v for i in rows for v in source.output_top_logprobs_val[i][:k]) if k else (),
        tuple(t for i in rows for t in source.output_top_logprobs_idx[i][:k]) if k else (),
        tuple(v for i in rows for v in _named(source, i)) if source.token_ids_logprob else (),
    )


def _named(source: Any, i: int) -> list[float]:
    """On a decode server P's token has none: SGLang does not send them with the KV."""
    return source.output_token_ids_logprobs_val[i] or [UNKNOWN] * len(source.token_ids_logprob)


def append_output_logprob(req: Any, token: int, logprobs: Logprobs | None, i: int) -> None:
    """Give the request the logprob of the output token it has just got: row ``i`` of ``logprobs``."""
    if not req.return_logprob:
        return
    target = req.logprob
    values, ids = logprobs.top_row(i) if logprobs else ([], [])
    target.output_token_logprobs_val.append(logprobs.values[i] if logprobs else None)
    target.output_token_logprobs_idx.append(token)
    target.output_top_logprobs_val.append(values)
    target.output_top_logprobs_idx.append(ids)
    if target.token_ids_logprob is not None:
        named = logprobs.named_row(i) if logprobs else []
        target.output_token_ids_logprobs_val.append(named)
        target.output_token_ids_logprobs_idx.append(list(target.token_ids_logprob) if named else [])
