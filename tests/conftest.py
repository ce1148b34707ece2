"""What all tests share: the examples on the path, and servers that stop when the run is cut off."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FULL = os.environ.get("PDD_TEST_FULL") == "1"
FULL_REPORT = ROOT / "docs" / "test-full.md"

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "tiny")]


def pytest_configure(config: pytest.Config) -> None:
    """A cut-off run unwinds like Ctrl-C, or the servers of the session would live on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.addinivalue_line("markers", "on(*clusters): which clusters an end-to-end test runs on")
    config.stash[_BEGIN] = time.time()


_BEGIN = pytest.StashKey[float]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Keep the result of a full run."""
    if FULL:
        FULL_REPORT.write_text(_full_report(terminalreporter, time.time() - config.stash[_BEGIN]))


def _full_report(reporter: pytest.TerminalReporter, seconds: float) -> str:
    counts = {kind: reporter.stats.get(kind, []) for kind in ("passed", "failed", "error", "skipped", "xfailed")}
    total = ", ".join(f"{len(reports)} {kind}" for kind, reports in counts.items() if reports)
    left_out = len(reporter.stats.get("deselected", []))
    if left_out:
        total += f", {left_out} left out"
    lines = ["# The last full test run", "", f"{total} in {seconds / 60:.0f} minutes on {os.cpu_count()} cores.", ""]
    lines += ["| test | result | s |", "|---|---|---|"]
    for kind, reports in counts.items():
        lines += [f"| `{report.nodeid}` | {kind} | {getattr(report, 'duration', 0):.1f} |" for report in reports]
    return "\n".join(lines) + "\n"
