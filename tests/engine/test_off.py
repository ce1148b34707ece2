"""Without its flags the plugin is not there; with them it is, and it says in one line what is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from sglang_pdd.config import FLAGS
from sglang_pdd.patches.server_args import SERVED
from sglang_pdd.patches.table import ENTRIES

# What the launcher does before it loads a model, then a look at what became of the process.
LAUNCH = """
import os, sys, warnings
warnings.simplefilter("ignore")
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args
args = prepare_server_args(sys.argv[1:])
print("mode", args.disaggregation_mode, "radix", args.disaggregation_decode_enable_radix_cache)
print("keep-alive", os.environ.get("SGLANG_TIMEOUT_KEEP_ALIVE"))
print("hooks", sorted(HookRegistry._hooks))
print("ours", sorted(name for name in sys.modules if name.startswith("sglang_pdd")))
print("wrapped", [name for name in ("add_cli_args", "from_cli_args", "resolve_once")
                  if hasattr(getattr(ServerArgs, name), "__wrapped__")])
"""


Done = subprocess.CompletedProcess[str]


def launch(*argv: str, script: str = LAUNCH, **environment: str) -> Done:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PDD_")}
    return subprocess.run(
        [sys.executable, "-c", script, *argv],
        env={**clean, "SGLANG_PLATFORM": "pdd_cpu", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Done]]]:
    """Importing SGLang takes ten seconds of one core: all start together, as many at once as there are cores."""
    config = tmp_path_factory.mktemp("config") / "flags.yaml"
    config.write_text("pdd-role: main\n")
    model = ("--model-path", "no-such-model")
    main = (*model, "--pdd-role", "main")
    mistakes = json.dumps([argv for argv, _ in MISTAKES])
    jobs: dict[str, tuple[Sequence[str], str, dict[str, str]]] = {
        "off": (model, LAUNCH, {"PDD_ROLE": "", "SGLANG_PLUGINS": "pdd"}),  # others may be installed
        "others": (model, LAUNCH, {"PDD_PORT": "tcp://10.0.0.1:9310", "SGLANG_PLUGINS": "pdd"}),
        "help": (("--help",), LAUNCH, {}),
        "flag": (main, LAUNCH, {}),
        "environment": (model, LAUNCH, {"PDD_ROLE": "main", "SGLANG_TIMEOUT_KEEP_ALIVE": "30"}),
        "config file": ((*model, "--config", str(config)), LAUNCH, {}),
        "mistakes": ((), f"import io, sys; sys.stdin = io.StringIO({mistakes!r})\n{REFUSALS}", {}),
        **{name: (main, LAUNCH, {name: "1"}) for name in UNSERVED},
        "models": ((str(tmp_path_factory.mktemp("model")),), MODELS, {}),
        "table": ((), "from sglang_pdd.patches import guard\nprint(*guard.check_all(), sep='\\n', end='')", {}),
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(launch, *argv, script=s, **env) for name, (argv, s, env) in jobs.items()}


def test_off(launched: Mapping[str, Future[Done]]):
    done = launched["off"].result()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mode null radix False",
        "keep-alive None",
        "hooks []",
        "ours ['sglang_pdd', 'sglang_pdd.patches', 'sglang_pdd.patches.platform', 'sglang_pdd.plugin']",
        "wrapped []",
    ]


def test_other_peoples_variables(launched: Mapping[str, Future[Done]]):
    """Kubernetes says where a service named ``pdd`` is."""
    done = launched["others"].result()
    assert done.returncode == 0, done.stderr
    assert "hooks []" in done.stdout


def test_help_has_our_group(launched: Mapping[str, Future[Done]]):
    done = launched["help"].result()
    assert done.returncode == 0, done.stderr
    assert "\nPDD:\n" in done.stdout
    assert all(flag.option in done.stdout for flag in FLAGS)


@pytest.mark.parametrize("by", ["flag", "environment", "config file"])
def test_on(by: str, launched: Mapping[str, Future[Done]]):
    done = launched[by].result()
    assert done.returncode == 0, done.stderr
    assert "mode decode radix True" in done.stdout
    assert f"keep-alive {30 if by == 'environment' else 120}" in done.stdout, "what is given wins"
    assert "wrapped ['add_cli_args', 'from_cli_args', 'resolve_once']" in done.stdout


REFUSALS = """
import contextlib, io, json, os, sys, warnings
warnings.simplefilter("ignore")
from sglang.srt.plugins import load_plugins
sys.argv += ["--pdd-role", "main"]
load_plugins()
from sglang.srt.server_args import prepare_server_args
for argv in json.load(sys.stdin):
    sys.argv[1:] = ["--model-path", "m", *argv]
    try:
        prepare_server_args(sys.argv[1:])
        print("accepted")
    except SystemExit as end:
        print(end)
"""

MISTAKES = [
    (["--pdd-role", "relay"], "--pdd-role relay needs --pdd-prefills"),
    (["--pdd-role", "main", "--disaggregation-mode", "prefill"], "--disaggregation-mode prefill contradicts"),
    (["--pdd-role", "main", "--disaggregation-mode=null"], "--disaggregation-mode null contradicts"),
    (["--pdd-role", "main", "--dp-size", "2"], "--dp-size 2 is not supported with PDD"),
    (["--pdd-role", "main", "--attn-dp-size", "2"], "--attn-dp-size 2 is not supported with PDD"),
    (["--pdd-role", "prefill", "--pp-size", "2"], "--pp-size 2 is not supported with PDD"),
    (["--pdd-role", "main", "--speculative-algorithm", "NGRAM"], "--speculative-algorithm NGRAM is not supported"),
    (["--pdd-role", "main", "--disable-radix-cache"], "--disable-radix-cache contradicts --pdd-role main"),
    (["--pdd-role", "prefill", "--enable-hierarchical-cache"], "--enable-hierarchical-cache is not supported"),
    (["--pdd-role", "main", "--tokenizer-worker-num", "2"], "use --tokenizer-worker-num 1"),
    (["--pdd-role", "main", "--disaggregation-transfer-backend", "mori"], "use --disaggregation-transfer-backend moon"),
    (["--pdd-role", "main", "--host", "0.0.0.0"], "0.0.0.0 is a wildcard: give --pdd-advertise"),
    (["--pdd-wan-rate-limit", "1gbit"], "paces --disaggregation-mode prefill only"),
]


def test_mistakes_end_the_process_with_one_line(launched: Mapping[str, Future[Done]]):
    done = launched["mistakes"].result()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(MISTAKES), done.stdout
    for line, (argv, words) in zip(lines, MISTAKES, strict=True):
        assert line.startswith("sglang-pdd: ") and words in line, (argv, line)


UNSERVED = ("SGLANG_RUST_SERVER", "SGLANG_DISAGG_STAGING_BUFFER")


@pytest.mark.parametrize("name", UNSERVED)
def test_environment_that_pdd_cannot_serve(name: str, launched: Mapping[str, Future[Done]]):
    done = launched[name].result()
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("sglang-pdd")]
    assert f"{name}=1 is not supported with PDD: unset it" in line


MODELS = """
import sys, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
from transformers import LlamaConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang_pdd.patches.server_args import check_model
LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(sys.argv[1])
model = ModelConfig(sys.argv[1])
print(check_model(model))
for name in ("is_encoder_decoder", "is_multimodal", "is_hybrid_swa"):
    setattr(model, name, True)
    print(check_model(model))
    setattr(model, name, False)
model.hf_config.architectures, model.hf_config.index_topk = ["DeepseekV32ForCausalLM"], 8
print(check_model(model))
"""


def test_models_with_other_state_than_kv(launched: Mapping[str, Future[Done]]):
    done = launched["models"].result()
    assert done.returncode == 0, done.stderr
    fine, *wrong = [line for line in done.stdout.splitlines() if line == "None" or "ForCausalLM" in line]
    assert fine == "None"
    kinds = ("encoder-decoder", "multimodal", "sliding-window", "sparse-attention")
    for kind, line in zip(kinds, wrong, strict=True):
        assert kind in line and line.endswith("PDD serves models whose only state is the KV cache")


def test_the_table_holds_for_this_sglang(launched: Mapping[str, Future[Done]]):
    done = launched["table"].result()
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_refused_field_is_in_the_table():
    fields = {entry.path.rpartition(".")[2] for entry in ENTRIES if ".ServerArgs." in entry.path}
    assert set(SERVED) <= fields
