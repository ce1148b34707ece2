"""SGLang's Triton attention with our kernel for passes that bring few new tokens over long prefixes.

``--attention-backend pdd_triton`` is SGLang's ``triton`` with another class behind the name, so that whatever SGLang
knows of ``triton`` (page sizes, MLA dispatch, CUDA graphs) holds. ``--pdd-role main`` does the same where the backend
turns out to be ``triton``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from sglang_pdd.patches import guard

NAME = "pdd_triton"
STOCK = "triton"
WANTED = "PDD_ATTENTION"  # in the environment of the schedulers: "1"
FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
MOST_NEW = 256  # of one request; from here on tiles are full, and SGLang's kernel is at home
LEAST_RATIO = 8  # cached tokens for each new one


def add_choice() -> None:
    """Let SGLang's command line accept the name."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def take(args: argparse.Namespace, wanted: bool) -> None:
    """Put ``triton`` for our name; tell the schedulers if it was given, or is ``wanted`` anyway."""
    for field in FIELDS:
        if getattr(args, field, None) == NAME:
            setattr(args, field, STOCK)
            wanted = True
    if wanted:
        os.environ[WANTED] = "1"


def register() -> None:
    """In a scheduler: our class behind ``triton``; ends the process where SGLang is not what we derive from."""
    guard.install("attention", "scheduler")
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    stock = ATTENTION_BACKENDS[STOCK]

    def create(runner: Any) -> Any:
        if runner.model_config.is_encoder_decoder:
            return stock(runner)  # which says that it cannot
        from sglang_pdd.patches.triton_backend import PddTritonAttnBackend

        return PddTritonAttnBackend(runner)

    register_attention_backend(STOCK)(create)


def better(news: Sequence[int] | None, prefixes: Sequence[int] | None) -> bool:
    """Whether our kernel takes an extend batch: all requests bring few tokens, most of the work is the prefixes'."""
    if not news or not prefixes:
        return False
    return max(news) <= MOST_NEW and sum(prefixes) >= LEAST_RATIO * sum(news)
