"""What `bench_wan.py` has found: Markdown and a picture, made from its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from handoff_report import markdown, milliseconds
from samples import percentile

Row = Mapping[str, Any]
Say = Callable[[str], None]

ARMS = {"lan": "stock, one datacenter", "stock": "stock, WAN", "pdd": "PDD, WAN"}
COLOURS = {"lan": "#7f8c8d", "stock": "#c0392b", "pdd": "#1f77b4"}
KINDS = {
    "cold": ("cold",),
    "turns": ("first turn", "later turn"),
    "agents": ("agent",),
    "mix": ("high-hit", "cold"),
    "steady": ("cold",),
}
WHAT = {
    "cold": "Cold prompts: 1500 new tokens each, one request after the other",
    "turns": "Conversations of three turns, two requests at once",
    "agents": "Agents: eight at once fork from one new context",
    "mix": "80 % high-hit, 20 % cold, four requests at once",
    "steady": "Cold prompts at random times, four a second at most: their KV takes at most 60 % of the link",
}


@dataclass(frozen=True)
class Limits:
    """Of a request that counts as good, in seconds: until the first token, and per token after it."""

    ttft: float
    itl: float


@dataclass(frozen=True)
class Group:
    """All that was measured of one arm, workload and link, over the repetitions."""

    rows: Sequence[Row]

    def values(self, name: str, kind: str | None = None) -> list[float]:
        """Of all requests, or of one kind."""
        return [r[name] for row in self.rows for r in row["requests"] if kind is None or r["kind"] == kind]

    def per_run(self, measure: Callable[[Row], float]) -> float:
        """The median repetition's."""
        return median(map(measure, self.rows))

    def p50(self, repeat: int, kind: str | None = None) -> float | None:
        """Median time to the first token in one repetition."""
        ttfts = Group([row for row in self.rows if row["repeat"] == repeat]).values("ttft", kind)
        return percentile(ttfts, 50) if ttfts else None


def line(row: Row) -> str:
    """One row, in short."""
    link = f"{row['mbps']:g} Mbit/s" if row["rtt_ms"] is None else _link(row)
    ttfts = [request["ttft"] for request in row["requests"]]
    wrong = sum(not request["right"] for request in row["requests"])
    sent = "" if row["rtt_ms"] is None else f", {row['bytes'] / 1e6:.1f} MB"
    return (
        f"{link}, repetition {row['repeat'] + 1}: {row['workload']}, {ARMS[row['arm']]}: TTFT P50 "
        f"{percentile(ttfts, 50):.3f} s, worst {max(ttfts):.3f} s, {row['seconds']:.0f} s{sent}, {wrong} wrong"
    )


def text(data: Mapping[str, Any], rows: Sequence[Row], limits: Limits) -> str:
    """The whole document."""
    requests = sum(len(row["requests"]) for row in rows)
    wrong = sum(not request["right"] for row in rows for request in row["requests"])
    repeats = len({row["repeat"] for row in rows})
    out = [
        "# PDD and stock prefill/decode over a WAN",
        "",
        f"`{data['command']}` (root, for network namespaces). sglang-pdd {_versions(rows)} on stock SGLang, "
        f"{data['cores']} cores without a GPU, {repeats} interleaved repetitions, {requests} requests; "
        f"{wrong} answers differed from the known one, {_alone(rows)} of them on one arm only (else the model errs).",
        "",
        "Three clusters run at once and are asked in turn by SGLang's `bench_serving`: stock with all of it in one "
        "datacenter (the floor), stock with prefill in A and decode in B (decode radix cache on, Mooncake over TCP "
        "with 16 lanes), and PDD with prefill and relay in A and main decode in B. Router and client are in B. The "
        f"model is the tiny one of `examples/tiny` (2 KB of KV a token, page {data['page_size']}): its prefill takes "
        "about a tenth of a second for 1500 tokens, so 25 Mbit/s are to it what a few Gbit/s are to a large model. "
        f"The bottleneck's queue is {data['queue_ms']:g} ms long, {data['loss']:g} of the packets are lost, the jitter "
        f"is {data['jitter_ms']:g} ms; PDD's KV is paced to {data['paced']:g} of the link, as docs/wan.md advises. PDD "
        "runs three servers where stock runs two, on the same cores. All have `--sleep-on-idle`: with it PDD's "
        "schedulers sleep also while they only wait for KV, where stock's spin.",
        "",
        "TTFT, the longest gap within an answer, and the time to its end are in milliseconds, over all requests of all "
        f"repetitions (n). A request is good if its first token takes at most {limits.ttft * 1000:g} ms and the others "
        f"{limits.itl * 1000:g} ms on average; requests per second are the median repetition's, and so are the bytes, "
        "both directions together, with headers, until the link was silent again. A short answer may end before its "
        "prompt has crossed: then PDD sends the rest when nothing else wants the link, and gives it up when memory is "
        "wanted. Where PDD's bytes are below stock's for cold prompts, that is why: main decode has not cached those.",
    ]
    for name in KINDS:
        if any(row["workload"] == name for row in rows):
            out += ["", f"## {WHAT[name]}", "", *_table(name, rows, limits)]
    out += ["", "## Side by side", "", *_ratios(rows), "", "![Time to first token](benchmarks.png)"]
    return "\n".join(out) + "\n"


def _alone(rows: Sequence[Row]) -> int:
    """Wrong answers to requests that another arm has answered right."""
    asked: dict[tuple[Any, ...], list[bool]] = {}
    for row in rows:
        for index, request in enumerate(row["requests"]):
            key = (row["mbps"], row["rtt_ms"], row["repeat"], row["workload"], index)
            asked.setdefault(key, []).append(request["right"])
    return sum(rights.count(False) for rights in asked.values() if any(rights))


def _versions(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row["version"] for row in rows))


def _table(name: str, rows: Sequence[Row], limits: Limits) -> list[str]:
    head = ["link", "", "n", "TTFT P50 / P90 / P99", "gap P50 / P90 / P99", "end P50 / P90 / P99"]
    head += ["WAN MB", "req/s", "good req/s"]
    lines = []
    for link, arm, group in _groups(name, rows):
        for kind in KINDS[name]:
            many = len(KINDS[name]) > 1
            sent = None if arm == "lan" else group.per_run(lambda row: row["bytes"]) / 1e6
            whole = kind == KINDS[name][0]
            lines.append(
                [
                    "-" if arm == "lan" else link,
                    f"{ARMS[arm]}: {kind}" if many else ARMS[arm],
                    str(len(group.values("ttft", kind))),
                    *(_spread(group.values(what, kind)) for what in ("ttft", "gap", "total")),
                    "-" if sent is None else f"{sent:.1f}" if whole else "",
                    f"{group.per_run(_rate):.2f}" if whole else "",
                    f"{group.per_run(lambda row: _good(row, limits)):.2f}" if whole else "",
                ]
            )
    return markdown(head, lines)


def _ratios(rows: Sequence[Row]) -> list[str]:
    """PDD against stock over the same link, and against one datacenter and a round trip."""
    head = ["workload", "link", "TTFT P50, PDD / stock", "TTFT P99, PDD / stock", "WAN bytes, PDD / stock"]
    head += ["TTFT P50, PDD / (1.1 x datacenter + RTT)", "the same, P99"]
    lines = []
    for name in KINDS:
        groups = {(link, arm): group for link, arm, group in _groups(name, rows)}
        for link, arm in groups:
            pdd, stock = groups[link, arm], groups.get((link, "stock"))
            floor = groups.get((f"{pdd.rows[0]['mbps']:g} Mbit/s", "lan"))
            if arm != "pdd" or floor is None or stock is None:
                continue
            sent = [group.per_run(lambda row: row["bytes"]) for group in (pdd, stock)]
            for kind in KINDS[name]:
                p99 = [percentile(group.values("ttft", kind), 99) for group in (floor, stock, pdd)]
                rtt = pdd.rows[0]["rtt_ms"] / 1000
                lines.append(
                    [
                        f"{name}: {kind}" if len(KINDS[name]) > 1 else name,
                        link,
                        _number(_paired(pdd, stock, kind)),
                        f"{p99[2] / p99[1]:.2f}",
                        f"{sent[0] / sent[1]:.2f}" if kind == KINDS[name][0] else "",
                        _number(_paired(pdd, floor, kind, rtt)),
                        f"{p99[2] / (1.1 * p99[0] + rtt):.2f}",
                    ]
                )
    return [
        "P50: the median over the repetitions of the ratio of both medians; P99: over all requests.",
        "",
        *markdown(head, lines),
    ]


def _paired(ours: Group, other: Group, kind: str, rtt: float | None = None) -> float | None:
    """The median repetition's ratio of median TTFTs; with a round trip, against 1.1 of the other's and that."""
    ratios = []
    for repeat in sorted({row["repeat"] for row in ours.rows}):
        mine, theirs = ours.p50(repeat, kind), other.p50(repeat, kind)
        if mine is not None and theirs is not None:
            ratios.append(mine / (theirs if rtt is None else 1.1 * theirs + rtt))
    return median(ratios) if ratios else None


def _groups(name: str, rows: Sequence[Row]) -> Iterator[tuple[str, str, Group]]:
    """Link, arm and what was measured, in the order of the tables."""
    found: dict[tuple[float, float, int], list[Row]] = {}
    for row in rows:
        if row["workload"] == name:
            place = (row["mbps"], row["rtt_ms"] or 0.0, list(ARMS).index(row["arm"]))
            found.setdefault(place, []).append(row)
    for place in sorted(found):
        row = found[place][0]
        link = f"{row['mbps']:g} Mbit/s" if row["rtt_ms"] is None else _link(row)
        yield link, row["arm"], Group(found[place])


def _link(row: Row) -> str:
    return f"{row['mbps']:g} Mbit/s, {row['rtt_ms']:g} ms"


def _spread(values: Sequence[float]) -> str:
    return " / ".join(milliseconds(percentile(values, percent) * 1000) for percent in (50, 90, 99))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rate(row: Row) -> float:
    return len(row["requests"]) / float(row["seconds"])


def _good(row: Row, limits: Limits) -> float:
    good = sum(request["ttft"] <= limits.ttft and request["itl"] <= limits.itl for request in row["requests"])
    return good / float(row["seconds"])


def picture(path: Path, rows: Sequence[Row]) -> None:
    """Time to the first token by workload and link: median and P99 of each arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in KINDS if any(row["workload"] == name for row in rows)]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4 * len(names), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        groups = list(_groups(name, rows))
        links = list(dict.fromkeys(link for link, arm, _ in groups if arm != "lan"))
        for offset, arm in zip((-0.25, 0.0, 0.25), ARMS, strict=True):
            for link, its_arm, group in groups:
                if its_arm == arm:
                    ttfts = group.values("ttft")
                    beside = [other for other in links if other == link or other.startswith(f"{link},")]
                    for place in map(links.index, beside):
                        x = place + offset
                        low, high = percentile(ttfts, 50), percentile(ttfts, 99)
                        axis.plot([x, x], [low, high], color=COLOURS[arm], linewidth=1.5)
                        axis.plot(x, high, "_", color=COLOURS[arm], markersize=9)
                        axis.plot(x, low, "o", color=COLOURS[arm], markersize=6)
        axis.set_yscale("log")
        axis.set_title(name)
        axis.set_xticks(range(len(links)), [link.replace(", ", "\n") for link in links], fontsize=7)
        axis.grid(axis="y", which="both", alpha=0.25)
    axes[0][0].set_ylabel("TTFT in s: P50 (dot) to P99 (bar)")
    for arm, label in ARMS.items():
        axes[0][-1].plot([], [], "o-", color=COLOURS[arm], label=label)
    figure.legend(loc="outside upper center", ncols=len(ARMS))
    figure.savefig(path, dpi=130)
    plt.close(figure)
