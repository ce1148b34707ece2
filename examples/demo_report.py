"""What the demo shows: a row per request, the table, ``report.json`` and the timeline picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from client import Answer

Event = Mapping[str, Any]
COLOURS = {"P": "#8e44ad", "RLD": "#e67e22", "MD": "#1f77b4", "WAN": "#c0392b", "stock": "#7f8c8d"}


@dataclass(frozen=True)
class Row:
    """One request in all three arms. Times are in seconds since the client sent it."""

    name: str
    pipeline: str
    prompt_tokens: int
    hit_tokens: int | None
    wan_bytes: int
    ttft_s: float
    stock_ttft_s: float
    landing_s: float | None
    handoff_gap_s: float | None
    tokens: dict[str, int]
    ids: list[int]
    stock_ids: list[int]
    single_ids: list[int]
    identical: bool
    total_s: float
    stock_total_s: float


class Story:
    """All that the three roles noted down about one request."""

    def __init__(self, events: Mapping[str, Sequence[Event]], rid: str) -> None:
        opened = [e for e in events["main"] if e["event"] == "opened" and e.get("rid") == rid]
        self.room: int | None = opened[-1]["room"] if opened else None
        self.prefill = self._of(events["prefill"], {self.room})
        relays = {e["relay_room"] for e in self.prefill if e["event"] == "relay_open"}
        self.relay = self._of(events["relay"], relays | {self.room})
        self.main = self._of(events["main"], {self.room})

    @staticmethod
    def _of(events: Iterable[Event], rooms: set[int | None]) -> list[Event]:
        return [e for e in events if e.get("room") is not None and e["room"] in rooms]

    def first(self, role: str, event: str) -> Event | None:
        """The first event of a kind, if there was one."""
        return next((e for e in getattr(self, role) if e["event"] == event), None)

    def time(self, role: str, event: str) -> float | None:
        """When it happened first."""
        found = self.first(role, event)
        return None if found is None else float(found["t"])

    @property
    def own_start(self) -> int | None:
        """Position of the first token that MD sampled itself, after others' tokens."""
        made = self.tokens()
        return made["P"] + made["RLD"] if made["MD"] else None

    @property
    def landed(self) -> float | None:
        """When the KV had crossed; None if the answer was finished before."""
        ends = [e for e in self.main if e["event"] == "landed" or (e["event"] == "closed" and e["why"] == "landed")]
        return float(ends[0]["t"]) if ends else None

    def tokens(self) -> dict[str, int]:
        """Output tokens by the role that made them."""
        finish = self.first("main", "finish")
        made = finish["by"] if finish else {}
        return {role: int(made.get(role, 0)) for role in ("P", "RLD", "MD")}

    def sources(self, count: int) -> list[str]:
        """Who made each of the first ``count`` tokens."""
        sources = ["MD"] * count
        for emit in (e for e in self.main if e["event"] == "emit"):
            for position in range(emit["start"], min(count, emit["start"] + emit["n"])):
                sources[position] = emit["source"]
        return sources


def make_row(name: str, answer: Answer, stock: Answer, single: Answer, story: Story) -> Row:
    """Put one request's three answers and its story side by side."""
    opened = story.first("main", "opened")
    landed, own = story.landed, story.own_start
    relayed = story.first("prefill", "relay_open") is not None
    return Row(
        name=name,
        pipeline="P-RLD-MD" if relayed else "P-MD",
        prompt_tokens=int(answer.meta["prompt_tokens"]),
        hit_tokens=None if opened is None else int(opened["hit"]),
        wan_bytes=sum(int(e["bytes"]) for e in story.prefill if e["event"] == "wan_sent"),
        ttft_s=answer.ttft,
        stock_ttft_s=stock.ttft,
        landing_s=None if landed is None else landed - answer.sent,
        handoff_gap_s=answer.arrivals[own] - answer.arrivals[own - 1] if own and own < len(answer.arrivals) else None,
        tokens=story.tokens(),
        ids=answer.ids,
        stock_ids=stock.ids,
        single_ids=single.ids,
        identical=answer.ids == single.ids,
        total_s=answer.arrivals[-1] - answer.sent,
        stock_total_s=stock.arrivals[-1] - stock.sent,
    )


# --- table and json ---------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    header = ["request", "pipeline", "prompt", "hit on MD", "WAN MB", "TTFT s", "stock TTFT s", "ratio", "landing s"]
    header += ["gap ms", "P", "RLD", "MD", "total s", "stock total s", "same ids"]
    lines = [header] + [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.pipeline,
        str(row.prompt_tokens),
        "-" if row.hit_tokens is None else f"{row.hit_tokens} ({row.hit_tokens / row.prompt_tokens:.0%})",
        f"{row.wan_bytes / 1e6:.2f}",
        f"{row.ttft_s:.3f}",
        f"{row.stock_ttft_s:.3f}",
        f"{row.ttft_s / row.stock_ttft_s:.3f}",
        "-" if row.landing_s is None else f"{row.landing_s:.2f}",
        "-" if row.handoff_gap_s is None else f"{row.handoff_gap_s * 1000:.0f}",
        *(str(row.tokens[role]) for role in ("P", "RLD", "MD")),
        f"{row.total_s:.2f}",
        f"{row.stock_total_s:.2f}",
        ("yes" if row.identical else "NO") + ("" if row.stock_ids == row.single_ids else " (stock: NO)"),
    ]


def write_json(path: Path, rows: Sequence[Row], setting: Mapping[str, Any]) -> None:
    """``report.json``: how the demo was set, and all rows."""
    path.write_text(json.dumps({**setting, "requests": [asdict(row) for row in rows]}, indent=1) + "\n")


# --- the picture ------------------------------------------------------------------------------------------------

LANES = {"client": 5.0, "MD": 4.0, "WAN": 3.0, "RLD": 2.0, "P": 1.0, "stock": -0.55}
LANE_NAMES = {
    "client": "tokens at\nthe client",
    "MD": "MD\nmain decode",
    "WAN": "WAN link",
    "RLD": "RLD\nrelay decode",
    "P": "P\nprefill",
    "stock": "tokens at\nthe client",
}
BAR = 0.42


def picture(
    path: Path, rows: Sequence[Row], answer: Answer, stock: Answer, story: Story, setting: Mapping[str, Any]
) -> None:
    """Draw one relayed request in all lanes, the same request on stock PD below it, and everybody's first token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (axes, bars) = plt.subplots(2, 1, figsize=(14, 10), height_ratios=[3.6, 1], layout="constrained")
    row = next(r for r in rows if r.ids is answer.ids)
    _Lanes(axes, answer, stock, story, row).draw()
    axes.set_title(
        f"One prompt of {row.prompt_tokens} tokens, answered across a WAN of {setting['wan_rate_limit']}: "
        f"first token after {row.ttft_s:.2f} s with PDD, {row.stock_ttft_s:.2f} s with stock prefill/decode",
        fontsize=14,
        loc="left",
        pad=12,
    )
    _first_tokens(bars, rows)
    figure.savefig(path, dpi=130)
    plt.close(figure)


class _Lanes:
    """The upper part of the picture."""

    def __init__(self, axes: Any, answer: Answer, stock: Answer, story: Story, row: Row) -> None:
        self.axes, self.answer, self.stock, self.story, self.row = axes, answer, stock, story, row
        self.end = max(answer.arrivals[-1] - answer.sent, stock.arrivals[-1] - stock.sent)

    def draw(self) -> None:
        """Everything, lane by lane."""
        self._frame()
        self._prefill()
        self._wan()
        self._relay()
        self._main()
        self._client()
        self._stock()

    def _at(self, role: str, event: str) -> float | None:
        time = self.story.time(role, event)
        return None if time is None else time - self.answer.sent

    def _frame(self) -> None:
        axes = self.axes
        axes.set_xlim(-0.02 * self.end, 1.02 * self.end)
        axes.set_ylim(-1.15, 5.75)
        axes.set_yticks(list(LANES.values()), [LANE_NAMES[lane] for lane in LANES], fontsize=11)
        axes.set_xlabel("seconds since the client sent the request", fontsize=11)
        axes.axhspan(0.5, 2.5, color="#fdf2e9", zorder=0)
        axes.axhspan(3.5, 4.5, color="#eaf2f8", zorder=0)
        axes.axhspan(-1.15, 0.1, color="#f2f3f4", zorder=0)
        axes.axhline(0.1, color="black", lw=1)
        for y, text in ((2.42, "datacenter A"), (4.42, "datacenter B"), (0.02, "the same request on stock SGLang PD")):
            axes.text(1.012 * self.end, y, text, ha="right", va="top", fontsize=10, style="italic", color="#566573")
        axes.grid(axis="x", color="#d5d8dc", lw=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)

    def _bar(self, lane: str, start: float, stop: float, colour: str, text: str = "", **style: Any) -> None:
        y, width = LANES[lane], max(stop - start, 0.003 * self.end)
        self.axes.barh(y, width, BAR, left=start, color=colour, **style)
        if not text:
            return
        if width > 0.0063 * self.end * len(text):
            self.axes.text(start + width / 2, y, text, ha="center", va="center", color="white", fontsize=10, zorder=4)
        else:
            self.axes.text(start + width + 0.006 * self.end, y, text, va="center", color=colour, fontsize=10)

    def _note(self, text: str, x: float, y: float, text_x: float, text_y: float, colour: str) -> None:
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.3}
        self.axes.annotate(text, (x, y), (text_x, text_y), arrowprops=arrow, color=colour, fontsize=10, va="center")

    def _arrow(self, x0: float, lane0: str, x1: float, lane1: str, colour: str, width: float = 1.2) -> None:
        up = 1 if LANES[lane1] > LANES[lane0] else -1
        ends = (x1, LANES[lane1] - up * BAR / 2), (x0, LANES[lane0] + up * BAR / 2)
        style = {"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", *ends, arrowprops=style, zorder=3)

    def _prefill(self) -> None:
        start, stop = self._at("prefill", "bootstrapped"), self._at("prefill", "queued")
        if start is not None and stop is not None:
            self._bar("P", start, stop, COLOURS["P"], f"prefill, {stop - start:.2f} s")
        first = self._at("prefill", "first_token")
        if first is not None:
            self._arrow(first, "P", self.row.ttft_s, "client", COLOURS["P"], 1.6)

    def _wan(self) -> None:
        sent = [e for e in self.story.prefill if e["event"] == "wan_sent"]
        if not sent:
            return
        times = [e["t"] - self.answer.sent for e in sent]
        begin, stop = times[0] - sent[0]["seconds"], times[-1]
        self._bar("WAN", begin, stop, COLOURS["WAN"])
        size = sum(e["bytes"] for e in sent) / 1e6
        label = f"the prompt's KV cache, {size:.1f} MB, {stop - begin:.1f} s"
        box = {"facecolor": COLOURS["WAN"], "edgecolor": "none", "pad": 2}
        at = (begin + stop) / 2, LANES["WAN"]
        self.axes.text(*at, label, ha="center", va="center", color="white", fontsize=10, bbox=box, zorder=4)

    def _relay(self) -> None:
        landed = self._at("relay", "relay_landed")
        ends = [e["t"] - self.answer.sent for e in self.story.relay if e["event"] in ("relay_token", "relay_stop")]
        stop = max(ends, default=None)
        queued = self._at("prefill", "queued")
        if landed is None or stop is None:
            return
        made = self.row.tokens["RLD"]
        self._bar("RLD", landed, stop, COLOURS["RLD"], f"decodes ahead: {made} tokens, sent to MD as ids")
        if queued is not None:
            self._arrow(queued, "P", landed, "RLD", COLOURS["P"])
        handoff = self._at("main", "own") or stop
        for step in range(1, 9):
            x = landed + (handoff - landed) * step / 9
            self._arrow(x, "RLD", x + 0.004 * self.end, "MD", COLOURS["RLD"], 0.8)

    def _main(self) -> None:
        landed, extend, own = (self._at("main", name) for name in ("landed", "extend", "own"))
        finish = self._at("main", "finish")
        colour = COLOURS["MD"]
        emit = self._at("main", "emit")
        passed = landed or finish
        if emit is not None and passed is not None and passed > emit:
            self._bar("MD", emit, passed, "#a9cce3")
            at, text = (emit + passed) / 2, "passes the tokens of P and RLD on"
            self.axes.text(at, LANES["MD"], text, ha="center", va="center", color="#154360", fontsize=10, zorder=4)
        if own is not None and finish is not None:  # else the relay has made the whole answer
            self._bar("MD", own, finish, colour, f"decodes the other {self.row.tokens['MD']} tokens")
        if extend is not None and own is not None:
            self._bar("MD", extend, own, "#154360", hatch="///", edgecolor="white")
            passes = [int(e["n"]) for e in self.story.main if e["event"] == "extend"]
            how = "one pass" if len(passes) == 1 else f"{len(passes)} passes"
            text = f"KV landed: {how} over {sum(passes)} tokens, then MD goes on"
            self._note(
                text, extend, LANES["MD"] + BAR / 2, max(0.0, extend - 0.38 * self.end), LANES["MD"] + 0.36, "#154360"
            )
        if landed is not None:
            self._arrow(landed, "WAN", landed, "MD", COLOURS["WAN"], 1.6)

    def _rug(self, lane: str, times: Sequence[float], colours: Sequence[str]) -> None:
        y = LANES[lane]
        self.axes.vlines(times, y - BAR / 2, y + BAR / 2, colors=list(colours), lw=0.9)

    def _client(self) -> None:
        times = [t - self.answer.sent for t in self.answer.arrivals]
        self._rug("client", times, [COLOURS[source] for source in self.story.sources(len(times))])
        y = LANES["client"] + BAR / 2
        self._note(f"first token {times[0]:.2f} s", times[0], y, times[0] + 0.03 * self.end, y + 0.34, COLOURS["P"])
        own = self.story.own_start
        if own and self.row.handoff_gap_s is not None:
            text = f"handoff: a gap of {self.row.handoff_gap_s * 1000:.0f} ms"
            self._note(text, times[own], y, times[own] + 0.02 * self.end, y + 0.34, COLOURS["MD"])
        self._end_of("client", times)

    def _stock(self) -> None:
        times = [t - self.stock.sent for t in self.stock.arrivals]
        y = LANES["stock"]
        self._bar("stock", 0, times[0], "#d5d8dc")
        wait = "prefill, then the KV crosses the WAN"
        self.axes.text(times[0] / 2, y, wait, ha="center", va="center", fontsize=10, color="#424949")
        self._rug("stock", times, [COLOURS["stock"]] * len(times))
        top = y + BAR / 2
        self._note(f"first token {times[0]:.2f} s", times[0], top, times[0] + 0.03 * self.end, top + 0.22, "#424949")
        self._end_of("stock", times)

    def _end_of(self, lane: str, times: Sequence[float]) -> None:
        y = LANES[lane] - BAR / 2 - 0.16
        text = f"{len(times)} tokens, done after {times[-1]:.1f} s"
        self.axes.text(times[-1], y, text, ha="right", va="center", fontsize=10, color="#424949")


def _first_tokens(axes: Any, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        for offset, value, colour in ((-0.19, row.ttft_s, COLOURS["RLD"]), (0.19, row.stock_ttft_s, COLOURS["stock"])):
            axes.barh(index + offset, value, 0.36, color=colour)
            axes.text(value, index + offset, f" {value:.2f} s", va="center", fontsize=10, color="#424949")
    axes.set_yticks(range(len(rows)), [f"{row.name}\n({row.pipeline})" for row in rows], fontsize=10)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_title(
        "Time to first token of every request: PDD (orange) and stock prefill/decode (grey)", loc="left", fontsize=12
    )
    axes.set_xlabel("seconds", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
