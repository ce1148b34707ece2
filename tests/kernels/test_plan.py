"""How work is divided: completely, without overlap, within the memory set aside, and evenly."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pdd.kernels.extend_decode import Plan
from sglang_pdd.kernels.tiles import Config, Shape, Tile

Item = tuple[int, int, int, int, int, int]  # request, q tile, first tile, last tile + 1, slot, is last
SHAPE = Shape(8, 2, 64, 64)


def planned(
    config: Config, news: Sequence[int], prefixes: Sequence[int], window: int = -1
) -> tuple[Plan, list[list[Item]]]:
    """The items of each pass."""
    ends = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (news, prefixes)]
    plan = Plan(config, SHAPE, len(news), sum(news), "cpu")
    plan.items.fill_(-7)
    plan.update(*ends, window)
    passes = []
    for run in plan.passes:
        count = int(plan.counts[run.index])
        assert count <= run.items, "more items than the grid has programs"
        rows = plan.items[run.first_item : run.first_item + run.items].tolist()
        assert all(row[0] == -7 for row in rows[count:])
        passes.append([tuple(row[:6]) for row in rows[:count]])
    return plan, passes


def cost(item: Item, tile: Tile, news: Sequence[int], prefixes: Sequence[int]) -> int:
    """In KV tiles."""
    request, _, begin, end, _, is_last = item
    edge = -(-(prefixes[request] % tile.n + news[request]) // tile.n)
    return end - begin + (edge if is_last else 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5000)), min_size=1, max_size=6),
    cores=st.integers(1, 150),
    window=st.sampled_from([-1, 0, 100]),
)
def test_complete_and_without_overlap(requests: list[tuple[int, int]], cores: int, window: int) -> None:
    news, prefixes = zip(*requests, strict=True)
    config = Config((Tile(16, 64, 4, 1, 2), Tile(64, 32, 4, 1, 1)), cores)
    plan, passes = planned(config, news, prefixes, window)
    parts: list[range] = []
    for run, tile, items in zip(plan.passes, config.tiles, passes, strict=True):
        for request, (new, prefix) in enumerate(requests):
            rows = new * SHAPE.group
            q_tiles = -(-rows // tile.m) if run.above < rows <= run.up_to else 0
            full = prefix // tile.n
            first = max(prefix - window, 0) // tile.n if window >= 0 else 0
            for q_tile in range(q_tiles):
                own = sorted(item for item in items if item[:2] == (request, q_tile))
                assert [item[5] for item in sorted(own, key=lambda i: (i[2], i[3], i[5]))] == [0] * (len(own) - 1) + [1]
                covered = [t for item in own for t in range(item[2], item[3])]
                assert sorted(covered) == list(range(first, full))
                assert (len(own) == 1) == (own[0][4] == -1)
            mine = [item for item in items if item[0] == request]
            assert {item[1] for item in mine} == set(range(q_tiles))
            if mine:
                splits, base, m, tiles = plan.requests[request].tolist()
                assert (splits, m, tiles) == (len(mine) // q_tiles, tile.m, q_tiles)
                begin = int(plan.requests[request, 1])
                if splits > 1:
                    slots = sorted(item[4] for item in mine)
                    assert slots == list(range(slots[0], slots[0] + len(mine)))
                    assert base == run.first_part + slots[0] * SHAPE.kv_heads * tile.m
                    parts.append(range(begin, begin + len(mine) * SHAPE.kv_heads * tile.m))
    parts.sort(key=lambda part: part.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(parts))
    assert not parts or parts[-1].stop <= plan.part.shape[0]
    owners = [request for request, new in enumerate(news) for _ in range(new)]
    assert plan.request_of.tolist() == owners


MIXES = {
    "one": ([1], [65536]),
    "three": ([1] * 3, [65536] * 3),
    "more than a wave": ([1] * 16, [32768] * 16),
    "one long among short": ([1] * 8, [131072] + [4096] * 7),
    "all lengths": ([1] * 8, [7000 * i for i in range(1, 9)]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_even(mix: str) -> None:
    """Blocks that take items in order, as the hardware hands them out, are done soon after the ideal time."""
    news, prefixes = MIXES[mix]
    tile = Tile(16, 64, 4, 3, 2)
    config = Config((tile,), cores=44)
    plan, (items,) = planned(config, news, prefixes)
    costs = [cost(item, tile, news, prefixes) for item in items for _ in range(SHAPE.kv_heads)]
    blocks = [0] * plan.passes[0].ctas
    for one in costs:
        heapq.heappush(blocks, heapq.heappop(blocks) + one)
    assert max(blocks) <= 1.15 * sum(costs) / len(blocks) + 2
