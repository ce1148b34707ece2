"""PDD at work on one machine: three roles and a router, beside stock prefill/decode and a single server.

The same requests go to three arms: a single server, whose answers are the reference; stock SGLang PD behind a WAN
limit; and PDD behind the same limit. Writes a report, a picture and the logs to ``out/demo``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "tiny"))

import tasks
from client import Answer, generate
from cluster import MODEL, Cluster, Running, exit_on_sigterm
from demo_report import Story, make_row, picture, table, write_json

OUT = Path(__file__).resolve().parent.parent / "out" / "demo"
WAN_TO_PREFILL = 10  # the KV of the cold prompt takes this many times its prefill
PAGE_SIZE = 16
ANSI = {"P": "35", "RLD": "33", "MD": "36", "stock": "90", "single": "90"}


@dataclass(frozen=True)
class Ask:
    """One request of the demo."""

    name: str
    what: str
    task: tasks.Task

    @property
    def max_new_tokens(self) -> int:
        """Room for the answer and, if there is one, the end-of-sequence token."""
        return self.task.answer_tokens + self.task.ends


def asks(prompt_tokens: int, answer_tokens: int) -> list[Ask]:
    """The conversation pieces: each shows another path through the roles."""
    cold = tasks.endless(1, prompt_tokens, answer_tokens, cycle=prompt_tokens // 4)
    turn = tasks.follow_up(cold, 2, 40, 20)
    short = tasks.cold(3, prompt_tokens, 8)
    small = tasks.cold(4, 60, 15)
    return [
        Ask("cold-long", "a long prompt nobody has seen: relayed", cold),
        Ask("second-turn", "the next turn of the same conversation: nearly all of it is on MD already", turn),
        Ask("cold-small", "a short prompt: its KV is across in no time, no relay", small),
        Ask("short-answer", "a long prompt with a short answer: done before its KV has landed", short),
    ]


# --- showing ----------------------------------------------------------------------------------------------------


class Screen:
    """Progress lines and coloured text."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._source = ""

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.begin:4.0f} s] {text}", flush=True)

    def paint(self, text: str, source: str) -> None:
        """Text made by a role: in its colour, or after its name where there are no colours."""
        if self.colour:
            text = f"\033[{ANSI[source]}m{text}\033[0m"
        elif source != self._source:
            text = f" [{source}]{'' if text.startswith(' ') else ' '}{text}"
        self._source = source
        print(text, end="", flush=True)

    def end_of_answer(self) -> None:
        """Finish the line."""
        self._source = ""
        print(flush=True)


class Attribution:
    """Who made which token, from MD's timeline while it grows."""

    def __init__(self, timeline: Path | None) -> None:
        assert timeline is not None
        self._file = timeline.open()
        self._line = ""
        self._rooms: dict[str, int] = {}
        self._spans: dict[int, list[tuple[int, int, str]]] = {}

    def source(self, rid: str, position: int) -> str:
        """The role that made a token the client has just received."""
        for _ in range(20):
            self._read()
            for start, stop, source in self._spans.get(self._rooms.get(rid, -1), []):
                if start <= position < stop:
                    return source
            time.sleep(0.002)  # the token can be here before the note about it
        return "MD"

    def _read(self) -> None:
        while part := self._file.readline():
            self._line += part
            if not self._line.endswith("\n"):
                return  # still being written
            event, self._line = json.loads(self._line), ""
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        spans = self._spans.setdefault(event.get("room", -1), [])
        if event["event"] == "opened":
            self._rooms[event["rid"]] = event["room"]
        elif event["event"] == "emit":
            spans.append((event["start"], event["start"] + event["n"], event["source"]))
        elif event["event"] == "closed":
            spans.append((event["n"], sys.maxsize, "MD"))


def run_arm(arm: Running, requests: Sequence[Ask], screen: Screen, source: Callable[[str, int], str]) -> list[Answer]:
    """Send all requests to one arm, one after the other, and show what comes back."""
    answers = []
    for ask in requests:
        screen.say(f"{arm.spec.kind} <- {ask.name}: {ask.what}")
        shown = 0
        count = 0

        def show(answer: Answer) -> None:
            nonlocal shown, count
            if len(answer.text) > shown:
                screen.paint(answer.text[shown:], source(answer.rid, count))
            shown, count = len(answer.text), len(answer.ids)

        rid = f"{arm.spec.kind}-{ask.name}"
        answer = generate(arm.url, ask.task.prompt, ask.max_new_tokens, logprobs=False, rid=rid, on_reply=show)
        screen.end_of_answer()
        answers.append(answer)
        settle(arm)
    return answers


def settle(arm: Running, timeout: float = 60) -> None:
    """Wait until a PDD arm has nothing in flight, so that each request has the link to itself."""
    if arm.spec.kind != "pdd":
        return
    end = time.monotonic() + timeout
    while any(arm.state(server).get("rooms") for server in arm.workers) and time.monotonic() < end:
        time.sleep(0.2)


# --- the run ----------------------------------------------------------------------------------------------------


def measure_prefill(single: Running, prompt_tokens: int) -> float:
    """Seconds that a prompt of this length takes to its first token, after a first one to warm up."""
    generate(single.url, tasks.cold(90, 1000, 10).prompt, 12, logprobs=False)
    times = [
        generate(single.url, tasks.cold(seed, prompt_tokens, 10).prompt, 1, logprobs=False).ttft for seed in (91, 92)
    ]
    return min(times)


def kv_bytes_per_token(model: Path) -> int:
    """Size of one token's keys and values, in float32."""
    config: dict[str, int] = json.loads((model / "config.json").read_text())
    return 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def pick_rate(kv_bytes: int, prefill_s: float) -> str:
    """The WAN limit, in whole Mbit/s, at which the KV takes about ten times the prefill."""
    return f"{max(1, round(kv_bytes * 8 / 1e6 / (WAN_TO_PREFILL * prefill_s)))}mbit"


def warm_up(arm: Running) -> None:
    """A first request, which is always slower, and not shown."""
    generate(arm.url, tasks.cold(93, 300, 10).prompt, 12, logprobs=False)
    settle(arm)


def main() -> int:
    """Run the demo; the exit status says whether all answers were the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--prompt-tokens", type=int, default=3500)
    parser.add_argument("--answer-tokens", type=int, default=1800)
    parser.add_argument("--router", choices=("rust", "mini-lb"), default="rust")
    args = parser.parse_args()
    exit_on_sigterm()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)

    screen = Screen()
    requests = asks(args.prompt_tokens, args.answer_tokens)
    with ExitStack() as stack:

        def launch(spec: Cluster) -> Running:
            return stack.enter_context(spec.launch(args.out / "logs", screen.say))

        screen.say("1/3 a single server, for the reference answers")
        single = launch(Cluster(kind="single", model=args.model, page_size=PAGE_SIZE))
        prefill_s = measure_prefill(single, args.prompt_tokens)
        kv_bytes = kv_bytes_per_token(args.model) * args.prompt_tokens
        rate = pick_rate(kv_bytes, prefill_s)
        screen.say(f"{args.prompt_tokens} tokens prefill in {prefill_s:.2f} s, their KV is {kv_bytes / 1e6:.1f} MB")
        screen.say(f"so the WAN gets {rate}: the KV takes {kv_bytes * 8 / float(rate[:-4]) / 1e6:.1f} s")
        single_answers = run_arm(single, requests, screen, lambda *_: "single")

        limited = {"model": args.model, "router": args.router, "page_size": PAGE_SIZE, "wan_rate_limit": rate}
        screen.say("2/3 PDD: prefill and relay in datacenter A, main decode in B, a stock router in front")
        pdd = launch(Cluster(kind="pdd", **limited))
        warm_up(pdd)
        attribution = Attribution(pdd.mains[0].timeline)
        pdd_answers = run_arm(pdd, requests, screen, attribution.source)
        events = {role: pdd.events(role) for role in ("prefill", "relay", "main")}

        screen.say("3/3 stock SGLang prefill/decode behind the same WAN limit")
        stock = launch(Cluster(kind="stock", **limited))
        warm_up(stock)
        stock_answers = run_arm(stock, requests, screen, lambda *_: "stock")
        screen.say("stopping the servers")
        for arm in (single, pdd, stock):
            arm.terminate()
        stories = [Story(events, answer.rid) for answer in pdd_answers]
        names = [ask.name for ask in requests]
        rows = list(map(make_row, names, pdd_answers, stock_answers, single_answers, stories))
        setting = {"wan_rate_limit": rate, "prefill_s": prefill_s, "kv_bytes": kv_bytes, "page_size": PAGE_SIZE}
        write_json(args.out / "report.json", rows, setting)
        picture(args.out / "timeline.png", rows, pdd_answers[0], stock_answers[0], stories[0], setting)

    screen.say("done")
    print(f"\n{table(rows)}\n\n{args.out / 'report.json'}\n{args.out / 'timeline.png'}")
    different = [row.name for row in rows if not row.identical or row.stock_ids != row.single_ids]
    if different:
        print(f"answers that differ from the single server's: {', '.join(different)}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
