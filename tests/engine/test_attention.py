"""Our attention backend in a real server, its kernels interpreted, beside SGLang's torch_native."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tasks
from client import Answer, generate
from cluster import Cluster

from sglang_pdd.patches.attention import better

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


def test_extends_get_the_tokens_of_torch_native(tmp_path: Path) -> None:
    """A follow-up brings few tokens over a cached prefix: once in one pass with a running decode, once alone."""
    first, other = tasks.cold(1, 300, 6), tasks.cold(4, 200, 6)
    mixed = tasks.follow_up(first, 2, 14, 6)
    alone = tasks.follow_up(mixed, 3, 14, 6)
    answers: dict[str, list[Answer]] = {}
    for name, spec in (("ours", OURS), ("theirs", Cluster(kind="single"))):
        with spec.launch(tmp_path / name) as running:
            url, decodes = running.url, threading.Event()

            def see(answer: Answer, decodes: threading.Event = decodes) -> None:
                if len(answer.ids) >= 2:
                    decodes.set()

            got = [generate(url, first.prompt, 6)]
            with ThreadPoolExecutor(1) as pool:  # SGLang mixes no request that wants logprobs
                job = pool.submit(generate, url, other.prompt, 12, logprobs=False, on_reply=see, ignore_eos=True)
                assert decodes.wait(120)
                got += [generate(url, mixed.prompt, 6, logprobs=False), job.result()]
            answers[name] = [*got, generate(url, alone.prompt, 6)]
            assert running.single is not None
            first_batch = re.search(r"first batch for our attention kernel: (.*)", running.single.log.read_text())
            assert (name == "ours") == (first_batch is not None)
            assert first_batch is None or re.fullmatch(r"\[\d\d, 1\]", first_batch[1]), first_batch[1]
    for ours, theirs in zip(answers["ours"], answers["theirs"], strict=True):
        assert ours.ids == theirs.ids
        assert max((abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)), default=0) < 1e-3


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_handoff_gets_the_tokens_of_torch_native(tmp_path: Path) -> None:
    """Relay and main decode are interpreted, so the relay makes a handful of tokens until the KV has landed."""
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
    task = tasks.cold(3, 1500, 25)
    with spec.launch(tmp_path) as running:
        answer = generate(running.url, task.prompt, 26)
        assert answer.text.split() == task.answer.split()
        assert "the first batch for our attention kernel" in running.mains[0].log.read_text()
        assert "our kernel" not in running.relays[0].log.read_text()
