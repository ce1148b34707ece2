"""The hook table is complete: nothing of SGLang's is imported that it does not list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_pdd.patches.table import ENTRIES

PATCHES = Path(__file__).resolve().parents[2] / "patches"
PACKAGE = PATCHES.parent / "sglang_pdd"


def imports(file: Path) -> set[str]:
    """Dotted names that a module takes from SGLang."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sglang"}
    return found


@pytest.mark.parametrize("file", sorted(PATCHES.glob("*.py")), ids=lambda file: file.stem)
def test_every_import_is_in_the_table(file: Path) -> None:
    known = {entry.path for entry in ENTRIES}
    missing = {name for name in imports(file) if not any(path == name or path.startswith(f"{name}.") for path in known)}
    assert not missing, f"not in the table: {sorted(missing)}"


def test_the_core_imports_nothing_of_sglang() -> None:
    for file in PACKAGE.glob("*.py"):
        assert not imports(file), file


def test_every_hook_names_a_function_of_ours() -> None:
    source = {file.stem: ast.parse(file.read_text()) for file in PATCHES.glob("*.py")}
    for entry in ENTRIES:
        assert (entry.hook is None) == (entry.by is None), entry.path
        if entry.by:
            module, _, name = entry.by.partition(":")
            functions = {n.name for n in source[module].body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
            assert name in functions, entry.by


def test_no_entry_twice() -> None:
    seen = [(e.path, role, e.process) for e in ENTRIES for role in e.roles]
    assert len(seen) == len(set(seen))
