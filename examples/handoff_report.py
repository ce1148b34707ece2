"""What `bench_handoff.py` has found: Markdown and a picture, made from its samples alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from handoff_gap import NONE, find_handoff, summarise
from samples import Summary, percentile, summary
from tables import markdown

Data = Mapping[str, Any]
Row = Mapping[str, Any]

LINKS = {"idle": "idle", "paced": "bulk, paced", "saturated": "bulk, unpaced"}
COLOURS = {"idle": "#27ae60", "paced": "#e67e22", "saturated": "#c0392b"}
MODE_COLOURS = {NONE: "#7f8c8d", "one-shot": "#c0392b", "catch-up": "#1f77b4", "auto": "#8e44ad"}
HATCHED = {"facecolor": "white", "hatch": "///"}
REPORT: tuple[tuple[str, ...], ...] = (
    ("KV, 4649 KB", "185", "512.6", "-"),
    ("ids, 1.5 KB, and the recompute", "305", "321.4", "4.8"),
)
"""The technical report's own measurement of 100 tokens: what, mean, worst, standard deviation in ms."""


# --- text -------------------------------------------------------------------------------------------------------


def text(data: Data) -> str:
    """The whole document."""
    lines = ["# What a handoff costs", "", f"`{data['command']}`: {_where(data)}"]
    if "a" in data:
        lines += ["", *_text_a(data)]
    if "b" in data:
        lines += ["", *_text_b(data["b"])]
    lines += ["", "![What a handoff costs](handoff.png)"]
    return "\n".join(lines) + "\n"


def _where(data: Data) -> str:
    return (
        f"sglang-pdd {data['version']}, {data['cores']} cores without a GPU, load average before it "
        f"{data['load_before']}, {data['seconds'] / 60:.0f} minutes. Figures of one run on one machine: run it "
        "yourself for yours."
    )


def milliseconds(value: float | None) -> str:
    """Three digits, or all before the point; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def size(count: float) -> str:
    """Bytes, or KB of 1000 bytes."""
    return f"{count:.0f} B" if count < 10_000 else f"{count / 1000:.0f} KB"


def _text_a(data: Data) -> list[str]:
    part, setting = data["a"], data["a"]["setting"]
    own, large = part["models"]
    lines = [
        f"## A: what crosses the WAN for {setting['tokens']} tokens",
        "",
        f"Emulated link, {setting['rate_mbps']:g} Mbit/s, {setting['rtt_ms']:g} ms RTT, queue {setting['queue_kb']:g} "
        f"KB; {setting['repeat']} transfers of each kind, one at a time. Bulk: {setting['streams']} TCP streams the "
        "same way, paced to 90 % of the link or unpaced. Time: from the start at the sender until the receiver has it "
        "(KV: until the sender's status message is there, as in SGLang; the content of each transfer was checked).",
        "",
        f"- KV by Mooncake over TCP, pages of {own['page']} tokens, only whole pages, from DRAM to DRAM. *Fresh pool*: "
        "neighbouring pages, one block for each layer's K and V, the best case. *Used pool*: pages in random places, a "
        "block for each. As installed Mooncake uses 4 connections.",
        f"- *tiny*: this project's model, {own['bytes_per_token'] / 1000:.1f} KB of KV per token. *large*: no model, "
        "but memory of the size that the technical report gives, "
        f"{large['bytes_per_token'] / 1000:.1f} KB per token, in {large['layers']} layers (the number of layers is our "
        "assumption).",
        "- ids: one `Tokens` message through PDD's endpoint, encrypted. IP bytes: both ways, with acknowledgements.",
        "",
    ]
    header = [
        "link",
        "what",
        "model",
        "bytes of it",
        "sent",
        "IP bytes",
        "blocks",
        "mean ms",
        "P50",
        "P99",
        "worst",
        "sd",
    ]
    rows = [_row_a(row) for row in part["rows"]]
    passes = recompute(data)
    if passes:
        for row in part["rows"]:
            if row["kind"] == "ids" and row["tokens"] > 1 and row["ms"]:
                both = summary([ms + extra for ms, extra in product(row["ms"], passes)])
                what = f"{row['tokens']} token ids + recompute"
                sizes = [size(row["sent_bytes"]), "-", "-", "-"]
                rows.append([LINKS[row["link"]], what, "tiny", *sizes, *_statistics(both)])
    lines += markdown(header, rows)
    lost = [f"{row['case']} ({LINKS[row['link']]}): {row['failed']}" for row in part["rows"] if row["failed"]]
    lost += [
        f"{row['case']} ({LINKS[row['link']]}): {row['damaged']} damaged" for row in part["rows"] if row["damaged"]
    ]
    lines += ["", f"{_link_use(part['rows'])} Failed: {', '.join(lost) or 'none'}."]
    if passes:
        lines.append(
            "Recompute: the extend passes of part B's one-shot handoffs beside the fewest others, on one CPU core with "
            "the tiny model; every id time with every pass. It says nothing about a large model on a GPU."
        )
    lines += ["", "The technical report, on its own model and link:", ""]
    return lines + markdown(["what", "mean ms", "worst", "sd"], REPORT)


def _link_use(rows: Sequence[Row]) -> str:
    """How busy the links were, and whether the emulator could keep up."""
    used = {link: [row["link_mbps"] for row in rows if row["link"] == link] for link in LINKS if link != "idle"}
    busy = [f"{LINKS[link]} {percentile(values, 50):.0f} Mbit/s" for link, values in used.items() if values]
    late = max(row["emulator_late_ms"] for row in rows)
    return f"Link use: {', '.join(busy) or 'idle'}. No packet left the emulator more than {late:.1f} ms late."


def _statistics(s: Summary) -> list[str]:
    return [milliseconds(value) for value in (s.mean, s.p50, s.p99, s.worst, s.sd)]


def _row_a(row: Row) -> list[str]:
    statistics = _statistics(summary(row["ms"])) if row["ms"] else ["failed"] * 5
    on_ip = "-" if row["ip_bytes"] is None else size(row["ip_bytes"])
    sizes = [size(row["content_bytes"]), size(row["sent_bytes"]), on_ip, str(row["blocks"])]
    return [LINKS[row["link"]], row["case"], row["model"] if row["kind"] == "kv" else "any", *sizes, *statistics]


def recompute(data: Data) -> list[float]:
    """Milliseconds of one-shot extend passes beside the fewest others; empty without part B."""
    rows = [row for row in data.get("b", {}).get("rows", ()) if row["mode"] == "one-shot"]
    fewest = min((row["others"] for row in rows), default=None)
    found = [find_handoff(row["events"]) for row in rows if row["others"] == fewest]
    return [handoff.last_pass_s * 1000 for handoff in found if handoff is not None]


def _text_b(part: Data) -> list[str]:
    setting = part["setting"]
    lines = summarise(part["rows"], setting["margin_ms"] / 1000)
    return [
        "## B: the gap that a user feels",
        "",
        f"Three roles and a router on this machine, the model of `examples/tiny`, page size {setting['page_size']}. "
        f"One request of {setting['prompt_tokens']} tokens is relayed and handed over while others decode on main "
        f"decode; the WAN is as slow as it takes for about {setting['eager_tokens']} relayed tokens. Gaps are between "
        "arrivals at the client (tokens that are read together are one arrival). *Worst*: the longest gap from "
        f"{setting['margin_ms']:g} ms before the landing to {setting['margin_ms']:g} ms after main decode's first own "
        "token; without a handoff, in a window of the same length in the middle of the answer. *Median*: of the "
        "request's own gaps before the landing / after the handoff. *Worst/median*: against the median after. The "
        "others: the longest gap of any of them in the same window. *On MD*: between the tokens that its scheduler "
        "emitted, by its own timeline. Medians over "
        f"{setting['repeat']} repetitions, in brackets the range.{_pace(setting)}",
        "",
        *markdown(
            [
                *("others", "handoff", "tokens relayed", "passes", "landing to own token ms", "worst gap on MD ms"),
                *("worst gap ms", "median gap ms", "worst/median", "worst gap elsewhere ms", "others: worst gap ms"),
                *("others: median gap ms", "most tokens at once", "WAN"),
            ],
            [_row_b(line, part["rows"]) for line in lines],
        ),
        "",
        _hooks(part["rows"]),
        _failures(lines),
    ]


def _pace(setting: Row) -> str:
    """What was done to the forward passes."""
    if not setting.get("step_ms"):
        return ""
    return (
        " Every forward pass of relay and main decode is a real one, stretched to at least "
        f"{setting['step_ms']:g} ms, as one of a large model takes; the cores are free for the rest of that time."
    )


def _hooks(rows: Sequence[Row]) -> str:
    """How much of main decode's time our hooks take while nothing is relayed."""
    found = []
    for others in dict.fromkeys(row["others"] for row in rows):
        shares = [row["hooks"] * 100 for row in rows if row["others"] == others and "hooks" in row]
        if shares:
            found.append(f"{others} others {percentile(shares, 50):.2f} %")
    return (
        "Time in our hooks on main decode while the others decode and nothing is relayed, measured inside the process, "
        f"as a share of the time of its steps: {', '.join(found) or 'not measured'}."
    )


def mode_name(mode: str) -> str:
    """As the tables call it."""
    return "no handoff (P-MD)" if mode == NONE else mode


def _row_b(line: Row, rows: Sequence[Row]) -> list[str]:
    def number(name: str, form: str = ".0f") -> str:
        value = line.get(name)
        return "-" if value is None else format(value, form)

    rates = {row["wan_rate"] for row in rows if (row["mode"], row["others"]) == (line["mode"], line["others"])}
    return [
        str(line["others"]),
        mode_name(line["mode"]),
        number("relayed"),
        number("passes", "g"),
        milliseconds(line.get("handoff")),
        milliseconds(line.get("main_worst")),
        _with_range(line.get("worst"), line["worst_all"]),
        f"{milliseconds(line.get('before'))} / {milliseconds(line.get('after'))}",
        number("ratio", ".1f"),
        milliseconds(line.get("outside")),
        _with_range(line.get("others_worst"), line["others_worst_all"]),
        milliseconds(line.get("others_median")),
        number("tokens_per_arrival"),
        ", ".join(sorted(rate for rate in rates if rate)) or "-",
    ]


def _with_range(value: float | None, values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if value is None or len(known) < 2:
        return milliseconds(value)
    return f"{milliseconds(value)} ({milliseconds(min(known))}..{milliseconds(max(known))})"


def _failures(lines: Sequence[Row]) -> str:
    failed = [f"{line['mode']}, {line['others']} others: {line['failed']} of {line['repeat']}" for line in lines]
    failed = [word for word, line in zip(failed, lines, strict=True) if line["failed"]]
    return f"Repetitions without the handoff that was looked for, and left out: {'; '.join(failed) or 'none'}."


# --- picture ----------------------------------------------------------------------------------------------------


def picture(path: Path, data: Data) -> None:
    """Both parts side by side, or the one there is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = [(draw, data[name]) for name, draw in (("a", _draw_a), ("b", _draw_b)) if name in data]
    figure, axes = plt.subplots(1, len(parts), figsize=(8 * len(parts), 6), layout="constrained", squeeze=False)
    for axis, (draw, part) in zip(axes[0], parts, strict=True):
        draw(axis, part)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_a(axes: Any, part: Data) -> None:
    setting = part["setting"]
    names = list(dict.fromkeys((row["case"], row["model"], row["kind"]) for row in part["rows"]))
    links = [link for link in LINKS if any(row["link"] == link for row in part["rows"])]
    for row in part["rows"]:
        if not row["ms"]:
            continue
        place: float = names.index((row["case"], row["model"], row["kind"]))
        place += (links.index(row["link"]) - (len(links) - 1) / 2) * 0.24
        found, colour = summary(row["ms"]), COLOURS[row["link"]]
        axes.plot([min(row["ms"]), found.worst], [place, place], color=colour, lw=2)
        axes.plot(found.p50, place, "o", color=colour, ms=7)
        axes.text(found.worst * 1.12, place, f"{milliseconds(found.p50)} ms", va="center", fontsize=9, color=colour)
    for link in links:
        axes.plot([], [], "o-", color=COLOURS[link], label=f"link: {LINKS[link]}")
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_yticks(range(len(names)), [f"{case}\n({model})" if kind == "kv" else case for case, model, kind in names])
    axes.invert_yaxis()
    axes.grid(axis="x", color="#d5d8dc", lw=0.6)
    axes.set_xlabel("ms one way: median, and from the fastest to the slowest")
    axes.legend(loc="lower left", fontsize=9)
    link = f"{setting['rate_mbps']:g} Mbit/s, {setting['rtt_ms']:g} ms RTT"
    axes.set_title(f"Handing {setting['tokens']} tokens over a WAN of {link}", loc="left", fontsize=12)


def _draw_b(axes: Any, part: Data) -> None:
    from matplotlib.patches import Patch

    margin = part["setting"]["margin_ms"] / 1000
    lines = summarise(part["rows"], margin)
    loads = list(dict.fromkeys(line["others"] for line in lines))
    modes = list(dict.fromkeys(line["mode"] for line in lines))
    width = 0.8 / len(modes)
    for line in lines:
        place = loads.index(line["others"]) + (modes.index(line["mode"]) - (len(modes) - 1) / 2) * width
        colour = MODE_COLOURS.get(line["mode"], "black")
        for offset, name, style in ((-0.22, "worst", {"facecolor": colour}), (0.22, "others_worst", HATCHED)):
            if line.get(name) is None:
                continue
            x = place + offset * width
            axes.bar(x, line[name], 0.4 * width, **{"edgecolor": colour, **style})
            values = [value for value in line[f"{name}_all"] if value is not None]
            axes.plot([x] * len(values), values, ".", color="black", ms=4)
            axes.text(x, max(values), f"{milliseconds(line[name])}", ha="center", va="bottom", fontsize=8)
    known = [Patch(color=MODE_COLOURS.get(mode, "black"), label=mode_name(mode)) for mode in modes]
    known.append(Patch(facecolor="white", hatch="///", edgecolor="black", label="hatched: the worst-off of the others"))
    axes.set_xticks(range(len(loads)), [f"{count} other{'s' * (count != 1)}" for count in loads])
    axes.set_ylabel("longest gap around the handoff, ms (dots: each repetition)")
    axes.grid(axis="y", color="#d5d8dc", lw=0.6)
    axes.legend(handles=known, loc="upper left", fontsize=9)
    axes.set_title("The gap that a relayed request and its neighbours feel", loc="left", fontsize=12)
