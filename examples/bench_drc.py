"""What MD's cache costs beside SGLang's own, and what it spares the WAN.

Both run on SGLang's tree and allocator, in the order of a simulated clock: a request comes, its missing KV crosses a
link that serves one after the other, it decodes, it ends. Time is taken around matching, inserting and evicting; of the
two caches in turn, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("SGLANG_PLATFORM", "pdd_cpu")

from cache_pool import World, publish_arguments
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from traffic import Call, agents, conversations

from sglang_pdd.drc import BINS, hit_bin
from sglang_pdd.patches.drc import DecodeCache

CONTEXT = 140_000  # tokens of the longest prompt with its answer
SECONDS_A_TOKEN = 0.02  # of decoding


class Run:
    """One pass of a cache over the traffic.

    Args:
        link: tokens of KV that cross the WAN in a second.
    """

    def __init__(self, kind: type[UnifiedRadixCache], size: int, page: int, link: float) -> None:
        self.world = World(size, page, kind, rows=512, context=CONTEXT)
        self.cache = self.world.cache
        self.ours = kind is DecodeCache
        self.link, self.free_at = link, 0.0
        self.seconds: Counter[str] = Counter()
        self.sent = self.asked = 0
        self.rooms = itertools.count(1)
        self.waiting: deque[Call] = deque()

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Time spent in here counts as ``what``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - begin

    def over(self, calls: Sequence[Call]) -> Run:
        order = itertools.count()
        events: list[tuple[float, int, str, Any]] = [(c.at, next(order), "comes", c) for c in calls]
        heapq.heapify(events)
        while events:
            now, _, what, subject = heapq.heappop(events)
            if what == "comes":
                self.waiting.append(subject)
            elif what == "landed":
                self._landed(*subject)
                heapq.heappush(events, (now + len(subject[1].output) * SECONDS_A_TOKEN, next(order), "ends", subject))
            else:
                self._ends(*subject)
            while self.waiting and (admitted := self._admit(self.waiting[0])):
                call, (req, room, missing) = self.waiting.popleft(), admitted
                self.asked += len(call.prompt)
                self.sent += missing
                self.free_at = max(now, self.free_at) + missing / self.link
                # A follower lands no earlier than its leader: the link serves one after the other.
                heapq.heappush(events, (self.free_at, next(order), "landed", (req, call, room)))
        assert not self.waiting, "a prompt is larger than the pool"
        assert self.world.accounted() == self.world.size
        return self

    def _admit(self, call: Call) -> tuple[Any, int, int] | None:
        world, cache = self.world, self.cache
        req = world.request(call.prompt)
        with self.clock("match"):
            hit = world.admit(req)
        if hit is None:
            return None
        room = next(self.rooms)
        if self.ours:
            with self.clock("mark"):
                row = cache.row(req, len(call.prompt))
                cache.pending.begin(room, row, hit // world.page)
            with self.clock("insert"):
                cache.publish(req)
        return req, room, len(call.prompt) - hit

    def _landed(self, req: Any, call: Call, room: int) -> None:
        if self.ours:
            with self.clock("mark"):
                self.cache.pending.progress(room)
                assert self.cache.pending.ready(room)
                self.cache.pending.end(room)
        with self.clock("insert"):
            self.cache.checkpoint(req, up_to=len(call.prompt))

    def _ends(self, req: Any, call: Call, room: int) -> None:
        # A pool that is full of running requests would retract one; here the answer is cut short.
        self.world.decode(req, call.output)
        with self.clock("insert"):
            self.world.finish(req)


def hits(calls: Sequence[Call], page: int) -> dict[str, int]:
    """Requests by bin of hit rate, as a prefill with a cache without end would see them."""
    world = World(1 << 23, page, UnifiedRadixCache, rows=8, context=CONTEXT)
    bins: Counter[str] = Counter()
    for call in calls:
        req = world.request(call.prompt)
        hit = world.admit(req)
        assert hit is not None
        bins[hit_bin(hit, (len(call.prompt) - 1) // page * page)] += 1
        world.decode(req, call.output)
        world.finish(req)
    return {name: bins[name] for name in BINS}


def compare(calls: Sequence[Call], size: int, page: int, link: float, rounds: int) -> dict[str, Any]:
    """Both caches in turn, ``rounds`` times; ratios are medians of pairs."""
    for kind in (UnifiedRadixCache, DecodeCache):
        Run(kind, size, page, link).over(calls[:20])  # what the libraries do at their first use
    pairs = []
    for turn in range(rounds):
        kinds = (UnifiedRadixCache, DecodeCache) if turn % 2 else (DecodeCache, UnifiedRadixCache)
        runs = {kind: Run(kind, size, page, link).over(calls) for kind in kinds}
        pairs.append((runs[UnifiedRadixCache], runs[DecodeCache]))
    stock, ours = pairs[0]

    def ratio(*parts: str) -> float:
        return statistics.median(sum(o.seconds[p] for p in parts) / sum(s.seconds[p] for p in parts) for s, o in pairs)

    def of(run: Run, *parts: str) -> float:
        return round(sum(run.seconds[p] for p in parts) * 1e6 / len(calls), 1)

    return {
        "requests": len(calls),
        "tokens": stock.asked,
        "us a request, stock": {p: of(stock, p) for p in ("match", "insert")},
        "us a request, ours": {p: of(ours, p) for p in ("match", "insert", "mark")},
        "ours / stock": {
            "match and evict": round(ratio("match"), 3),
            "insert": round(ratio("insert"), 3),
            "all": round(ratio("match", "insert", "mark"), 3),
        },
        "WAN bytes / no cache": {
            "stock decode radix cache": round(stock.sent / stock.asked, 4),
            "ours": round(ours.sent / ours.asked, 4),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=int, default=2_000_000, help="tokens of MD's pool")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--gbit", type=float, default=40, help="the link")
    parser.add_argument("--bytes-per-token", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, help="requests of the trace")
    args = parser.parse_args()
    publish_arguments()
    link = args.gbit * 1e9 / 8 / args.bytes_per_token
    traffic = {"conversations": conversations(args.limit), "agents": agents()}
    for name, calls in traffic.items():
        result = compare(calls, args.pool, args.page, link, args.rounds)
        result["requests by hit rate"] = hits(calls, args.page)
        print(json.dumps({name: result}, indent=2))


if __name__ == "__main__":
    main()
