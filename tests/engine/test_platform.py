"""One real server on a CPU, started with no flag but what it must have."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sglang_pdd.plugin import activate

START_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=256, **shape)).save_pretrained(folder)
    return folder


def ask(port: int, path: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PDD_")}
    flags = ["--skip-tokenizer-init", "--max-total-tokens", "1024", "--port", str(port)]
    temp = tempfile.TemporaryDirectory(prefix="pdd-", ignore_cleanup_errors=True)  # a short path: for unix sockets, too
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags],
            env={**environment, "SGLANG_PLATFORM": "pdd_cpu", "SGLANG_PLUGINS": "pdd", "TMPDIR": temp.name},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                ask(port, "/model_info")
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield port, log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the server and its children
            process.wait()
        temp.cleanup()


def test_active_only_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "pdd_cpu")
    assert activate() == "sglang_pdd.patches.platform.PddCpuPlatform"


@pytest.mark.parametrize("ranks", [1, 2, 3, 1000])
def test_cpus_are_dealt_to_all_ranks(ranks: int):
    from sglang_pdd.patches.platform import share_cpus

    groups = [{int(cpu) for cpu in group.split(",")} for group in share_cpus(ranks).split("|")]
    assert len(groups) == ranks
    assert all(group <= os.sched_getaffinity(0) and group for group in groups)


@pytest.mark.timeout(START_S + 60)
def test_a_completion_without_any_of_our_hooks(server: tuple[int, Path]):
    port, log = server
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    answer = ask(port, "/generate", body)
    assert len(answer["output_ids"]) == 4
    info = ask(port, "/server_info")
    assert (info["device"], info["attention_backend"], info["dtype"]) == ("cpu", "torch_native", "float32")
    text = log.read_text()
    assert "dtype: torch.float32" in text  # of the KV cache
    assert "Applied" not in text, "a hook was applied"
