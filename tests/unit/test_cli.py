import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang_pdd
from sglang_pdd import cli
from sglang_pdd.keys import Keys


class Environment:
    """A machine on which everything is well, until a test says otherwise."""

    def __init__(self) -> None:
        self.versions = {"sglang": "0.5.23", "torch": "2.9", "msgpack": "1.1"}
        self.cuda = True
        self.guard: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.entry_points = {cli.PLUGIN_GROUP: "sglang_pdd.plugin:register", cli.PLATFORM_GROUP: "sglang_pdd.plugin:x"}
        self.curve = True

    def load(self, name: str) -> object:
        if name in self.broken:
            raise self.broken[name]
        return {
            "zmq": SimpleNamespace(__version__="27", zmq_version=lambda: "4.3.5", has=lambda what: self.curve),
            "torch": SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: self.cuda)),
            "sglang_pdd.patches.guard": SimpleNamespace(check_all=lambda: self.guard),
        }.get(name, object())


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Environment:
    one = Environment()
    monkeypatch.setattr(cli, "_import", one.load)
    monkeypatch.setattr(cli, "_version", one.versions.get)
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [SimpleNamespace(name="pdd", value=one.entry_points[group])] if group in one.entry_points else [],
    )
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    return one


def doctor(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str]]:
    status = cli.main(["doctor", *args])
    lines = capsys.readouterr().out.splitlines()
    return status, lines


def test_all_is_well(env: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = doctor(capsys)
    assert status == 0 and len(lines) == 10 and all(line.startswith("ok ") for line in lines)
    named = "\n".join(lines)
    for what in ("python", "zmq", "CURVE", "msgpack", "torch", "sglang", "hooks", "transfer engine", "cuda"):
        assert what in named


def one_problem(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    status, lines = doctor(capsys, *args)
    problems = [line for line in lines if line.startswith("problem")]
    assert status == 1 and len(problems) == 1 and lines[-1] == "1 problem found."
    return problems[0]


def test_an_old_python(env, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli, "MINIMUM_PYTHON", (99, 0))
    assert "use Python 99.0 or newer" in one_problem(capsys)


def test_zmq_without_curve(env, capsys) -> None:
    env.curve = False
    assert "without CURVE -> install the pyzmq wheel" in one_problem(capsys)


def test_sglang_missing(env, capsys) -> None:
    del env.versions["sglang"]
    assert "sglang: not installed -> pip install sglang==0.5.23" in one_problem(capsys)


def test_sglang_of_another_version(env, capsys) -> None:
    env.versions["sglang"] = "0.5.24"
    assert "0.5.24, supported: 0.5.23 -> pip install" in one_problem(capsys)


def test_sglang_that_cannot_be_imported(env, capsys) -> None:
    env.broken["sglang"] = ImportError("libfoo.so: no such file\nand a second line")
    assert "cannot be imported: ImportError: libfoo.so: no such file ->" in one_problem(capsys)


def test_torch_missing(env, capsys) -> None:
    del env.versions["torch"]
    assert "torch: not installed" in one_problem(capsys)


@pytest.mark.parametrize("group", [cli.PLUGIN_GROUP, cli.PLATFORM_GROUP])
def test_entry_points(env, capsys, group: str) -> None:
    env.entry_points[group] = "somebody.else:register"
    assert f"entry point {group}: not visible to SGLang -> pip install sglang-pdd" in one_problem(capsys)


def test_hooks_that_do_not_match(env, capsys) -> None:
    env.guard = ["Scheduler.run_batch: gone"]
    assert "Scheduler.run_batch: gone ->" in one_problem(capsys)


def test_a_guard_that_cannot_run(env, capsys) -> None:
    env.broken["sglang_pdd.patches.guard"] = ModuleNotFoundError("No module named 'sglang'")
    assert "the hook table cannot be checked: ModuleNotFoundError" in one_problem(capsys)


def test_no_transfer_engine(env, capsys) -> None:
    env.broken["mooncake.engine"] = ImportError("libcudart.so.12")
    assert any(line.startswith("ok") and line.endswith("NIXL") for line in doctor(capsys)[1])
    env.broken["nixl._api"] = ModuleNotFoundError("nixl")
    problem = one_problem(capsys)
    assert "libcudart.so.12" in problem and "pip install mooncake-transfer-engine" in problem


def test_without_cuda_it_names_the_cpu_platform(env, capsys, monkeypatch) -> None:
    env.cuda = False
    status, lines = doctor(capsys)
    assert status == 0 and any(line.startswith("note") and "SGLANG_PLATFORM=pdd_cpu" in line for line in lines)
    monkeypatch.setenv("SGLANG_PLATFORM", "pdd_cpu")
    assert any(line.startswith("ok") and "is set" in line for line in doctor(capsys)[1])


def test_a_check_that_crashes_is_a_problem(env, capsys) -> None:
    env.broken["torch"] = RuntimeError("driver too old")
    assert "RuntimeError: driver too old" in one_problem(capsys)


def test_keys_folders(env, capsys, tmp_path: Path) -> None:
    assert cli.main(["keys", str(tmp_path), "--names", "p,md"]) == 0
    capsys.readouterr()
    status, lines = doctor(capsys, "--keys", str(tmp_path / "p"))
    assert status == 0 and "2 peers" in lines[-1] and Keys.load(tmp_path / "p").secret not in "".join(lines)
    (tmp_path / "p/secret.key").chmod(0o644)
    assert "chmod 600" in one_problem(capsys, "--keys", str(tmp_path / "p"))
    assert "is missing" in one_problem(capsys, "--keys", str(tmp_path / "nowhere"))
    (tmp_path / "md/tls.key").unlink()
    assert "run `sglang-pdd keys` again" in one_problem(capsys, "--keys", str(tmp_path / "md"))


def test_keys(capsys, tmp_path: Path) -> None:
    assert cli.main(["keys", str(tmp_path), "--names", "p,md"]) == 0
    secret = Keys.load(tmp_path / "p").secret
    assert "kept" not in capsys.readouterr().out
    assert cli.main(["keys", str(tmp_path), "--names", "p,md,rld"]) == 0
    assert capsys.readouterr().out.count("kept") == 2
    assert Keys.load(tmp_path / "p").secret == secret
    assert cli.main(["keys", str(tmp_path), "--names", "p,md", "--force"]) == 0
    assert Keys.load(tmp_path / "p").secret != secret
    capsys.readouterr()
    assert cli.main(["keys", str(tmp_path), "--names", "p/../x"]) == 1
    out = capsys.readouterr()
    assert out.err.startswith("sglang-pdd: bad name") and out.err.count("\n") == 1


def test_version_and_usage(capsys) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"sglang-pdd {sglang_pdd.__version__}\n"
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2


def test_the_engine_free_core_imports_neither_sglang_nor_torch() -> None:
    modules = "cli, discovery, keys, metrics, pacing, policy, protocol, timeline, transport"
    code = f"import sys; from sglang_pdd import {modules}; print({{'sglang', 'torch'}} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "set()\n"
