"""What `bench_transport.py` has found: Markdown, made from its samples alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from samples import percentile
from tables import markdown

Row = Mapping[str, Any]

LEAST = {False: 0.9, True: 0.8}  # of the best plain stream, with loss and without
MOST_LATER_MS = 3.0  # an id at P99
MOST_TIMES = 1.5  # a small landing at P99
LEAST_SAMPLES = 200
LINK = ("Mbit/s", "RTT ms", "lost", "congestion", "best plain: streams")
KINDS = ("4K", "16K", "64K")  # blocks
ENGINES = ("Mooncake", "Mooncake tuned", "NIXL")


def text(data: Mapping[str, Any]) -> str:
    """The whole document."""
    rows = sorted(data["cells"].values(), key=lambda row: (row["loss"], row["rate_mbps"], row["rtt_ms"]))
    if not rows:
        return "# The KV streams on an emulated WAN\n\nNothing is measured yet.\n"
    lines = ["# The KV streams on an emulated WAN", "", _where(rows)]
    for part, section in SECTIONS.items():
        if those := [row for row in rows if row["part"] == part]:
            lines += ["", *section(those)]
    return "\n".join(lines) + "\n"


def _where(rows: Sequence[Row]) -> str:
    loads = [row["load_before"] for row in rows]
    versions = ", ".join(sorted({row["version"] for row in rows}))
    settings = {json.dumps(row["setting"]) for row in rows}
    mixed = "" if len(settings) == 1 else f" Made with different settings: {'; '.join(sorted(settings))}."
    return (
        f"`make bench-transport`: sglang-pdd {versions}, {rows[-1]['cores']} cores that both ends and the "
        f"emulator share, without a GPU; load average before the cells {min(loads)} to {max(loads)}. Figures of one "
        f"machine, to be read as ratios: run it yourself for yours.{mixed}"
    )


# --- goodput ----------------------------------------------------------------------------------------------------


def seconds(row: Row, kind: str) -> float | None:
    """Median, without the first push of its kind if there are others; None: it has failed."""
    runs = row["runs"].get(kind, [])
    taken = [run["s"] for run in runs[1:] or runs]
    return median(taken) if taken and None not in taken else None


def best_plain(row: Row) -> tuple[str, float]:
    """Streams, and their seconds."""
    found = {kind: seconds(row, kind) for kind in row["runs"] if kind.startswith("plain ")}
    kind, taken = min(((kind, taken) for kind, taken in found.items() if taken), key=lambda pair: pair[1])
    return kind.removeprefix("plain "), taken


def ratios(row: Row) -> dict[str, float | None]:
    """Goodput of each kind, the best plain one's as 1."""
    _, best = best_plain(row)
    return {kind: (best / taken if (taken := seconds(row, kind)) else None) for kind in row["runs"]}


def _goodput(rows: Sequence[Row]) -> list[str]:
    setting = rows[0]["setting"]
    table, missed = [], []
    for row in rows:
        found, least = ratios(row), LEAST[row["loss"] > 0]
        low = [f"{kind} {found[f'stream {kind}'] or 0:.2f}" for kind in KINDS if (found[f"stream {kind}"] or 0) < least]
        if low:
            missed.append(f"{row['rate_mbps']:g} Mbit/s, {row['rtt_ms']:g} ms, {row['loss']:g} lost: {', '.join(low)}")
        limit = f"{least:g}, {'missed' if low else 'held'}"
        pushes = str(min(len(runs) - 1 for runs in row["runs"].values()))
        table.append([*_link(row), *_ours(row), f"{found['TLS'] or 0:.2f}", pushes, limit])
    return [
        "## Goodput",
        "",
        f"{setting['mib']} MiB in 16 layers, from one pool into another in shuffled order: each block is alone. "
        "As a share of the best of 1, 4 and 8 plain TCP streams out of contiguous memory under the same congestion "
        "control; medians of so many pushes of each kind, which take turns, after one that connects. TLS: ours with "
        "TLS, blocks of 64 KB.",
        "",
        *markdown([*LINK, *KINDS, "TLS", "pushes", "limit"], table),
        "",
        f"Missed: {'; '.join(missed) or 'none'}.",
    ]


def _engines(rows: Sequence[Row]) -> list[str]:
    setting = rows[0]["setting"]
    names = [f"{name} {kind}" for name in ENGINES for kind in KINDS]
    table = []
    for row in rows:
        found = ratios(row)
        table.append([*_link(row), *_ours(row), *(_engine(row, name, found) for name in names)])
    return [
        "## Beside Mooncake and NIXL",
        "",
        "The same with SGLang's transfer engines, by one call as SGLang makes it for a chunk, under the same "
        "congestion control: Mooncake's TCP as installed and tuned (16 lanes, long queues), NIXL with UCX over TCP. "
        f"A kind that has used {setting['engine_s'] / 2:g} s is not repeated. F: failed, or took longer than "
        f"{setting['engine_s']:g} s, which would be a share of less than that in brackets.",
        "",
        *markdown([*LINK, *KINDS, *names], table),
    ]


def _link(row: Row) -> list[str]:
    streams, best = best_plain(row)
    mbps = row["setting"]["mib"] * 8.388608 / best
    facts = [f"{row['rate_mbps']:g}", f"{row['rtt_ms']:g}", f"{row['loss']:g}", row["congestion"]]
    return [*facts, f"{streams}, {mbps:.0f} Mbit/s"]


def _ours(row: Row) -> list[str]:
    found = ratios(row)
    return [f"{found[f'stream {kind}'] or 0:.2f}" for kind in KINDS]


def _engine(row: Row, kind: str, found: Mapping[str, float | None]) -> str:
    runs = row["runs"].get(kind)
    if not runs:
        return "-"
    if (ratio := found[kind]) is not None:
        return f"{ratio:.2f}"
    why = next(run["why"] for run in runs if run["s"] is None)
    return f"F (< {best_plain(row)[1] / float(why.split()[1]):.2f})" if why.startswith(">") else "F"


# --- delays -----------------------------------------------------------------------------------------------------


def p99(runs: Sequence[Sequence[float]]) -> float:
    """Median over the repetitions of each one's P99."""
    return median(percentile(run, 99) for run in runs)


def _delays(runs: Sequence[Sequence[float]]) -> str:
    worst = max(max(run) for run in runs)
    return f"{median(percentile(run, 50) for run in runs):.1f} / {p99(runs):.1f} / {worst:.1f}"


def _counts(row: Row) -> str:
    sizes = [len(run) for runs in row["ms"].values() for run in runs]
    few = " (too few)" if min(sizes) < LEAST_SAMPLES else ""
    return f"{len(next(iter(row['ms'].values())))} x {min(sizes)}{few}"


def _ids(rows: Sequence[Row]) -> list[str]:
    table = []
    for row in rows:
        later = p99(row["ms"]["paced"]) - p99(row["ms"]["idle"])
        table.append(
            [
                f"{row['rate_mbps']:g}",
                f"{row['rtt_ms']:g}",
                *(_delays(row["ms"][name]) for name in ("idle", "paced", "unpaced")),
                _counts(row),
                f"{later:+.1f}",
                f"{MOST_LATER_MS:g}, {'held' if later <= MOST_LATER_MS else 'missed'}",
                f"{max(row['late_ms']):.1f}",
            ]
        )
    header = [
        "Mbit/s",
        "RTT ms",
        "idle: P50 / P99 / worst ms",
        "paced",
        "unpaced",
        "samples",
        "P99 later by ms",
        "limit",
    ]
    return [
        "## Ids beside KV",
        "",
        "One-way delay of a message of 100 token ids through PDD's endpoint (encrypted, each 5 ms): on an idle link, "
        "and while two transfers of 16 MiB are always on their way, paced to 90 % of the link and unpaced. P50 and P99 "
        "are medians over the repetitions, each with so many samples. Its processes have real-time priority, as the "
        "emulator has: they would not share cores with KV. Emulator late: by how much it has let a packet go too late "
        "at most, because this machine was busy.",
        "",
        *markdown([*header, "emulator late by ms"], table),
    ]


def _mix(rows: Sequence[Row]) -> list[str]:
    table = []
    for row in rows:
        times = p99(row["ms"]["beside cold"]) / p99(row["ms"]["alone"])
        table.append(
            [
                f"{row['rate_mbps']:g}",
                f"{row['rtt_ms']:g}",
                *(_delays(row["ms"][name]) for name in ("alone", "beside cold")),
                _counts(row),
                f"{times:.2f}",
                f"{MOST_TIMES:g}, {'held' if times <= MOST_TIMES else 'missed'}",
                f"{max(row['late_ms']):.1f}",
            ]
        )
    header = [
        "Mbit/s",
        "RTT ms",
        "alone: P50 / P99 / worst ms",
        "beside cold ones",
        "samples",
        "times",
        "limit",
        "emulator late by ms",
    ]
    return [
        "## Small transfers beside large ones",
        "",
        "One-way time from the submission of 64 KB (a page of 4 KB in each of 16 layers) until all of it is in the "
        "pool at the other end: alone, every 20 ms at random, and while two transfers of 16 MiB are always on their "
        "way to the same peer; paced to 90 % of the link. P50 and P99 are medians over the repetitions.",
        "",
        *markdown(header, table),
    ]


def _rough(rows: Sequence[Row]) -> list[str]:
    table = [
        [
            f"{row['rate_mbps']:g}",
            f"{row['rtt_ms']:g}",
            f"{row['loss']:.0%}",
            f"{row['jitter_ms']:g}",
            kind,
            f"{median(run['s'] for run in runs):.2f}",
            f"all {len(runs)}",
        ]
        for row in rows
        for kind, runs in row["runs"].items()
    ]
    header = ["Mbit/s", "RTT ms", "lost", "jitter ms", "what", "median s", "complete and equal"]
    return [
        "## On a rough link",
        "",
        f"{rows[0]['setting']['mib']} MiB in shuffled blocks; after each push all checksums are compared.",
        "",
        *markdown(header, table),
    ]


SECTIONS = {"goodput": _goodput, "ids": _ids, "mix": _mix, "rough": _rough, "engines": _engines}
