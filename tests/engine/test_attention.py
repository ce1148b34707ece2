"""Our attention backend in a real server, its kernels interpreted, beside SGLang's torch_native."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tasks
import torch
from client import Answer, generate
from cluster import Cluster
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, UnquantizedKVCacheMethod
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_pdd.kernels.tiles import Chip, Unsupported
from sglang_pdd.patches import triton_backend
from sglang_pdd.patches.attention import better
from sglang_pdd.patches.triton_backend import PddTritonAttnBackend

OURS = Cluster(
    kind="single",
    flags={"single": ("--attention-backend", "pdd_triton", "--page-size", "16", "--enable-mixed-chunk")},
    env={"single": {"TRITON_INTERPRET": "1"}},
)


def test_which_batches_are_ours() -> None:
    assert better([1] * 30 + [16, 256], [4096] * 32)
    assert not better([1] * 30 + [257], [4096] * 31), "a long prefill is stock's"
    assert not better([100, 100], [1000, 0]), "mostly new tokens are stock's"
    assert better([100, 1], [100, 4000]), "those that ride along count"
    assert not better([100, 1, 1], [500, 100, 100])
    assert not better(None, None) and not better([], [])


H200 = Chip("sm90", 132)


def backend(pool: Any, **options: Any) -> PddTritonAttnBackend:
    """As far as it decides; without a model."""
    made = object.__new__(PddTritonAttnBackend)
    defaults = {"dcp_size": 1, "enable_deterministic": False, "dllm_attention": None, "chip": H200}
    vars(made).update({"token_to_kv_pool": pool, **defaults, **options})
    return made


def mha_pool(method: type) -> MHATokenToKVPool:
    pool = object.__new__(MHATokenToKVPool)
    pool.quant_method = object.__new__(method)
    return pool


def test_where_the_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "this_chip", lambda: H200)
    plain = mha_pool(UnquantizedKVCacheMethod)
    assert backend(plain)._usable_chip() == H200
    for pool in (mha_pool(object), SWAKVPool.__new__(SWAKVPool)):
        with pytest.raises(Unsupported, match="layout"):
            backend(pool)._usable_chip()
    for option in ({"dcp_size": 2}, {"enable_deterministic": True}, {"dllm_attention": object()}):
        with pytest.raises(Unsupported):
            backend(plain, **option)._usable_chip()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The server starts all the same, with SGLang's kernels."""
    stock = vars(backend(mha_pool(UnquantizedKVCacheMethod)))
    monkeypatch.setattr(triton_backend.TritonAttnBackend, "__init__", lambda self, runner: vars(self).update(stock))
    monkeypatch.setattr(triton_backend, "this_chip", lambda: H200)
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    assert PddTritonAttnBackend(SimpleNamespace(model=layers, dtype=BF16)).chip == H200
    broken = SimpleNamespace(model=SimpleNamespace(modules=lambda: 1 / 0), dtype=BF16)
    assert PddTritonAttnBackend(broken).chip is None
    assert "cannot be compiled here" in caplog.text


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    "kv, scale, kv_heads, dim, fits",
    [
        (BF16, None, 8, 128, True),
        (FP8, None, 8, 128, True),
        (FP8, 0.5, 8, 128, True),
        (BF16, 0.5, 8, 128, False),  # whose is the scale?
        (BF16, None, 4, 128, False),  # the pool has 8
        (BF16, None, 8, 112, False),
    ],
)
def test_which_layers_are_ours(kv: torch.dtype, scale: float | None, kv_heads: int, dim: int, fits: bool) -> None:
    pool = SimpleNamespace(get_key_buffer=lambda layer_id: torch.empty(4, 8, dim, dtype=kv, device="meta"))
    layer = RadixAttention(32, dim, 0.1, kv_heads, 0)
    layer.k_scale = layer.k_scale_float = layer.v_scale = layer.v_scale_float = scale
    assert triton_backend._known(layer)
    fit = backend(pool)._fit(layer, BF16, 16)
    assert (fit is not None) == fits
    assert fit is None or [tile.m for tile in fit[1].tiles] == [16, 64]


def test_layers_that_mean_something_else() -> None:
    def layer(**options: Any) -> RadixAttention:
        return RadixAttention(32, 128, 0.1, 8, 0, **options)

    assert triton_backend._known(layer(logit_cap=30.0, sliding_window_size=100))
    assert not triton_backend._known(layer(attn_type=AttentionType.ENCODER_ONLY))
    assert not triton_backend._known(layer(is_cross_attention=True))
    assert not triton_backend._known(layer(logit_cap=30.0, logit_capping_method="other"))
    half = layer()
    half.k_scale, half.k_scale_float = torch.ones(1), 1.0
    assert not triton_backend._known(half), "no scale for values"


FIRST, OTHER = tasks.cold(1, 300, 6), tasks.cold(4, 200, 6)
MIXED = tasks.follow_up(FIRST, 2, 14, 6)
ALONE = tasks.follow_up(MIXED, 3, 14, 6)


def ask_all(spec: Cluster, logs: Path) -> tuple[list[Answer], str | None]:
    """A follow-up brings few tokens over a cached prefix: once in one pass with a running decode, once alone.

    Also returns what the log says of our kernel.
    """
    with spec.launch(logs) as running, ThreadPoolExecutor(1) as pool:
        decodes = threading.Event()
        got = [generate(running.url, FIRST.prompt, 6)]
        # SGLang mixes no request that wants logprobs.
        job = pool.submit(
            generate, running.url, OTHER.prompt, 12, logprobs=False, on_reply=lambda _: decodes.set(), ignore_eos=True
        )
        assert decodes.wait(120)
        got += [generate(running.url, MIXED.prompt, 6, logprobs=False), job.result()]
        got += [generate(running.url, ALONE.prompt, 6)]
        assert running.single is not None
        first_batch = re.search(r"first batch for our attention kernel: (.*)", running.single.log.read_text())
        return got, first_batch and first_batch[1]


def test_extends_get_the_tokens_of_torch_native(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(ask_all, spec, tmp_path / name)
            for name, spec in (("ours", OURS), ("theirs", Cluster("single")))
        ]
        (ours, batch), (theirs, none) = (job.result() for job in jobs)
    assert none is None and batch is not None and re.fullmatch(r"\[\d\d, 1\]", batch)
    for our, their in zip(ours, theirs, strict=True):
        assert our.ids == their.ids
        assert max((abs(a - b) for a, b in zip(our.logprobs, their.logprobs, strict=True)), default=0) < 1e-3


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_handoff_gets_the_tokens_of_torch_native(tmp_path: Path) -> None:
    """Relay and main decode are interpreted, so the relay makes a handful of tokens until the KV has landed.

    Another request is served beside it.
    """
    slow = {"TRITON_INTERPRET": "1"}
    flags = ("--attention-backend", "triton")
    spec = Cluster(
        kind="pdd",
        page_size=16,
        router="mini-lb",
        wan_rate_limit="2mbit",
        flags={"relay": flags, "main": flags},
        env={"relay": slow, "main": slow},
    )
    task, rider, done = tasks.cold(3, 1500, 25), tasks.cold(4, 100, 6), threading.Event()
    with spec.launch(tmp_path) as running, ThreadPoolExecutor(1) as pool:

        def ride(_: Answer) -> bool:
            return not done.is_set()

        pool.submit(generate, running.url, rider.prompt, 500, logprobs=False, on_reply=ride, ignore_eos=True)
        try:
            answer = generate(running.url, task.prompt, 26, logprobs=False)
        finally:
            done.set()
        assert answer.text.split() == task.answer.split()
        assert "first batch for our attention kernel" in running.mains[0].log.read_text()
        assert "our attention kernel" not in running.relays[0].log.read_text()
