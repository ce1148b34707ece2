"""The console script: ``sglang-pdd keys``, ``sglang-pdd doctor``, ``sglang-pdd version``."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import sglang_pdd
from sglang_pdd import keys
from sglang_pdd.wan import tls

SUPPORTED_SGLANG = ("0.5.23",)
MINIMUM_PYTHON = (3, 10)
PLUGIN_GROUP, PLATFORM_GROUP = "sglang.srt.plugins", "sglang.srt.platforms"
CPU_PLATFORM = "pdd_cpu"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    what: str
    state: Literal["ok", "note", "problem"]
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.what}: {self.detail}{remedy}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="sglang-pdd", description="Tools of the PDD plugin for SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)

    make = commands.add_parser("keys", help="make one folder of keys per node: CURVE for messages, TLS for KV streams")
    make.add_argument("dir", help="where to make the folders")
    make.add_argument("--names", required=True, help="the nodes, comma-separated, e.g. p,rld,md")
    make.add_argument("--force", action="store_true", help="replace existing secrets")

    doctor = commands.add_parser("doctor", help="say whether this environment will work, and why not")
    doctor.add_argument("--keys", metavar="DIR", help="also check this node's keys folder")

    commands.add_parser("version", help="print the version")
    args = parser.parse_args(argv)
    if args.command == "keys":
        return _keys(args.dir, args.names.split(","), args.force)
    if args.command == "doctor":
        return _doctor(args.keys)
    print(f"sglang-pdd {sglang_pdd.__version__}")
    return 0


def _keys(folder: str, names: list[str], force: bool) -> int:
    try:
        made = keys.make(folder, names, force=force)
    except (keys.KeysError, OSError) as error:
        print(f"sglang-pdd: {error}", file=sys.stderr)
        return 1
    for name in names:
        kept = "" if name in made else " (its secret existed and was kept)"
        print(f"{os.path.join(folder, name)}{kept}")
    print("Copy each folder to its machine, and to no other; give it as --pdd-keys.")
    return 0


def _doctor(keys_folder: str | None) -> int:
    problems = 0
    for check in _checks(keys_folder):
        print(check, flush=True)
        problems += check.state == "problem"
    if problems:
        print(f"\n{problems} problem{'s' if problems > 1 else ''} found.")
    return 1 if problems else 0


# --- the checks ---------------------------------------------------------------------------------------------------


def _checks(keys_folder: str | None) -> Iterator[Check]:
    suite: list[Callable[[], Iterator[Check]]] = [_python, _zmq, _versions, _sglang, _plugin, _hooks, _engine, _cuda]
    for check in suite:
        try:
            yield from check()
        except Exception as error:  # a doctor that crashes helps nobody
            yield Check(check.__name__.strip("_"), "problem", _why(error), "please report this")
    if keys_folder is not None:
        yield _keys_folder(keys_folder)


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MINIMUM_PYTHON:
        yield Check("python", "problem", version, f"use Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer")
    else:
        yield Check("python", "ok", version)


def _zmq() -> Iterator[Check]:
    zmq = _import("zmq")
    detail = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        yield Check("zmq", "ok", f"{detail}, CURVE")
    else:
        yield Check("zmq", "problem", f"{detail} without CURVE", "install the pyzmq wheel from PyPI")


def _versions() -> Iterator[Check]:
    for name in ("msgpack", "torch"):
        version = _version(name)
        if version is not None:
            yield Check(name, "ok", version)
        else:
            yield Check(name, "problem", "not installed", f"pip install {name}")


def _sglang() -> Iterator[Check]:
    supported = " or ".join(SUPPORTED_SGLANG)
    remedy = f"pip install sglang=={SUPPORTED_SGLANG[-1]}"
    version = _version("sglang")
    if version is None:
        yield Check("sglang", "problem", "not installed", remedy)
        return
    try:
        _import("sglang")
    except Exception as error:
        yield Check("sglang", "problem", f"{version} cannot be imported: {_why(error)}", remedy)
        return
    if version in SUPPORTED_SGLANG:
        yield Check("sglang", "ok", version)
    else:
        yield Check("sglang", "problem", f"{version}, supported: {supported}", remedy)


def _plugin() -> Iterator[Check]:
    for group in (PLUGIN_GROUP, PLATFORM_GROUP):
        ours = [e.name for e in importlib.metadata.entry_points(group=group) if e.value.startswith("sglang_pdd.")]
        if ours:
            yield Check(f"entry point {group}", "ok", ", ".join(ours))
        else:
            yield Check(f"entry point {group}", "problem", "not visible to SGLang", "pip install sglang-pdd")


def _hooks() -> Iterator[Check]:
    try:
        guard = _import("sglang_pdd.patches.guard")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problems: list[str] = guard.check_all()
    except Exception as error:
        problems = [f"the hook table cannot be checked: {_why(error)}"]
    for problem in problems:
        yield Check("hooks", "problem", problem, "use a supported SGLang, unmodified")
    if not problems:
        yield Check("hooks", "ok", "everything we rely on in SGLang is as expected")


def _engine() -> Iterator[Check]:
    found, why = [], ""
    for module, name in (("nixl._api", "NIXL"), ("mooncake.engine", "Mooncake")):
        try:
            _import(module)
        except Exception as error:
            why = f"{module}: {_why(error)}"
        else:
            found.append(name)
    if found:
        yield Check("transfer engine", "ok", ", ".join(found))
    else:
        remedy = "pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)"
        yield Check("transfer engine", "problem", why, remedy)


def _cuda() -> Iterator[Check]:
    if _version("torch") is None:
        return
    if _import("torch").cuda.is_available():
        yield Check("cuda", "ok", "available")
    elif os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        yield Check("cuda", "ok", f"not available, SGLANG_PLATFORM={CPU_PLATFORM} is set")
    else:
        how = f"to try PDD on the CPU set SGLANG_PLATFORM={CPU_PLATFORM} and give --attention-backend torch_native"
        yield Check("cuda", "note", "not available", how)


def _keys_folder(folder: str) -> Check:
    try:
        loaded = keys.Keys.load(folder)
        tls.Identity(folder)
    except (keys.KeysError, OSError) as error:
        return Check("keys", "problem", str(error))
    return Check("keys", "ok", f"{folder}: public key {loaded.public}, {len(loaded.peers)} peers")


def _import(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, about every accelerator that is not here
        return importlib.import_module(name)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _why(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.200}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
