"""Divides a ragged batch into equal pieces of work, on the device: no host synchronisation, fixed grid, graph-safe."""

from __future__ import annotations

import triton
import triton.language as tl

ITEM = 8  # int32 words of a work item: request, q tile, first and past-the-last full KV tile, slot or -1, is last split
REQUEST = 4  # int32 words of a request: splits, first partial row, rows of a tile, q tiles
WAVES = 4  # so many wave counts are tried; a batch that fills more waves than this is not split at all
OVERHEAD = tl.constexpr(2)  # what starting and merging an item costs, in KV tiles


@triton.jit
def _sum(values, condition):
    return tl.sum(tl.where(condition, values, 0))


# One compilation for all batches.
@triton.jit(do_not_specialize=["n_requests", "above", "up_to", "ctas", "window", "part_base"])
def plan_kernel(
    qo_indptr,
    kv_indptr,
    items,
    count,
    requests,
    request_of,
    n_requests,
    above,
    up_to,
    ctas,
    window,
    part_base,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAVES: tl.constexpr,
    ITEM: tl.constexpr,
    REQUEST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid: one program a request; each finds the same division and writes down its own request's part of it.

    Serves the requests with ``above < rows <= up_to``. Writes their ``items`` ``[*, ITEM]``, the number of items into
    ``count``, ``requests`` ``[n_requests, REQUEST]``, and their tokens' request into ``request_of`` ``[tokens]``.
    """
    me = tl.program_id(0)
    r = tl.arange(0, BLOCK_B)
    known = r < n_requests
    q_begin = tl.load(qo_indptr + r, known, 0)
    q_len = (tl.load(qo_indptr + r + 1, known, 0) - q_begin).to(tl.int32)
    prefix = (tl.load(kv_indptr + r + 1, known, 0) - tl.load(kv_indptr + r, known, 0)).to(tl.int32)

    # The edge is everything from the last full tile of the prefix on: always with the last split.
    rows = q_len * GROUP
    served = (rows > above) & (rows <= up_to)
    q_tiles = tl.where(served, tl.cdiv(rows, BLOCK_M), 0)
    full = prefix // BLOCK_N
    first = tl.where(window >= 0, tl.maximum(prefix - window, 0) // BLOCK_N, 0)
    edge = tl.cdiv(prefix - full * BLOCK_N + q_len, BLOCK_N)
    tiles = tl.where(served, full - first + edge, 0)

    # For each number of waves the smallest piece that fits it; of these the soonest done.
    weight = q_tiles * HEADS
    total = tl.sum(tiles * weight)
    longest = tl.maximum(tl.max(tiles), 1)
    least = tl.maximum(tl.cdiv(tl.sum(weight), ctas), 1)
    piece = longest
    soonest = least * (longest + OVERHEAD)
    for more in tl.static_range(WAVES):
        low = tl.full([], 1, tl.int32)
        high = longest
        while low < high:
            middle = (low + high) // 2
            fits = tl.sum(tl.cdiv(tiles, middle) * weight) <= (least + more) * ctas
            high = tl.where(fits, middle, high)
            low = tl.where(fits, low, middle + 1)
        splits = tl.cdiv(tiles, high)
        large = 2 * tl.cdiv(tiles, tl.maximum(splits, 1)) > high
        done = tl.maximum(
            tl.cdiv(_sum(splits * weight, large), ctas) * (high + OVERHEAD),
            tl.cdiv(total + tl.sum(splits * weight) * OVERHEAD, ctas),
        )
        better = (done < soonest) & (least <= WAVES)
        piece = tl.where(better, high, piece)
        soonest = tl.where(better, done, soonest)

    # Large items first: what is left for the end is small.
    splits = tl.cdiv(tiles, piece)
    large = 2 * tl.cdiv(tiles, tl.maximum(splits, 1)) > piece
    number = splits * q_tiles
    mine = r == me
    i_am_large = _sum(large.to(tl.int32), mine) > 0
    place = _sum(number, (large == i_am_large) & (r < me)) + tl.where(i_am_large, 0, _sum(number, large))
    slot = _sum(number, (splits > 1) & (r < me))
    if me == 0:
        tl.store(count, tl.sum(number))

    my_splits = _sum(splits, mine)
    my_q_tiles = _sum(q_tiles, mine)
    my_tiles = _sum(tiles, mine)
    my_first = _sum(first, mine)
    my_full = _sum(full, mine)
    steps = tl.arange(0, 64)
    for begin in range(0, my_splits * my_q_tiles, 64):
        i = begin + steps
        split = i // tl.maximum(my_q_tiles, 1)
        to = items + (place + i) * ITEM
        here = i < my_splits * my_q_tiles
        tl.store(to, me, here)
        tl.store(to + 1, i - split * my_q_tiles, here)
        tl.store(to + 2, tl.minimum(my_first + split * my_tiles // my_splits, my_full), here)
        tl.store(to + 3, tl.minimum(my_first + (split + 1) * my_tiles // my_splits, my_full), here)
        tl.store(to + 4, tl.where(my_splits > 1, slot + i, -1), here)
        tl.store(to + 5, (split == my_splits - 1).to(tl.int32), here)
    if my_splits > 0:
        to = requests + me * REQUEST
        tl.store(to, my_splits)
        tl.store(to + 1, part_base + slot * HEADS * BLOCK_M)
        tl.store(to + 2, BLOCK_M)
        tl.store(to + 3, my_q_tiles)
        my_begin = _sum(q_begin, mine)
        my_len = _sum(q_len, mine)
        for begin in range(0, my_len, 64):
            tl.store(request_of + my_begin + begin + steps, me, begin + steps < my_len)
