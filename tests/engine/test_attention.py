"""Our attention backend in a real server, its kernels interpreted, beside SGLang's torch_native."""

from __future__ import annotations

from pathlib import Path

import pytest
import tasks
from client import generate
from cluster import Cluster

from sglang_pdd.patches.attention import better

OURS = Cluster(
    kind="single",
    flags={"single": ("--attention-backend", "pdd_triton", "--page-size", "16")},
    env={"single": {"TRITON_INTERPRET": "1"}},
)


def test_which_batches_are_ours() -> None:
    assert better([1] * 30 + [16, 256], [4096] * 32)
    assert not better([1] * 30 + [257], [4096] * 31), "a long prefill is stock's"
    assert not better([100, 100], [1000, 0]), "mostly new tokens are stock's"
    assert not better(None, None) and not better([], [])


def test_follow_ups_get_the_tokens_of_torch_native(tmp_path: Path) -> None:
    """A second turn brings few tokens over a cached prefix: an extend pass for our kernel."""
    first = tasks.cold(1, 300, 6)
    second = tasks.follow_up(first, 2, 14, 6)
    answers = {}
    for name, spec in (("ours", OURS), ("theirs", Cluster(kind="single"))):
        with spec.launch(tmp_path / name) as running:
            answers[name] = [generate(running.url, task.prompt, 12) for task in (first, second)]
            assert running.single is not None
            served = "the first batch for our attention kernel" in running.single.log.read_text()
            assert served == (name == "ours")
    for ours, theirs in zip(answers["ours"], answers["theirs"], strict=True):
        assert ours.ids == theirs.ids
        assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) < 1e-3


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
