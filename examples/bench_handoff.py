"""What a handoff costs: what crosses the WAN (part A), and the gap that a user feels (part B).

A: the tokens of a relayed request cross an emulated WAN as KV, with SGLang's transfer engine, and as token ids, with
PDD's own messages; on an idle link and beside bulk traffic. Needs root, for network namespaces.
B: a request is relayed in a real cluster on this machine while others decode on main decode; what do they feel when
main decode takes it over, in each handoff mode, beside a request that is not handed over at all.

Writes all samples, a table and a picture to ``out/handoff``. Let the machine do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

sys.path.insert(0, str(Path(__file__).parent / "tiny"))

import handoff_gap
import handoff_report
import handoff_wan
import wan
from cluster import MODEL, ServerDied, exit_on_sigterm
from demo import kv_bytes_per_token
from handoff_gap import GapSetting
from handoff_wan import Geometry, LinkState, PeerError, WanSetting
from streams import StreamError

from sglang_pdd import __version__
from sglang_pdd.config import FLAGS

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
QUICK: dict[str, Any] = {"repeat": 5, "links": ["idle", "saturated"], "gap_repeat": 1, "others": [1, 4]}
COMPARED = ("one-shot", "catch-up")


def known_modes() -> tuple[str, ...]:
    """Handoff modes that this version of the plugin has."""
    return next(flag.choices or () for flag in FLAGS if flag.field == "handoff")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ``--quick`` changes defaults, and what is given wins."""

    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    modes = [mode for mode in COMPARED if mode in known_modes()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", choices=("a", "b", "all"), default="all")
    add("--quick", action="store_true", help="few repetitions: does it work, not how fast it is")
    add("--out", type=Path, default=ROOT / "out" / "handoff")
    add("--write-docs", action="store_true", help="docs/handoff.md and its picture, too")
    add(
        "--rerender", type=Path, metavar="JSON", help="measure nothing: table and picture from an earlier run's samples"
    )
    add("--model", type=Path, default=MODEL)
    add("--page-size", type=int, default=16, help="tokens of a page of KV (default: %(default)s)")

    part = parser.add_argument_group("part A, the WAN")
    add = part.add_argument
    add("--tokens", type=int, default=100, help="to hand over (default: %(default)s)")
    add("--repeat", type=int, default=50, help="transfers of each kind (default: %(default)s)")
    add("--rate-mbps", type=float, default=1000, help="of the link (default: %(default)s)")
    add("--rtt-ms", type=float, default=20, help="of the empty link (default: %(default)s)")
    add("--queue-kb", type=float, default=4096, help="of the bottleneck's queue (default: %(default)s)")
    add("--links", type=words, default=list(get_args(LinkState)), help="default: idle,paced,saturated")
    add("--streams", type=int, default=8, help="of bulk traffic (default: %(default)s)")
    add("--pause-ms", type=float, default=40, help="between transfers, on average (default: %(default)s)")
    add("--kv-bytes-per-token", type=int, default=46490, help="of a large model; default: the technical report's")
    add("--kv-layers", type=int, default=48, help="of a large model, each with K and V (default: %(default)s)")
    add("--no-realtime", action="store_true", help="run the emulator at ordinary priority")

    part = parser.add_argument_group("part B, the gap")
    add = part.add_argument
    add("--modes", type=words, default=modes, help=f"handoff modes to compare (default: {','.join(modes)})")
    add("--handoff-threshold", type=int, metavar="N", help="tokens of one catch-up pass (default: main decode's own)")
    add("--others", type=numbers, default=[1, 16, 64], help="requests beside it on main decode (default: 1,16,64)")
    add("--gap-repeat", type=int, default=7, help="repetitions (default: %(default)s)")
    add("--prompt-tokens", type=int, default=384, help="of the relayed request (default: %(default)s)")
    add("--eager-tokens", type=int, default=150, help="to be relayed, about (default: %(default)s)")
    add("--own-tokens", type=int, default=150, help="main decode's afterwards (default: %(default)s)")
    add(
        "--step-ms",
        type=float,
        default=0,
        metavar="MS",
        help="let every forward pass of relay and main decode take at least so long, as that of a large model does; "
        "the cores are free meanwhile (default: as fast as it goes)",
    )
    add("--wan-rate", help="e.g. 10mbit; default: such that about --eager-tokens are relayed")
    add(
        "--margin-ms", type=float, default=100, help="before and after that count as the handoff (default: %(default)s)"
    )
    add("--router", choices=("rust", "mini-lb"), default="rust")

    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    if unknown := set(args.links) - set(get_args(LinkState)):
        parser.error(f"--links: {', '.join(sorted(unknown))}: expected {', '.join(get_args(LinkState))}")
    if unknown := set(args.modes) - set(known_modes()):
        parser.error(f"--modes: this sglang-pdd has no {', '.join(sorted(unknown))}, only {', '.join(known_modes())}")
    return args


def part_a(args: argparse.Namespace, say: handoff_wan.Say) -> dict[str, Any]:
    """Measure part A."""
    setting = _setting(WanSetting, args, realtime=not args.no_realtime)
    config = json.loads((args.model / "config.json").read_text())
    own = Geometry("tiny", config["num_hidden_layers"], kv_bytes_per_token(args.model), args.page_size)
    large = Geometry("large", args.kv_layers, args.kv_bytes_per_token, args.page_size)
    cases = handoff_wan.cases(args.tokens, own, large)
    if args.quick:
        cases = [case for case in cases if case.layout == "merged"]
    rows = handoff_wan.measure(setting, cases, say)
    return {"setting": {**asdict(setting), "tokens": args.tokens}, "models": [asdict(own), asdict(large)], "rows": rows}


def part_b(args: argparse.Namespace, say: handoff_gap.Say) -> dict[str, Any]:
    """Measure part B."""
    setting = _setting(GapSetting, args, threshold=args.handoff_threshold, repeat=args.gap_repeat)
    rows = handoff_gap.measure(setting, args.out / "logs", say)
    kept = {**asdict(setting), "model": args.model.name, "margin_ms": args.margin_ms}
    return {"setting": kept, "summary": handoff_gap.summarise(rows, args.margin_ms / 1000), "rows": rows}


def _setting(kind: Callable[..., T], args: argparse.Namespace, **others: Any) -> T:
    """A dataclass from the arguments of the same names, and what is called otherwise."""
    names = [field.name for field in fields(cast(Any, kind)) if field.name not in others]
    return kind(**{name: getattr(args, name) for name in names}, **others)


def version() -> str:
    """Of the plugin, and the commit in a checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return f"{__version__} {commit}".strip()


def surroundings(argv: Sequence[str]) -> dict[str, Any]:
    """What the figures depend on, besides the settings."""
    return {
        "command": " ".join(["python examples/bench_handoff.py", *argv]),
        "version": version(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def measure(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Both parts, or one; the samples are on disk after each."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {text}", flush=True)

    data = surroundings(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("a", part_a), ("b", part_b)):
        if args.part in (name, "all"):
            data[name] = part(args, say)
            data["seconds"] = round(time.monotonic() - begin)
            (args.out / "handoff.json").write_text(json.dumps(data) + "\n")
    return data


def main(argv: Sequence[str]) -> int:
    """0: done; 2: it cannot run here, or as asked."""
    args = parse(argv)
    if args.rerender:
        data = json.loads(args.rerender.read_text())
        args.out.mkdir(parents=True, exist_ok=True)
    else:
        if args.part != "b" and (reason := wan.obstacle()):
            print(f"bench_handoff: part A: {reason} (--part b does without)", file=sys.stderr)
            return 2
        exit_on_sigterm()
        try:
            data = measure(args, argv)
        except (wan.WanError, PeerError, ServerDied, StreamError) as error:
            print(f"bench_handoff: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("bench_handoff: interrupted", file=sys.stderr)
            return 130
    text = handoff_report.text(data)
    (args.out / "handoff.md").write_text(text)
    handoff_report.picture(args.out / "handoff.png", data)
    if args.write_docs:
        (ROOT / "docs" / "handoff.md").write_text(text)
        handoff_report.picture(ROOT / "docs" / "handoff.png", data)
    print(f"\n{text}\n{args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
