"""The WAN benchmark without servers: what it asks, in which order, and what it makes of the answers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench_wan
import bench_wan_report as report
import pytest
import tasks
import wan_workloads as workloads

SIZES = workloads.Sizes(
    prompt=150, answers=(4, 8), cold=6, conversations=3, turns=3, turn=40, contexts=2, own=40, answer=8
)
LIMITS = report.Limits(0.5, 0.05)


def row(arm: str, ttft: float, repeat: int = 0, kind: str = "cold", sent: int = 1000) -> dict[str, Any]:
    """A measurement of ten requests, all alike."""
    cell = bench_wan.Cell(25.0, None if arm == "lan" else 20.0, repeat, "cold", arm)
    request = {"kind": kind, "ttft": ttft, "gap": 0.01, "itl": 0.01, "total": ttft + 0.1, "right": True}
    return {
        "key": cell.key(),
        "version": "1",
        "mbps": cell.mbps,
        "rtt_ms": cell.rtt_ms,
        "repeat": repeat,
        "workload": "cold",
        "arm": arm,
        "seconds": 10.0,
        "bytes": sent,
        "requests": [dict(request) for _ in range(10)],
    }


@pytest.mark.parametrize("name", sorted(workloads.WORKLOADS))
def test_a_workload_is_the_same_for_the_same_seed_and_new_for_another(name: str) -> None:
    make = workloads.WORKLOADS[name]
    first, again, other = make(SIZES, 1), make(SIZES, 1), make(SIZES, 2)
    assert first == again
    prompts = {request.task.prompt for request in first.requests}
    assert len(prompts) == len(first.requests)
    heads = {request.task.prompt[:200] for request in (*first.before, *first.requests)}
    assert heads.isdisjoint(request.task.prompt[:200] for request in (*other.before, *other.requests))


@pytest.mark.parametrize("name", sorted(workloads.WORKLOADS))
def test_answers_are_known(name: str) -> None:
    for request in workloads.WORKLOADS[name](SIZES, 3).requests:
        assert tasks.solve(request.task.prompt) == request.task.answer
        line = json.loads(request.line())
        assert line["max_tokens"] == request.task.answer_tokens
        assert " ".join(message["content"] for message in line["messages"]) == request.task.prompt


def test_a_turn_comes_after_the_one_before_it() -> None:
    requests = workloads.turns(SIZES, 1).requests
    for index in range(SIZES.conversations, len(requests)):
        before = requests[index - SIZES.conversations].task
        assert requests[index].task.prompt.startswith(f"{before.prompt} {before.answer} ")


def test_agents_of_a_group_share_their_context_and_nothing_more() -> None:
    requests = workloads.agents(SIZES, 1).requests
    group = [request.task.prompt.split() for request in requests[: SIZES.agents]]
    shared = SIZES.prompt + SIZES.answer
    assert len({tuple(words[:shared]) for words in group}) == 1
    assert len({tuple(words[shared : shared + 6]) for words in group}) == SIZES.agents


def test_a_fifth_of_the_mix_is_cold() -> None:
    mix = workloads.mix(SIZES, 1)
    known = [request.task.prompt for request in mix.before]
    cold = [r for r in mix.requests if not any(r.task.prompt.startswith(prompt) for prompt in known)]
    assert {r.kind for r in cold} == {"cold"}
    assert len(cold) * 5 == len(mix.requests)


def test_a_plan_has_each_measurement_once_and_each_arm_first_in_turn() -> None:
    cells = bench_wan.plan([25.0, 100.0], [10.0, 40.0], ["cold", "mix"], bench_wan.ARMS, 2)
    assert len({cell.key() for cell in cells}) == len(cells) == 2 * 2 * 2 * (1 + 2 * 2)
    assert [cell.mbps for cell in cells] == sorted(cell.mbps for cell in cells)
    firsts = [ours.arm for ours, theirs in pairwise(cells) if {ours.arm, theirs.arm} == {"stock", "pdd"}]
    assert {"stock", "pdd"} <= set(firsts)
    assert bench_wan.plan([25.0], [10.0], ["cold"], ["pdd"], 1) == [bench_wan.Cell(25.0, 10.0, 0, "cold", "pdd")]


def test_seeds_differ_between_measurements_but_not_between_arms() -> None:
    args = bench_wan.parse([])
    bench = bench_wan.Bench(args, None, {})  # type: ignore[arg-type]
    cells = bench_wan.plan(args.rates, args.rtts, args.workloads, bench_wan.ARMS, args.repeat)
    seeds: dict[int, set[str]] = {}
    for cell in cells:
        seeds.setdefault(bench._seed(cell), set()).add(cell.key().rpartition(" ")[0])
    assert all(len(places) == 1 for places in seeds.values())


def test_results_survive_and_other_settings_are_refused(tmp_path: Path) -> None:
    results = bench_wan.Results(tmp_path, {"a": 1})
    results.add(row("pdd", 0.2))
    assert list(bench_wan.Results(tmp_path, {"a": 1}).rows) == ["25 20 0 cold pdd"]
    with pytest.raises(ValueError, match="other settings"):
        bench_wan.Results(tmp_path, {"a": 2})


def test_ratios_are_of_the_same_repetition() -> None:
    rows = [
        row("lan", 0.1, 0), row("stock", 1.0, 0), row("pdd", 0.13, 0),
        row("lan", 0.2, 1), row("stock", 2.0, 1), row("pdd", 0.24, 1, sent=500),
        row("lan", 0.1, 2), row("stock", 1.0, 2), row("pdd", 0.13, 2),
    ]  # fmt: skip
    data = {"command": "x", "version": "1", "cores": 2, "page_size": 16, "queue_ms": 50, "loss": 0, "jitter_ms": 0}
    text = report.text({**data, "paced": 0.9}, rows, LIMITS)
    side = text[text.index("## Side by side") :].splitlines()
    assert "| cold | 25 Mbit/s, 20 ms | 0.13 | 0.12 | 1.00 | 1.00 | 1.00 |" in side
    assert "90 requests; 0 answers differed" in text
    for measured in rows[:5]:
        measured["requests"][0]["right"] = measured["arm"] == "lan"
    rows[1]["requests"][1]["right"] = False
    assert "4 answers differed from the known one, 2 of them on one arm" in report.text(
        {**data, "paced": 0.9}, rows, LIMITS
    )


def test_a_late_request_is_not_good_and_a_wrong_one_is_counted() -> None:
    measured = row("pdd", 0.2)
    measured["requests"][0]["ttft"] = 0.6
    measured["requests"][1]["right"] = False
    assert report._good(measured, LIMITS) == pytest.approx(0.9)
    assert report.line(measured).endswith("1 wrong")


def test_the_picture_shows_links_and_arms(tmp_path: Path) -> None:
    report.picture(tmp_path / "a.png", [row("lan", 0.1), row("stock", 1.0), row("pdd", 0.2)])
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("argv", [["--workloads", "hot"], ["--arms", "lan,mine"]])
def test_unknown_words_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_wan.parse(argv)
    assert "expected" in capsys.readouterr().err
