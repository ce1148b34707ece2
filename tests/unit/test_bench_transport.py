"""The pure parts of `make bench-transport`: what is measured, what is left, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_transport
import pytest
import transport_link
import transport_report
from transport_link import Cell
from transport_memory import moves


def row(part: str, **more: Any) -> dict[str, Any]:
    setting = {"mib": 64, "reps": 5, "engine_s": 12.0}
    return {
        **{"part": part, "rate_mbps": 1000.0, "rtt_ms": 20.0, "loss": 0.0, "jitter_ms": 0.0, "congestion": "bbr"},
        **{"setting": setting, "version": "1", "cores": 2, "load_before": 0.5},
        **more,
    }


def runs(*seconds: float) -> list[dict[str, Any]]:
    return [{"s": each} for each in seconds]


def test_goodput_is_a_share_of_the_best_plain_median_and_the_first_push_does_not_count() -> None:
    measured = row(
        "goodput",
        runs={
            "plain 1": runs(9, 2, 2, 2),
            "plain 4": runs(9, 0.9, 1.0, 1.1),
            "stream 4K": runs(9, 1.25, 1.25, 2),
            "stream 16K": runs(9, 1, 1, 1),
            "stream 64K": runs(9, 0.5, 0.5, 0.5),
            "TLS": runs(9, 2, 2, 2),
        },
    )
    assert transport_report.best_plain(measured) == ("4", 1.0)
    assert transport_report.ratios(measured)["stream 4K"] == 0.8
    text = transport_report.text({"cells": {"one": measured}})
    assert "| bbr | 4, 537 Mbit/s | 0.80 | 1.00 | 2.00 | 0.50 | 3 | 0.9, missed |" in text
    assert "Missed: 1000 Mbit/s, 20 ms, 0 lost: 4K 0.80." in text
    measured["loss"] = 0.001
    assert "0.8, held" in transport_report.text({"cells": {"one": measured}})
    measured["part"] = "engines"
    measured["runs"] |= {
        "Mooncake 64K": runs(4),
        "Mooncake 16K": [{"s": None, "why": "error -1 after 2.0 s"}],
        "Mooncake 4K": [{"s": None, "why": "> 12 s"}],
        "NIXL 64K": runs(9, 1.25),
    }
    text = transport_report.text({"cells": {"one": measured}})
    assert "| 0.80 | 1.00 | 2.00 | F (< 0.08) | F | 0.25 | - | - | - | - | - | 0.80 |" in text


def test_delays_are_medians_of_each_repetitions_p99() -> None:
    idle, later = [10.0] * 200, [10.0] * 190 + [12.9] * 10
    series = {"idle": [idle] * 3, "paced": [later, later, [50.0] * 200], "unpaced": [later] * 3}
    text = transport_report.text({"cells": {"one": row("ids", ms=series, late_ms=[0.1])}})
    assert "| 10.0 / 12.9 / 50.0 |" in text and "| 3 x 200 | +2.9 | 3, held | 0.1 |" in text
    series = {"alone": [idle[:100]] * 3, "beside cold": [[16.0] * 100] * 3}
    text = transport_report.text({"cells": {"one": row("mix", ms=series, late_ms=[0.2])}})
    assert "| 3 x 100 (too few) | 1.60 | 1.5, missed | 0.2 |" in text


def test_only_what_is_missing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Cell] = []

    class Link:
        def __init__(self, cell: Cell, setting: Any) -> None:
            measured.append(cell)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(bench_transport, "Link", Link)
    monkeypatch.setitem(transport_link.PARTS, "rough", lambda link, say: {"runs": {"TLS": runs(1)}})
    monkeypatch.setitem(transport_link.PARTS, "mix", lambda link, say: {"ms": {"alone": [], "beside cold": []}})
    args = bench_transport.parse(["--parts", "mix,rough", "--rates", "100,200"])
    assert len(bench_transport.cells(args)) == 3
    samples = tmp_path / "samples.json"
    bench_transport.measure(bench_transport.parse(["--parts", "rough"]), {"cells": {}}, samples)
    data = json.loads(samples.read_text())
    assert len(measured) == len(data["cells"]) == 1
    args = bench_transport.parse(["--parts", "mix,rough", "--minutes", "0"])
    bench_transport.measure(args, data, samples)
    assert len(measured) == 2, "its time was up after one"
    args.minutes = None
    bench_transport.measure(args, data, samples)
    assert [cell.part for cell in measured] == ["rough", "mix", "mix"]


def test_what_it_says_when_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_transport.py"])
    monkeypatch.setattr(bench_transport, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="root"):
        bench_transport.main()
    with pytest.raises(SystemExit):
        bench_transport.parse(["--parts", "goodputt"])


def test_pushes_move_different_blocks_each_time() -> None:
    first, second = moves(1, 4, 64), moves(2, 4, 64)
    assert first != second and sorted(first[0]) == sorted(second[1]) == list(range(16))
