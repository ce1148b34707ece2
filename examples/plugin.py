"""Plugins for SGLang that tests and benchmarks add: distributions of one module, in a folder on ``PYTHONPATH``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import Cluster


def install(
    spec: Cluster, folder: Path, name: str, source: str, roles: Sequence[str], env: Mapping[str, str] | None = None
) -> Cluster:
    """The same cluster, whose servers of these roles load the module ``name`` and call its ``register()``."""
    home = folder / name
    info = home / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (home / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    by_role = {role: dict(spec.env.get(role, {})) for role in (*spec.env, *roles)}
    for role in roles:
        path = by_role[role].get("PYTHONPATH")
        by_role[role] |= {"PYTHONPATH": f"{path}:{home}" if path else str(home), **(env or {})}
    return dataclasses.replace(spec, env=by_role)
