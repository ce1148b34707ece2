"""The KV streams on an emulated WAN, beside plain TCP streams, Mooncake and NIXL on the same link. Needs root.

goodput: the same bytes with 1, 4 and 8 plain TCP streams out of contiguous memory, with our streams from and into
    shuffled blocks of 4, 16 and 64 KB, and with TLS. Kinds take turns.
ids: what a message of token ids suffers beside a push that saturates the link, paced to 90 % of it and unpaced.
mix: what small transfers suffer beside large ones.
rough: 1 % loss and 20 ms jitter; is everything complete, and equal?
engines: goodput, with SGLang's engines as well: Mooncake as installed and tuned, and NIXL where it is installed (pip
    install '.[nixl]').

Writes all samples and a table to ``out/transport``. What is measured already is not measured again, so it can be broken
off at any time. Let the machine do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

import transport_report
from arguments import numbers, words
from bench_handoff import version
from cluster import exit_on_sigterm
from transport_link import PARTS, Cell, Link, Part, Setting
from wan import obstacle

ROOT = Path(__file__).resolve().parent.parent


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", type=words, default=list(get_args(Part)), help="default: all")
    add("--rates", type=numbers, default=[1000.0, 4000.0], help="Mbit/s (default: 1000,4000)")
    add("--rtts", type=numbers, default=[10.0, 20.0, 40.0], help="ms, of goodput and engines (default: 10,20,40)")
    add("--losses", type=numbers, default=[0.0, 0.001], help="of a segment, of goodput and engines (default: 0,0.001)")
    add("--congestion", default="bbr", help="of all connections (default: %(default)s)")
    add("--mib", type=int, default=64, help="of a push (default: %(default)s)")
    add("--reps", type=int, default=5, help="default: %(default)s")
    add("--streams", type=int, default=8, help="ours (default: %(default)s)")
    add("--ids-s", type=float, default=3.0, help="seconds of messages of each kind and repetition")
    add("--engine-s", type=float, default=12.0, help="seconds for each kind of an engine (default: %(default)s)")
    add("--busy", action="store_true", help="another Python thread is always running at both ends")
    add("--minutes", type=float, help="begin nothing more after so long; run it again for the rest")
    add("--again", action="store_true", help="measure again what is measured already")
    add("--out", type=Path, default=ROOT / "out" / "transport")
    add("--report", action="store_true", help="measure nothing: the table, from the samples")
    add("--write-docs", action="store_true", help="docs/transport.md, too")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} unknown, there are {', '.join(PARTS)}")
    return args


def cells(args: argparse.Namespace) -> list[Cell]:
    """All that was asked for."""
    found = []
    links = list(product(args.losses, args.rates, args.rtts))
    for part in ("goodput", "engines"):
        if part in args.parts:
            found += [Cell(part, rate, rtt, loss, congestion=args.congestion) for loss, rate, rtt in links]
    for part in ("ids", "mix"):
        if part in args.parts:
            found += [Cell(part, rate, 20.0, congestion=args.congestion) for rate in args.rates]
    if "rough" in args.parts:
        found.append(Cell("rough", args.rates[0], 20.0, 0.01, 20.0, args.congestion))
    return found


def main() -> None:
    args = parse(sys.argv[1:])
    exit_on_sigterm()
    samples = args.out / "samples.json"
    data: dict[str, Any] = json.loads(samples.read_text()) if samples.exists() else {"cells": {}}
    if not args.report:
        if reason := obstacle():
            raise SystemExit(f"no emulated WAN: {reason}")
        args.out.mkdir(parents=True, exist_ok=True)
        measure(args, data, samples)
    text = transport_report.text(data)
    (args.out / "transport.md").write_text(text)
    if args.write_docs:
        (ROOT / "docs" / "transport.md").write_text(text)
    print(text)


def measure(args: argparse.Namespace, data: dict[str, Any], samples: Path) -> None:
    """Measure what is missing; after each cell all is written."""
    setting = Setting(args.mib, args.reps, args.streams, args.ids_s, args.engine_s, args.busy)
    here = version()
    known = {key for key, row in data["cells"].items() if (row["setting"], row["version"]) == (asdict(setting), here)}
    todo = [cell for cell in cells(args) if args.again or str(cell) not in known]
    begun = time.monotonic()
    for index, cell in enumerate(todo):
        if index and args.minutes is not None and time.monotonic() > begun + 60 * args.minutes:
            print(f"{len(todo) - index} are left: run it again", flush=True)
            break
        print(f"[{index + 1}/{len(todo)}] {cell}", flush=True)
        load = os.getloadavg()[0]
        started = time.monotonic()
        with Link(cell, setting) as link:
            result = PARTS[cell.part](link, lambda text: print(f"    {text}", flush=True))
        data["cells"][str(cell)] = {
            **asdict(cell),
            "setting": asdict(setting),
            "version": here,
            "cores": os.cpu_count(),
            "load_before": round(load, 1),
            "seconds": round(time.monotonic() - started),
            **result,
        }
        draft = samples.with_suffix(".draft")
        draft.write_text(json.dumps(data))
        draft.replace(samples)


if __name__ == "__main__":
    main()
