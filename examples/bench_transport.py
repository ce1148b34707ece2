"""Goodput of the WAN streams on an emulated link, beside plain TCP streams on the same link. Needs root.

    python examples/bench_transport.py --rates 1000,4000 --rtts 10,20,40 --losses 0,0.001

Each push moves the same bytes from one namespace to the other: with 1, 4 and 8 plain TCP streams out of contiguous
memory, and with the transport for each block size, contiguous and shuffled. Kinds take turns; medians are printed, with
the best plain median as 1. With --latency, what a small message suffers beside a push paced to 90 % of the link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from transport_ends import listen, send, serve, speak, spin
from wan import Wan, obstacle

from sglang_pdd import keys


def measure(args: argparse.Namespace, rate: float, rtt: float, loss: float) -> dict[str, Any]:
    me = [sys.executable, os.path.abspath(__file__)]
    common = ["--mib", str(args.mib), "--folder", args.folder, "--congestion", args.congestion]
    common += ["--busy"] if args.busy else []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Wan(rate_mbps=rate, delay_ms=rtt / 2, queue_kb=4096 * max(1, rate / 1000)) as wan:
        wan.set("ab", loss=loss, jitter_ms=args.jitter)
        server = wan.start("b", [*me, "--serve", wan.address("b"), *common], **pipes)
        hello = server.stdout.readline()
        here = ["--send", "--rate", str(rate), "--blocks", ",".join(map(str, args.blocks)), "--reps", str(args.reps)]
        here += ["--orders", ",".join(args.orders), "--streams", str(args.streams)]
        here += [f"--{flag}" for flag in ("tls", "latency") if getattr(args, flag)]
        client = wan.start("a", [*me, *here, *common], **pipes)
        client.stdin.write(hello)
        client.stdin.flush()
        for line in client.stdout:
            word, _, rest = line.partition(" ")
            if word == "done":
                return {**json.loads(rest), "link": wan.stats()["ab"]}
            if json.loads(rest)["do"] == "delays":
                answer = delays(wan, me, args.latency_s)
            elif json.loads(rest)["do"] == "reset":
                wan.reset()
                answer = "null\n"
            else:
                server.stdin.write(rest)
                server.stdin.flush()
                answer = server.stdout.readline()
            client.stdin.write(answer)
            client.stdin.flush()
    raise SystemExit("the sending side has ended early")


def delays(wan: Any, me: list[str], seconds: float) -> str:
    """One-way delays of small messages now, in ms, as a line of JSON."""
    listener = wan.start("b", [*me, "--listen", wan.address("b")], stdout=subprocess.PIPE, text=True)
    port = listener.stdout.readline().strip()
    wan.start("a", [*me, "--speak", f"{wan.address('b')}:{port}", "--latency-s", str(seconds)])
    return str(listener.stdout.readline())


def report(measured: dict[str, Any], mib: int) -> None:
    medians = {name: statistics.median(run["s"] for run in runs) for name, runs in measured["results"].items()}
    best = min(seconds for name, seconds in medians.items() if name.startswith("plain"))
    for name, seconds in medians.items():
        runs = measured["results"][name]
        line = f"  {name:<18} {seconds:7.3f} s  {mib * 8.388608 / seconds:7.0f} Mbit/s  {best / seconds:5.2f}"
        if "cpu_send" in runs[0]:
            scale = 128 / mib
            used = [statistics.median(run[side] for run in runs) * scale for side in ("cpu_send", "cpu_recv")]
            line += f"   CPU for 128 MiB: {used[0]:.2f} + {used[1]:.2f} s"
        print(line)
    if measured["latency"]:
        print("  messages, ms:", "  ".join(f"{name} {value:.2f}" for name, value in measured["latency"].items()))
        link = measured["link"]  # says whether the machine was quiet enough
        print(f"  the emulator, at most: {link['qmax_kb']} KB queued, {link['late_max_us'] / 1000:.1f} ms late")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    numbers = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--rates", type=numbers, default=[1000.0, 4000.0], help="Mbit/s")
    parser.add_argument("--rtts", type=numbers, default=[10.0, 20.0, 40.0], help="ms")
    parser.add_argument("--losses", type=numbers, default=[0.0, 0.001])
    parser.add_argument("--jitter", type=float, default=0.0, help="ms")
    parser.add_argument("--blocks", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--orders", type=lambda text: text.split(","), default=["shuffled", "contiguous"])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--congestion", default="bbr", help="of plain streams, too")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--busy", action="store_true", help="another Python thread is always running on both sides")
    parser.add_argument("--latency-s", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("out/bench_transport.json"))
    for hidden in ("--serve", "--folder", "--listen", "--speak"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.blocks = args.blocks or [4 << 10, 16 << 10, 64 << 10, 256 << 10]
    if args.busy and (args.serve or args.send):
        threading.Thread(target=spin, daemon=True).start()
    if args.serve:
        return serve(args.serve, args.mib, args.folder, args.congestion)
    if args.send:
        return send(args)
    if args.listen:
        return listen(args.listen)
    if args.speak:
        return speak(args.speak, args.latency_s)
    if reason := obstacle():
        raise SystemExit(f"no emulated WAN: {reason}")
    everything = []
    with tempfile.TemporaryDirectory() as folder:
        keys.make(folder, ["p", "md"])
        args.folder = folder
        for rate, rtt, loss in itertools.product(args.rates, args.rtts, args.losses):
            print(f"{rate:g} Mbit/s, {rtt:g} ms, loss {loss:g}, {args.congestion}, {args.mib} MiB", flush=True)
            measured = measure(args, rate, rtt, loss)
            report(measured, args.mib)
            everything.append({"rate_mbps": rate, "rtt_ms": rtt, "loss": loss, **measured})
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text(json.dumps({"congestion": args.congestion, "mib": args.mib, "runs": everything}))


if __name__ == "__main__":
    main()
