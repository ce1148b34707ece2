"""The pure parts of `make bench-handoff`: statistics, blocks, gaps, tables, and what it says when it cannot run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import bench_handoff
import handoff_gap
import handoff_report
import handoff_wan
import pytest
import samples
import streams
import wan
from handoff_wan import Geometry

# --- statistics -------------------------------------------------------------------------------------------------


def test_summary_of_a_series() -> None:
    found = samples.summary([float(value) for value in range(100, 0, -1)])
    assert (found.n, found.mean, found.p50, found.p99, found.worst) == (100, 50.5, 50.0, 99.0, 100.0)
    assert found.sd == pytest.approx(28.866, abs=1e-3)
    assert samples.summary([3.0]) == samples.Summary(1, 3.0, 3.0, 3.0, 3.0, 0.0)
    with pytest.raises(ValueError):
        samples.summary([])


def test_gaps_around_a_window() -> None:
    times = [0.0, 1.0, 1.1, 1.2, 1.7, 1.8, 4.0]
    assert samples.worst_gap(times) == pytest.approx(2.2)
    assert samples.worst_gap(times, (1.15, 1.3)) == pytest.approx(0.5)  # a gap counts if any of it is inside
    assert samples.worst_gap(times, (4.5, 5.0)) is None
    assert samples.worst_gap_outside(times, (1.15, 5.0)) == pytest.approx(1.0)
    assert samples.worst_gap_outside(times, (-1.0, 5.0)) is None
    assert samples.median_gap(times, until=1.2) == pytest.approx(0.1)
    assert samples.median_gap(times, since=1.75) == pytest.approx(2.2)
    assert samples.median_gap(times, since=1.9) is None


# --- part A -----------------------------------------------------------------------------------------------------


def test_only_whole_pages_are_sent() -> None:
    shape = Geometry("large", layers=48, bytes_per_token=46490, page=16)
    assert (shape.regions, shape.pages(100), shape.pages(96)) == (96, 7, 6)
    assert shape.page_bytes == 16 * round(46490 / 96)


def test_neighbouring_pages_travel_as_one_block() -> None:
    assert handoff_wan.blocks([4, 5, 6], [0, 1, 2], regions=2, page_bytes=10) == [(0, 40, 0, 30), (1, 40, 0, 30)]
    # A run breaks where either side jumps.
    assert handoff_wan.blocks([4, 5, 6], [0, 1, 7], regions=1, page_bytes=10) == [(0, 40, 0, 20), (0, 60, 70, 10)]
    assert handoff_wan.blocks([6, 5], [6, 5], regions=1, page_bytes=1) == [(0, 6, 6, 1), (0, 5, 5, 1)]


@pytest.mark.parametrize(("layout", "fewest"), [("merged", 1), ("scattered", 2)])
def test_pages_of_a_fresh_and_of_a_used_pool(layout: handoff_wan.Layout, fewest: int) -> None:
    sources, targets = handoff_wan.pick_pages(layout, 7, random.Random(1))
    assert len(set(sources)) == len(set(targets)) == 7
    assert max(sources + targets) < 7 * handoff_wan.POOL_TO_PAGES
    found = handoff_wan.blocks(sources, targets, 1, 16)
    assert sum(length for *_, length in found) == 7 * 16
    assert len(found) == 1 if layout == "merged" else len(found) >= fewest


def test_what_was_sent_is_matched_with_what_arrived() -> None:
    sent = [[0, 1.0], [1, 2.0], [2, 3.0]]
    arrived = [[7, 0.5, True], [2, 3.030, False], [0, 1.010, True]]
    assert handoff_wan.join(sent, arrived) == {"ms": [10.0, 30.0], "failed": 1, "damaged": 1}


def test_ip_bytes_count_the_headers_of_merged_segments() -> None:
    stats: dict[str, Any] = {
        "ab": {"bytes": 3000, "segs": 3, "pk": 1},
        "ba": {"bytes": 52, "segs": 1, "pk": 1},
    }
    assert wan.ip_bytes(stats) == 3000 + 2 * 52 + 52


# --- part B -----------------------------------------------------------------------------------------------------


def event(name: str, t: float, **fields: Any) -> dict[str, Any]:
    """One event of main decode's timeline."""
    return {"event": name, "t": t, **fields}


def row(mode: str, handoff: bool = True, others: int = 1, pause: float = 0.1) -> dict[str, Any]:
    """A repetition: a token every 10 ms, relayed until it lands at 1.0, then a pause, then every 20 ms."""
    before = [0.05 + 0.01 * i for i in range(95)]
    after = [1.0 + pause + 0.02 * i for i in range(30)]
    events = [event("opened", 0.0)]
    if handoff:
        events += [event("emit", t, start=i, n=1, source="RLD" if i else "P") for i, t in enumerate(before)]
        events += [event("landed", 1.0, n=95), event("extend", 1.0, n=95), event("own", 1.0 + pause, start=95)]
    times = before + after if handoff else [0.05, *after]
    return {
        "mode": mode,
        "others": others,
        "index": 0,
        "wan_rate": "6mbit" if handoff else None,
        "arrivals": [[t, 1] for t in times],
        "crowd": [[[0.02 * i + (0.06 if i > 51 else 0), 1] for i in range(100)] for _ in range(others)],
        "events": events,
    }


def test_a_handoff_is_read_from_the_timeline() -> None:
    found = handoff_gap.find_handoff(row("one-shot")["events"])
    assert found is not None
    assert (found.landed, found.own, found.relayed, found.passes) == (1.0, 1.1, 95, ((1.0, 95),))
    assert found.last_pass_s == pytest.approx(0.1)
    assert handoff_gap.find_handoff([event("landed", 1.0, n=1), event("closed", 1.0, why="landed")]) is None


def test_figures_of_a_handoff() -> None:
    found = handoff_gap.figures(row("one-shot"), margin=0.1, length=9.0)
    assert found is not None
    assert found["worst"] == pytest.approx(110)
    assert found["outside"] == pytest.approx(20)
    assert (found["before"], found["after"]) == (pytest.approx(10), pytest.approx(20))
    assert found["ratio"] == pytest.approx(5.5)
    assert found["others_worst"] == pytest.approx(80)
    assert found["others_median"] == pytest.approx(20)
    assert (found["relayed"], found["passes"], found["recomputed"], found["tokens_per_arrival"]) == (95, 1, 95, 1)
    assert found["handoff"] == found["last_pass"] == pytest.approx(100)
    assert found["main_worst"] == pytest.approx(110)
    assert found["window"] == pytest.approx(300)


def test_without_a_handoff_a_quiet_window_is_looked_at() -> None:
    found = handoff_gap.figures(row(handoff_gap.NONE, handoff=False), margin=0.1, length=0.3)
    assert found is not None
    assert found["worst"] == pytest.approx(20) and found["ratio"] == pytest.approx(1)
    assert found["before"] is None and found["window"] == pytest.approx(300)
    # A handoff that did not happen has no figures, and neither has one that should not have happened.
    assert handoff_gap.figures(row("one-shot", handoff=False), 0.1, 0.3) is None
    assert handoff_gap.figures(row(handoff_gap.NONE), 0.1, 0.3) is None


def test_summary_takes_medians_over_repetitions_and_counts_failures() -> None:
    rows = [row("one-shot", pause=pause) for pause in (0.1, 0.2, 0.4)]
    rows += [row("one-shot", handoff=False), row(handoff_gap.NONE, handoff=False)]
    one_shot, none = handoff_gap.summarise(rows, margin=0.1)
    assert (one_shot["mode"], one_shot["repeat"], one_shot["failed"]) == ("one-shot", 4, 1)
    assert one_shot["worst"] == pytest.approx(210)
    assert [round(value) for value in one_shot["worst_all"]] == [110, 210, 410]
    assert none["window"] == pytest.approx(400)  # as long as the median of those around the handoffs


def test_a_better_rate_for_the_wan() -> None:
    relayed = [event("emit", 0.1 + 0.01 * i, start=1 + i, n=1, source="RLD") for i in range(50)]
    events = [event("opened", 0.0), *relayed, event("landed", 0.6, n=51)]
    # 5 Mbit took 0.5 s at 10 Mbit/s; 100 tokens are there 0.5 s later than it landed.
    assert handoff_gap.better_rate(events, bits=5e6, rate=1e7, tokens=100) == pytest.approx(5e6)
    # The answer was complete before it landed.
    assert handoff_gap.better_rate(events[:-1], bits=5e6, rate=2e6, tokens=100) == pytest.approx(5e6)
    # Hardly anything was relayed, or far too much.
    assert handoff_gap.better_rate(events[:1], bits=5e6, rate=1e6, tokens=100) == pytest.approx(1e6 / 4)
    assert handoff_gap.better_rate(events, bits=5e6, rate=1e7, tokens=2) == pytest.approx(4e7)


def test_events_that_are_read_together_are_one_arrival() -> None:
    def reply(tokens: int) -> bytes:
        return b'data: {"meta_info": {"completion_tokens": %d}}\n\n' % tokens

    chunks = [(1.0, reply(1)), (2.0, reply(2) + reply(5)[:20]), (3.0, reply(5)[20:]), (4.0, b"data: [DONE]\n\n")]
    assert streams.arrivals(chunks) == [(1.0, 1), (2.0, 1), (3.0, 3)]
    with pytest.raises(streams.StreamError):
        streams.arrivals([(1.0, b'data: {"error": {"message": "no"}}\n\n')])


# --- report -----------------------------------------------------------------------------------------------------


def data() -> dict[str, Any]:
    """Samples of both parts."""
    common = {"tokens": 100, "failed": 0, "damaged": 0, "ip_bytes": 700, "link_mbps": 900, "emulator_late_ms": 1}
    ids = {"case": "100 token ids", "model": "PDD", "kind": "ids", "content_bytes": 419, "sent_bytes": 419, "blocks": 1}
    kv = {"case": "KV", "model": "large", "kind": "kv", "content_bytes": 4_649_000, "sent_bytes": 5.2e6, "blocks": 96}
    shape = {"name": "large", "layers": 48, "bytes_per_token": 46490, "page": 16}
    part_a = {
        "setting": {"tokens": 100, "rate_mbps": 1000.0, "rtt_ms": 20.0, "queue_kb": 4096.0, "repeat": 2, "streams": 8},
        "models": [shape, shape],
        "rows": [
            {**common, **ids, "link": "idle", "ms": [10.0, 12.0]},
            {**common, **kv, "link": "idle", "ms": [190.0, 200.0]},
            {**common, **kv, "link": "saturated", "ip_bytes": None, "ms": [], "failed": 2},
        ],
    }
    setting = {"page_size": 16, "prompt_tokens": 384, "eager_tokens": 100, "margin_ms": 100.0, "repeat": 1}
    rows = [row(handoff_gap.NONE, handoff=False), row("one-shot"), row("one-shot", handoff=False, others=16)]
    rows += [row("catch-up", pause=0.03)]
    where = {"command": "bench", "version": "1", "cores": 2, "load_before": 0.0, "seconds": 60}
    return {**where, "a": part_a, "b": {"setting": setting, "rows": rows}}


def test_the_tables_say_what_was_measured() -> None:
    text = handoff_report.text(data())
    assert "| idle | 100 token ids | any | 419 B | 419 B | 700 B | 1 | 11.0 | 10.0 | 12.0 | 12.0 | 1.0 |" in text
    assert "| idle | KV | large | 4649 KB | 5200 KB | 700 B | 96 | 195 | 190 | 200 | 200 | 5.0 |" in text
    assert "| idle | 100 token ids + recompute | tiny | 419 B | - | - | - | 111 | 110 | 112 | 112 | 1.0 |" in text
    assert "failed | failed" in text and "Failed: KV (bulk, unpaced): 2." in text
    assert "Link use: bulk, unpaced 900 Mbit/s. No packet left the emulator more than 1.0 ms late." in text
    assert "| 1 | one-shot | 95 | 1 | 100 | 110 | 110 | 10.0 / 20.0 | 5.5 | 20.0 | 80.0 | 20.0 | 1 | 6mbit |" in text
    assert "| 1 | no handoff (P-MD) | - | - | - | - | 20.0 | - / 20.0 | 1.0 |" in text
    assert "| 16 | one-shot | - | - | - | - |" in text
    assert "left out: one-shot, 16 others: 1 of 1." in text
    assert all(line.startswith("|") for line in text.splitlines() if " | " in line)


@pytest.mark.parametrize("parts", ["a", "b", "ab"])
def test_one_part_is_enough(tmp_path: Path, parts: str) -> None:
    some = {name: value for name, value in data().items() if name not in ("a", "b") or name in parts}
    text = handoff_report.text(some)
    assert ("## A" in text, "## B" in text) == ("a" in parts, "b" in parts)
    handoff_report.picture(tmp_path / "handoff.png", some)
    assert (tmp_path / "handoff.png").stat().st_size > 10_000


def test_numbers_and_sizes() -> None:
    assert [handoff_report.milliseconds(value) for value in (None, 1.234, 123.4)] == ["-", "1.2", "123"]
    assert [handoff_report.size(value) for value in (419, 4_649_000)] == ["419 B", "4649 KB"]


# --- the program ------------------------------------------------------------------------------------------------


def test_part_a_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(wan.WanError, match="root"), wan.Wan(rate_mbps=1, delay_ms=1):
        pass
    assert bench_handoff.main(["--part", "a"]) == 2
    assert "need root" in capsys.readouterr().err


def test_quick_gives_way_to_what_is_said() -> None:
    assert bench_handoff.parse(["--quick"]).others == [1, 4]
    assert bench_handoff.parse(["--quick", "--others", "64"]).others == [64]
    assert bench_handoff.parse([]).modes == [m for m in ("one-shot", "catch-up") if m in bench_handoff.known_modes()]


@pytest.mark.parametrize("wrong", [["--modes", "sideways"], ["--links", "idle,fast"]])
def test_unknown_words_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench_handoff.parse(wrong)
    assert end.value.code == 2
    assert "expected" in capsys.readouterr().err or wrong[0] == "--modes"
