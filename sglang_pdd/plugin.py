"""SGLang's two entry points into this package. Nothing heavy is imported unless PDD was asked for."""

from __future__ import annotations

import os


def activate() -> str | None:
    """The reference CPU platform, only if it was named: any other answer would take a GPU user's platform away."""
    return "sglang_pdd.patches.platform.PddCpuPlatform" if os.environ.get("SGLANG_PLATFORM") == "pdd_cpu" else None


def register() -> None:
    pass
