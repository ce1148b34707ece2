"""PDD beside stock SGLang prefill/decode over the same emulated WAN, and beside stock inside one datacenter.

Three clusters run at once, with the same model and the same flags where they have the same flags: ``pdd`` and ``stock``
with prefill in datacenter A and decode, router and client in B; ``lan``, stock with all in B. SGLang's own
``bench_serving`` asks each in turn, ``lan`` once in each repetition, the others one right after the other on each link.
Needs root, for network namespaces. What was measured is kept in ``--out``: run it again and it goes on where it was
stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent / "tiny"))

import bench_wan_report as report
import wan_workloads as workloads
from arguments import numbers, words
from bench_handoff import surroundings, version
from cluster import MODEL, Cluster, Running, ServerDied, Site, exit_on_sigterm
from demo import kv_bytes_per_token, settle
from wan import Wan, WanError, ip_bytes, obstacle

ROOT = Path(__file__).resolve().parent.parent
PAGE_SIZE = 16
POOL_TOKENS = 60_000
ARMS = ("lan", "stock", "pdd")
MOST_PER_S = 4.0  # requests: more than that, and the cores are what is measured
QUIET_BYTES, QUIET_S = 40_000, 0.5  # heartbeats of six servers stay below this
TUNED = {"MC_TCP_LANES_PER_PEER": "16"}  # Mooncake's most, and best over a WAN; `cluster.py` sets its other limits
AGAIN = 10**9  # apart are the seeds of two attempts
PACED = 0.9  # of the link: what docs/wan.md advises
QUICK: dict[str, Any] = {"rates": [25.0], "rtts": [20.0], "repeat": 1}


class Incomplete(RuntimeError):
    """The client did not get its answers; the text says where to look."""


@dataclass(frozen=True)
class Cell:
    """One measurement: a workload on an arm. For stock inside one datacenter the link says only beside what."""

    mbps: float
    rtt_ms: float | None
    repeat: int
    workload: str
    arm: str

    def key(self) -> str:
        """Its name in the file of results."""
        rtt = "-" if self.rtt_ms is None else f"{self.rtt_ms:g}"
        return f"{self.mbps:g} {rtt} {self.repeat} {self.workload} {self.arm}"


def plan(
    rates: Sequence[float], rtts: Sequence[float], names: Sequence[str], arms: Sequence[str], repeat: int
) -> list[Cell]:
    """All measurements in their order: rates outermost, for PDD starts anew with each; arms innermost, each first in
    turn."""
    far = [arm for arm in arms if arm != "lan"]
    cells = []
    for mbps, round_ in product(rates, range(repeat)):
        if "lan" in arms:
            cells += [Cell(mbps, None, round_, name, "lan") for name in names]
        for (place, rtt_ms), name in product(enumerate(rtts), names):
            first = (round_ + place) % max(1, len(far))
            cells += [Cell(mbps, rtt_ms, round_, name, arm) for arm in (*far[first:], *far[:first])]
    return cells


class Results:
    """What has been measured, one JSON object a line; it survives the program.

    Raises:
        ValueError: the file was made with other settings.
    """

    def __init__(self, folder: Path, setting: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "runs.jsonl"
        kept = folder / "setting.json"
        text = json.dumps(setting, sort_keys=True)
        if self._file.exists() and kept.exists() and kept.read_text() != text:
            raise ValueError(f"{folder} holds results of other settings: choose another --out, or remove it")
        kept.write_text(text)
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}

    def add(self, row: dict[str, Any]) -> None:
        """Keep one."""
        self.rows[row["key"]] = row
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")


# --- one measurement --------------------------------------------------------------------------------------------


class Bench:
    """The client, the clusters and the link."""

    def __init__(self, args: argparse.Namespace, wan: Wan, arms: Mapping[str, Running]) -> None:
        self.args, self.wan, self.arms = args, wan, arms
        self.sizes = workloads.Sizes()
        self._link: tuple[float, float] | None = None

    def measure(self, cell: Cell, attempt: int = 0) -> dict[str, Any]:
        """One row of results. Each attempt asks something else: what the last one has asked may be cached."""
        if cell.rtt_ms is not None and (cell.mbps, cell.rtt_ms) != self._link:
            self._change(cell.mbps, cell.rtt_ms)
        arm = self.arms[cell.arm]
        workload = workloads.WORKLOADS[cell.workload](self.sizes, self._seed(cell) + attempt * AGAIN)
        if workload.before:
            self.ask(arm, replace(workload, requests=workload.before, concurrency=1))
        self._calm(arm)
        self.wan.reset()
        result = self.ask(arm, workload, cell.mbps)
        self._calm(arm)
        sent = ip_bytes(self.wan.stats())
        rows = [
            {
                "kind": request.kind,
                "ttft": ttft,
                "gap": max(gaps, default=0.0),
                "itl": sum(gaps) / max(1, request.task.answer_tokens - 1),
                "total": ttft + sum(gaps),
                "right": text.split() == request.task.answer.split(),
            }
            for request, ttft, gaps, text in zip(
                workload.requests, result["ttfts"], result["itls"], result["generated_texts"], strict=True
            )
        ]
        made = {"version": version(), "arms": sorted(self.arms), "seconds": result["duration"], "bytes": sent}
        return {"key": cell.key(), **asdict(cell), **made, "requests": rows}

    def _seed(self, cell: Cell) -> int:
        """The same for all arms; another for each link, workload and repetition, so that nothing is cached already."""
        places = [self.args.rates.index(cell.mbps), cell.repeat, list(workloads.WORKLOADS).index(cell.workload)]
        places.append(0 if cell.rtt_ms is None else 1 + self.args.rtts.index(cell.rtt_ms))
        return sum(place * 100**power for power, place in enumerate(places))

    def _change(self, mbps: float, rtt_ms: float) -> None:
        """Another link, and time for all to get used to it."""
        queue_kb = max(64.0, mbps * 1e6 / 8 * self.args.queue_ms / 1000 / 1024)
        rough = {"loss": self.args.loss, "jitter_ms": self.args.jitter_ms}
        self.wan.set(rate_mbps=mbps, delay_ms=rtt_ms / 2, queue_kb=queue_kb, **rough)
        self._link = (mbps, rtt_ms)
        seed = 10**8 + int(time.time())  # these prompts are new, too
        for name, arm in self.arms.items():
            if name != "lan":
                self.ask(arm, workloads.warm_up(self.sizes, seed))
                self._calm(arm)

    def ask(self, arm: Running, workload: workloads.Workload, mbps: float = math.inf) -> dict[str, Any]:
        """Run ``bench_serving`` here.

        Raises:
            Incomplete: a request failed, or all together took too long.
        """
        from sglang.benchmark import serving

        asked = workloads.write(self.args.out / "requests.jsonl", workload.requests)
        answered, log = self.args.out / "answers.jsonl", self.args.out / "client.log"
        answered.unlink(missing_ok=True)
        command = ["bench_serving", "--backend", "sglang-oai-chat", "--base-url", arm.url]
        command += ["--model", str(arm.spec.model), "--tokenizer", str(arm.spec.model)]
        command += ["--dataset-name", "openai", "--dataset-path", str(asked)]
        command += ["--num-prompts", str(len(workload.requests)), "--max-concurrency", str(workload.concurrency)]
        if workload.load is not None:
            size = kv_bytes_per_token(arm.spec.model) * self.sizes.prompt
            rate = min(MOST_PER_S, workload.load * mbps * 1e6 / 8 / size)
            command += ["--request-rate", f"{rate:g}"]
        command += ["--warmup-requests", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
        command += ["--output-file", str(answered), "--output-details"]
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file), patch.object(sys, "argv", command):
            try:
                with _at_most(self.args.timeout_s):
                    serving.cli_main()
            except (TimeoutError, SystemExit, ValueError) as error:
                raise Incomplete(f"{arm.spec.kind}, {workload.name}: {error!r}; {log}") from None
        result: dict[str, Any] = json.loads(answered.read_text())
        if result["completed"] != len(workload.requests):
            wrong = next(error for error in result["errors"] if error)
            raise Incomplete(f"{arm.spec.kind}, {workload.name}: {wrong[:500]}; {log}")
        return result

    def _calm(self, arm: Running) -> None:
        """Wait until nothing is under way, also no copy whose answer is over."""
        settle(arm)
        end = time.monotonic() + self.args.timeout_s
        before = ip_bytes(self.wan.stats())
        while time.monotonic() < end:
            time.sleep(QUIET_S)
            now = ip_bytes(self.wan.stats())
            if now - before < QUIET_BYTES:
                return
            before = now
        raise Incomplete(f"{arm.spec.kind}: the link does not fall silent")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when it takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- the run ----------------------------------------------------------------------------------------------------


def cluster(arm: str, wan: Wan, model: Path, mbps: float, relay_nice: int = 0) -> Cluster:
    """An arm, as seen from side ``b``."""
    far = Site(wan.address("a"), wan.command("a", []))
    near = Site(wan.address("b"))
    relay = Site(far.host, wan.command("a", ["nice", "-n", str(relay_nice)])) if relay_nice else far
    sites = {"prefill": near if arm == "lan" else far, "relay": relay, "main": near, "router": near}
    common: dict[str, Any] = {"model": model, "page_size": PAGE_SIZE, "max_total_tokens": POOL_TOKENS, "sites": sites}
    if arm != "pdd":
        return Cluster(kind="stock", env=dict.fromkeys(("prefill", "main"), TUNED), **common)
    open_ = ("--pdd-insecure",)  # nobody else is in the namespaces
    paced = ("--pdd-wan-rate-limit", f"{mbps * PACED:g}mbit")
    return Cluster(kind="pdd", flags={"prefill": (*open_, *paced), "relay": open_, "main": open_}, **common)


def measure(args: argparse.Namespace, results: Results, say: report.Say) -> None:
    """Everything that is missing."""
    cells = plan(args.rates, args.rtts, args.workloads, args.arms, args.repeat)
    missing = [cell for cell in cells if cell.key() not in results.rows]
    say(f"{len(cells)} measurements, {len(missing)} to do")
    if not missing:
        return
    done = len(cells) - len(missing)
    with ExitStack() as stack:
        wan = stack.enter_context(Wan(1000, 1, realtime=True))
        stack.enter_context(wan.inside("b"))

        def launch(arm: str, mbps: float, until: ExitStack) -> Running:
            say(f"starting {arm}")
            return until.enter_context(
                cluster(arm, wan, args.model, mbps, args.relay_nice).launch(args.out / "logs" / arm, say)
            )

        stocks = {arm: launch(arm, 0, stack) for arm in args.arms if arm != "pdd"}
        for mbps, some in groupby(missing, key=lambda cell: cell.mbps):
            with ExitStack() as inner:
                pdd = {"pdd": launch("pdd", mbps, inner)} if "pdd" in args.arms else {}
                bench = Bench(args, wan, {**stocks, **pdd})
                for arm in bench.arms.values():
                    bench.ask(arm, workloads.warm_up(bench.sizes, 2 * 10**8 + int(time.time())))
                for cell in some:
                    done += 1
                    try:
                        row = bench.measure(cell)
                    except Incomplete as error:  # an hour's work is not lost for one request
                        say(f"again: {error}")
                        row = bench.measure(cell, attempt=1)
                    results.add(row)
                    say(f"{done}/{len(cells)} {report.line(row)}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ``--quick`` changes defaults, and what is given wins."""

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="one link, one repetition: does it work, not how fast it is")
    add("--rates", type=numbers, default=[25.0, 100.0, 400.0], help="of the link, in Mbit/s (default: 25,100,400)")
    add("--rtts", type=numbers, default=[10.0, 40.0], help="of the empty link, in ms (default: 10,40)")
    add("--loss", type=float, default=0, help="part of the packets that is lost (default: %(default)s)")
    add("--jitter-ms", type=float, default=0, help="of the link's delay (default: %(default)s)")
    add("--queue-ms", type=float, default=50, help="length of the bottleneck's queue (default: %(default)s)")
    add("--workloads", type=words, default=list(workloads.WORKLOADS), help="default: all")
    add("--arms", type=words, default=list(ARMS), help=f"default: {','.join(ARMS)}")
    add("--repeat", type=int, default=5, help="repetitions (default: %(default)s)")
    add("--ttft-limit-ms", type=float, default=500, help="of a good request (default: %(default)s)")
    add("--itl-limit-ms", type=float, default=50, help="of a good request, on average (default: %(default)s)")
    add("--relay-nice", type=int, default=0, help="priority of the relay, which has cores of its own elsewhere")
    add("--timeout-s", type=float, default=600, help="of one measurement (default: %(default)s)")
    add("--model", type=Path, default=MODEL)
    add("--out", type=Path, default=ROOT / "out" / "wan")
    add("--write-docs", action="store_true", help="docs/benchmarks.md and its picture, too")
    add("--report-only", action="store_true", help="measure nothing: table and picture of what is in --out")
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    for name, known in (("workloads", tuple(workloads.WORKLOADS)), ("arms", ARMS)):
        if unknown := set(getattr(args, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: expected {', '.join(known)}")
    return args


def main(argv: Sequence[str]) -> int:
    """0: done; 1: something failed; 2: it cannot run here, or as asked."""
    args = parse(argv)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {text}", flush=True)

    setting = {
        "sizes": asdict(workloads.Sizes()),
        "queue_ms": args.queue_ms,
        "loss": args.loss,
        "jitter_ms": args.jitter_ms,
        "paced": PACED,
        "page_size": PAGE_SIZE,
        "model": args.model.name,
        **({"relay_nice": args.relay_nice} if args.relay_nice else {}),
        "rates": args.rates,
        "rtts": args.rtts,
    }
    try:
        results = Results(args.out, setting)
    except ValueError as error:
        print(f"bench_wan: {error}", file=sys.stderr)
        return 2
    if not args.report_only:
        if reason := obstacle():
            print(f"bench_wan: {reason}", file=sys.stderr)
            return 2
        exit_on_sigterm()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            measure(args, results, say)
        except (WanError, ServerDied, Incomplete) as error:
            print(f"bench_wan: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("bench_wan: interrupted; run it again to go on", file=sys.stderr)
            return 130
    if not results.rows:
        print("bench_wan: nothing measured yet", file=sys.stderr)
        return 2
    limits = report.Limits(args.ttft_limit_ms / 1000, args.itl_limit_ms / 1000)
    data = {**surroundings(argv), "command": f"make bench-wan ARGS='{' '.join(argv)}'", **setting}
    text = report.text(data, list(results.rows.values()), limits)
    (args.out / "wan.md").write_text(text)
    report.picture(args.out / "wan.png", list(results.rows.values()))
    if args.write_docs:
        (ROOT / "docs" / "benchmarks.md").write_text(text)
        report.picture(ROOT / "docs" / "benchmarks.png", list(results.rows.values()))
    print(f"\n{text}\n{args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
