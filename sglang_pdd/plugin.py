"""SGLang's two entry points into this package. Nothing else of it is imported unless PDD was asked for."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from pathlib import Path


def activate() -> str | None:
    """The reference CPU platform, only if it was named: any other answer would take a GPU user's platform away."""
    return "sglang_pdd.patches.platform.PddCpuPlatform" if os.environ.get("SGLANG_PLATFORM") == "pdd_cpu" else None


def register() -> None:
    """Called in the launcher before it parses arguments, and first thing in every process that it starts."""
    if multiprocessing.parent_process() is None:
        if _asked_for(sys.argv[1:]):
            from sglang_pdd.patches import guard

            guard.install("any", "launcher")
        return
    # The detokenizer needs nothing of ours.
    target = getattr(multiprocessing.current_process(), "_target", None)
    if "detokenizer" in getattr(target, "__name__", ""):
        return
    if os.environ.get("PDD_ROLE") or os.environ.get("PDD_WAN_RATE_LIMIT"):
        from sglang_pdd.patches import guard

        if os.environ.get("PDD_CHECKED") != "1":
            guard.fail("start PDD through `sglang serve` or `python -m sglang.launch_server`")
        guard.install(os.environ.get("PDD_ROLE") or "pace", "scheduler")
    if os.environ.get("PDD_ATTENTION") == "1":
        from sglang_pdd.patches import attention

        attention.register()


def _asked_for(argv: list[str]) -> bool:
    if any(word.startswith("--pdd-") or word in ("-h", "--help") for word in argv):
        return True
    if any(word.rpartition("=")[2] == "pdd_triton" for word in argv):  # our attention backend, without PDD
        return True
    # Only these two ask for anything; other PDD_* may be somebody else's (Kubernetes names a service's port so).
    if os.environ.get("PDD_ROLE") or os.environ.get("PDD_WAN_RATE_LIMIT"):
        return True
    if "--config" in argv[:-1]:  # SGLang's YAML file of flags
        try:
            text = Path(argv[argv.index("--config") + 1]).read_text()
        except (OSError, UnicodeDecodeError):
            return False  # SGLang will say so
        return re.search(r"""^["']?pdd[-_]|\bpdd_triton\b""", text, re.MULTILINE) is not None
    return False
