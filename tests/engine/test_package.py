"""Every way to install the project carries the patches, and leaves the PyPI package `kernels` alone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "-q", "--no-cache-dir")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, with its links: builds leave files behind."""
    copy = tmp_path_factory.mktemp("source") / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    for name in ("sglang_pdd", "patches", "kernels"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def modules(source: Path) -> set[str]:
    """What must be in a wheel."""
    ours = {f"sglang_pdd/{path.name}" for path in (source / "sglang_pdd").glob("*.py")}
    ours |= {f"sglang_pdd/patches/{path.name}" for path in (source / "patches").glob("*.py")}
    ours |= {f"sglang_pdd/kernels/{path.name}" for path in (source / "kernels").glob("*.py")}
    assert "sglang_pdd/patches/guard.py" in ours
    return ours


def build_wheel(source: Path, into: Path) -> Path:
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", into, source, cwd=into)
    (wheel,) = into.glob("*.whl")
    return wheel


def fresh_environment(folder: Path) -> Path:
    """A venv that sees this one's packages, except for our own project; returns its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    # Under the environment of .ci/venv lies another, which has the packages; what it installed as ours stays behind.
    site = Path(sysconfig.get_path("purelib"))
    heavy = site / "heavy.pth"
    line = heavy.read_text() if heavy.exists() else f"import site; site.addsitedir({str(site)!r})\n"
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder.parent).strip()
    (Path(target) / "heavy.pth").write_text(line)
    return python


def check(python: Path, source: Path, installed: Path) -> None:
    """Our patches come from ``installed``; from the project's root `kernels` is still the PyPI package."""
    where = "import importlib.util as u; print(u.find_spec('sglang_pdd.patches.table').origin)"
    assert run(python, "-c", where, cwd=source.parent).startswith(str(installed))
    for folder in (source, source.parent):
        code = "import importlib.util as u; print(u.find_spec('kernels').origin)"
        assert run(python, "-c", code, cwd=folder).strip().endswith("/site-packages/kernels/__init__.py")
    points = (
        "from importlib.metadata import entry_points as e;"
        "print([p.load().__name__ for g in ('plugins', 'platforms') for p in e(group='sglang.srt.' + g)"
        " if p.dist.name == 'sglang-pdd'])"
    )
    assert run(python, "-c", points, cwd=source.parent).strip() == "['register', 'activate']"
    assert (python.parent / "sglang-pdd").exists()


def test_wheel(source: Path, tmp_path: Path):
    wheel = build_wheel(source, tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules(source) <= names
    assert {name.split("/")[0] for name in names} == {"sglang_pdd", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    python = fresh_environment(tmp_path / "venv")
    run(python, *PIP, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    check(python, source, tmp_path / "venv")


def test_wheel_from_sdist(source: Path, tmp_path: Path):
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "wheel").mkdir()
    assert modules(source) <= set(zipfile.ZipFile(build_wheel(unpacked, tmp_path / "wheel")).namelist())


@pytest.mark.parametrize("how", [[], ["-e"]], ids=["pip install .", "pip install -e ."])
def test_pip_install(how: list[str], source: Path, tmp_path: Path):
    python = fresh_environment(tmp_path / "venv")
    run(python, *PIP, "install", "--no-deps", "--no-build-isolation", *how, ".", cwd=source)
    check(python, source, source if how else tmp_path / "venv")


def test_the_root_does_not_shadow_the_package_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "patches" / "__init__.py").exists()
    code = "import importlib.util as u; print(u.find_spec('kernels').origin)"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip().endswith("/site-packages/kernels/__init__.py")
