"""Attention of a ragged batch of new tokens over long paged prefixes, in one pass at the memory's speed.

Rows of an MMA are (query token, head of the group) pairs, so the KV of a head is read once for all of them. The KV of
a request is split over blocks in pieces of equal cost (`plan`), a second kernel merges the pieces. Requests with one
new token and requests with many get tile shapes of their own, each a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_pdd.kernels.plan import ITEM, REQUEST, WAVES, plan_kernel
from sglang_pdd.kernels.tiles import Chip, Config, Shape, Unsupported, chip_of, halves

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EVERY = (1 << 31) - 1


@triton.jit
def _capped(s, scale, cap):
    return cap * (1 - 2 / (tl.exp2(s * (2 * scale / cap * LOG2E)) + 1))


@triton.jit
def _slots(kv_indices, new_slots, position, wanted, prefix, seen, EDGE: tl.constexpr, FUSED: tl.constexpr):
    """Where the rows at these positions lie in the pool. Past the end: where the last one lies, so all rows exist.

    A new token that is read from its source rather than from the pool lies in slot 0.
    """
    if EDGE:
        position = tl.minimum(position, seen - 1)
        slots = tl.load(kv_indices + position, wanted & (position < prefix), 0)
        if not FUSED:
            fresh = tl.load(new_slots + (position - prefix), wanted & (position >= prefix), 0)
            slots = tl.where(position < prefix, slots.to(tl.int64), fresh.to(tl.int64))
        return slots
    return tl.load(kv_indices + position, wanted, 0)


@triton.jit
def _copy(source, target, dims, real, scale):
    """Rows into a pool, which holds ``source / scale``; ``source``, ``target`` point at the rows."""
    values = tl.load(source[:, None] + dims[None, :], real[:, None], 0.0)
    if source.dtype != target.dtype:
        values = values / scale
    tl.store(target[:, None] + dims[None, :], values.to(target.dtype.element_ty), real[:, None])


@triton.jit
def _write(
    k_new,
    v_new,
    k_pool,
    v_pool,
    new_slots,
    begin,
    end,
    k_scale,
    v_scale,
    stride_kt,
    stride_vt,
    stride_pks,
    stride_pvs,
    K0: tl.constexpr,
    K1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Write tokens ``begin`` to ``end`` of one head into the pool."""
    for at in range(begin, end, 16):
        index = at + tl.arange(0, 16)
        real = index < end
        place = tl.load(new_slots + index, real, 0).to(tl.int64)
        index = index.to(tl.int64)
        k_from, k_to = k_new + index * stride_kt, k_pool + place * stride_pks
        v_from, v_to = v_new + index * stride_vt, v_pool + place * stride_pvs
        _copy(k_from, k_to, tl.arange(0, K0), real, k_scale)
        if K1 > 0:
            _copy(k_from, k_to, K0 + tl.arange(0, K1), real, k_scale)
        if not LATENT:
            _copy(v_from, v_to, tl.arange(0, V0), real, v_scale)
            if V1 > 0:
                _copy(v_from, v_to, V0 + tl.arange(0, V1), real, v_scale)


@triton.jit(do_not_specialize=["tokens"])
def write_kernel(
    k_new,
    v_new,
    k_pool,
    v_pool,
    new_slots,
    tokens,
    k_scale,
    v_scale,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_pks,
    stride_pkh,
    stride_pvs,
    stride_pvh,
    K0: tl.constexpr,
    K1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Grid: (tokens / 16, KV heads). Writes new tokens into a pool of another dtype, where attention reads them."""
    begin = tl.program_id(0) * 16
    head = tl.program_id(1)
    k_new += head * stride_kh
    v_new += head * stride_vh
    k_pool += head * stride_pkh
    v_pool += head * stride_pvh
    _write(k_new, v_new, k_pool, v_pool, new_slots, begin, tl.minimum(begin + 16, tokens), k_scale, v_scale, stride_kt,
           stride_vt, stride_pks, stride_pvs, K0, K1, V0, V1, LATENT)  # fmt: skip


@triton.jit(do_not_specialize=["window", "part_base"])
def attend_kernel(
    q_ptr,
    k_new,
    v_new,
    k_pool,
    v_pool,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    sinks_ptr,
    new_slots,
    qo_indptr,
    kv_indptr,
    kv_indices,
    items,
    count,
    scale,
    cap,
    k_scale,
    v_scale,
    window,
    part_base,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_pks,
    stride_pkh,
    stride_pvs,
    stride_pvh,
    stride_ot,
    stride_oh,
    stride_lt,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    LATENT: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    FUSED: tl.constexpr,
    PEEL: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (items x KV heads), heads fastest. One item: one tile of query rows against one range of KV tiles.

    Head sizes come as two powers of two, ``K0 + K1`` and ``V0 + V1``; the second may be 0.
    """
    item = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if item >= tl.load(count):
        return
    request = tl.load(items + item * ITEM)
    q_tile = tl.load(items + item * ITEM + 1)
    begin = tl.load(items + item * ITEM + 2)
    end = tl.load(items + item * ITEM + 3)
    slot = tl.load(items + item * ITEM + 4)
    is_last = tl.load(items + item * ITEM + 5) > 0
    q_begin = tl.load(qo_indptr + request).to(tl.int64)
    q_len = (tl.load(qo_indptr + request + 1) - q_begin).to(tl.int32)
    kv_begin = tl.load(kv_indptr + request).to(tl.int64)
    prefix = (tl.load(kv_indptr + request + 1) - kv_begin).to(tl.int32)

    kv_indices += kv_begin
    new_slots += q_begin
    k_pool += head * stride_pkh
    v_pool += head * stride_pvh
    k_new += q_begin * stride_kt + head * stride_kh
    v_new += q_begin * stride_vt + head * stride_vh
    if FUSED and is_last and (q_tile + 1) * BLOCK_M >= q_len * GROUP:  # the one item of this head that sees them all
        _write(k_new, v_new, k_pool, v_pool, new_slots, 0, q_len, k_scale, v_scale, stride_kt, stride_vt, stride_pks,
               stride_pvs, K0, K1, V0, V1, LATENT)  # fmt: skip

    row = q_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < q_len * GROUP
    token = tl.minimum(row // GROUP, q_len - 1)  # rows past the end repeat the last token, and are not stored
    member = row % GROUP
    k0_dims = tl.arange(0, K0)
    k1_dims = K0 + tl.arange(0, K1 if K1 > 0 else 16)
    v0_dims = tl.arange(0, V0)
    v1_dims = V0 + tl.arange(0, V1 if V1 > 0 else 16)
    n = tl.arange(0, BLOCK_N)

    q_row = q_ptr + (q_begin + token) * stride_qt + (head * GROUP + member) * stride_qh
    q0 = tl.load(q_row[:, None] + k0_dims[None, :])
    q1 = q0
    if K1 > 0:
        q1 = tl.load(q_row[:, None] + k1_dims[None, :])
    kind: tl.constexpr = q0.dtype

    # A logit is s * unit in octaves.
    unit = LOG2E if CAP else scale * k_scale * LOG2E
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 16], tl.float32)

    # First the full tiles of the prefix; then, with the last split, the edge: what is left of the prefix, and the new
    # tokens up to this tile's last one. Only the edge needs a causal mask.
    seen = prefix + tl.minimum((q_tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, q_len)
    if WINDOW:  # later tokens see less of the prefix
        begin = tl.maximum(begin, tl.maximum(prefix + q_tile * BLOCK_M // GROUP - window, 0) // BLOCK_N)
    for EDGE in tl.static_range(0 if PEEL else 1, 2):
        if EDGE:
            begin = prefix // BLOCK_N if PEEL else begin
            end = tl.where(is_last, tl.cdiv(seen, BLOCK_N), begin if PEEL else end)
        # Slots are read a step ahead: a load that waits for another in its own step would not be pipelined deeper.
        ahead = _slots(kv_indices, new_slots, begin * BLOCK_N + n, begin < end, prefix, seen, EDGE, FUSED)
        for tile in tl.range(begin, end):
            position = tile * BLOCK_N + n
            place = ahead.to(tl.int64)
            ahead = _slots(kv_indices, new_slots, position + BLOCK_N, tile + 1 < end, prefix, seen, EDGE, FUSED)
            k_row = k_pool + place * stride_pks
            v_row = v_pool + place * stride_pvs
            if EDGE and FUSED:
                index = tl.minimum(position, seen - 1) - prefix
                # The compiler forgets that both choices are aligned, and would not copy them asynchronously.
                k_row = tl.multiple_of(tl.where(index >= 0, k_new + index.to(tl.int64) * stride_kt, k_row), 16)
                v_row = tl.multiple_of(tl.where(index >= 0, v_new + index.to(tl.int64) * stride_vt, v_row), 16)

            k0 = tl.load(k_row[None, :] + k0_dims[:, None]).to(kind)
            s = tl.dot(q0, k0, input_precision="ieee")
            if K1 > 0:
                s = tl.dot(q1, tl.load(k_row[None, :] + k1_dims[:, None]).to(kind), s, input_precision="ieee")
            if CAP:
                s = _capped(s, scale * k_scale, cap)
            if EDGE:
                s = tl.where(n[None, :] <= (prefix - tile * BLOCK_N + token)[:, None], s, float("-inf"))
            if WINDOW:
                s = tl.where(n[None, :] >= (prefix - tile * BLOCK_N - window + token)[:, None], s, float("-inf"))

            # Online softmax. Only a window can hide a whole tile from a row, whose maximum then is still -inf.
            highest = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(highest == float("-inf"), 0.0, highest) if WINDOW else highest
            p = tl.exp2(s * unit - (shift * unit)[:, None])
            fade = tl.exp2((m - shift) * unit)
            m = highest
            total = total * fade + tl.sum(p, 1)
            p = p.to(kind)
            v0 = tl.trans(k0) if LATENT else tl.load(v_row[:, None] + v0_dims[None, :]).to(kind)
            acc0 = tl.dot(p, v0, acc0 * fade[:, None], input_precision="ieee")
            if V1 > 0:
                v1 = tl.load(v_row[:, None] + v1_dims[None, :]).to(kind)
                acc1 = tl.dot(p, v1, acc1 * fade[:, None], input_precision="ieee")

    top = m * unit
    if sinks_ptr is not None:  # noqa: SIM102 (known when compiled)
        if slot < 0:  # else the merge counts them, once
            sink = tl.load(sinks_ptr + head * GROUP + member).to(tl.float32) * LOG2E
            higher = tl.maximum(top, sink)
            fade = tl.exp2(top - higher)
            total = total * fade + tl.exp2(sink - higher)
            acc0 *= fade[:, None]
            acc1 *= fade[:, None]
            top = higher
    # A range in which a row sees nothing: no output, no weight.
    divisor = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
    acc0 *= (v_scale / divisor)[:, None]
    acc1 *= (v_scale / divisor)[:, None]
    if slot < 0:
        to = out_ptr + (q_begin + token) * stride_ot + (head * GROUP + member) * stride_oh
        tl.store(to[:, None] + v0_dims[None, :], acc0.to(out_ptr.dtype.element_ty), real[:, None])
        if V1 > 0:
            tl.store(to[:, None] + v1_dims[None, :], acc1.to(out_ptr.dtype.element_ty), real[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + (q_begin + token) * stride_lt + head * GROUP + member, lse * LN2, real)
    else:
        part = part_base + (slot.to(tl.int64) * HEADS + head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_ptr + part[:, None] * (V0 + V1) + v0_dims[None, :], acc0, real[:, None])
        if V1 > 0:
            tl.store(part_ptr + part[:, None] * (V0 + V1) + v1_dims[None, :], acc1, real[:, None])
        tl.store(part_lse_ptr + part, lse, real)


@triton.jit(do_not_specialize=["n_requests"])
def merge_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    sinks_ptr,
    qo_indptr,
    requests,
    request_of,
    n_requests,
    stride_ot,
    stride_oh,
    stride_lt,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    REQUEST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid: (tokens, query heads). Merges a row's partials by their LSE (in octaves); an unsplit row has none."""
    token = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1)
    if token >= tl.load(qo_indptr + n_requests):  # Q may be padded
        return
    request = tl.load(request_of + token)
    splits = tl.load(requests + request * REQUEST)
    if splits == 1:
        return
    base = tl.load(requests + request * REQUEST + 1)
    block_m = tl.load(requests + request * REQUEST + 2)
    q_tiles = tl.load(requests + request * REQUEST + 3)
    row = (token - tl.load(qo_indptr + request)) * GROUP + q_head % GROUP
    first = base + (row // block_m * HEADS + q_head // GROUP) * block_m + row % block_m
    stride = q_tiles.to(tl.int64) * HEADS * block_m

    dims = tl.arange(0, BLOCK_V)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2E
        total += 1
    acc = tl.zeros([BLOCK_V], tl.float32)
    for begin in range(0, splits, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        part = first + split * stride
        lse = tl.load(part_lse_ptr + part, split < splits, float("-inf"))
        values = tl.load(
            part_ptr + part[:, None] * V + dims[None, :], (split < splits)[:, None] & (dims < V)[None, :], 0
        )
        higher = tl.maximum(top, tl.max(lse))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - shift)
        fade = tl.exp2(top - shift)
        acc = acc * fade + tl.sum(values * weight[:, None], 0)
        total = total * fade + tl.sum(weight)
        top = higher
    to = out_ptr + token * stride_ot + q_head * stride_oh + dims
    tl.store(to, (acc / total).to(out_ptr.dtype.element_ty), dims < V)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * stride_lt + q_head, (top + tl.log2(total)) * LN2)


def this_chip() -> Chip:
    """The current device; raises `Unsupported`. Without a GPU, the interpreter if it is on."""
    if triton.knobs.runtime.interpret:
        return Chip("interpreter", 4)
    if not torch.cuda.is_available():
        raise Unsupported("no GPU")
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    gfx = device.gcnArchName if torch.version.hip else ""
    return chip_of(device.major, device.minor, device.multi_processor_count, gfx)


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch of the attention kernel: a tile shape, the rows of the requests it serves, its part of the buffers."""

    index: int
    above: int
    up_to: int
    first_item: int
    items: int
    first_part: int
    ctas: int


class Plan:
    """The division of one batch, and the memory that its pieces need. Made once, updated each step, used by all layers.

    Sizes and grids follow from the bounds given here alone, so that a captured graph holds for every batch within them.
    """

    def __init__(
        self, config: Config, shape: Shape, max_requests: int, max_tokens: int, device: torch.device | str
    ) -> None:
        self.config, self.shape = config, shape
        self.max_requests, self.max_tokens = max_requests, max_tokens
        passes: list[Pass] = []
        items = parts = above = 0
        for index, tile in enumerate(config.tiles):
            is_final = index == len(config.tiles) - 1
            ctas = config.cores * tile.per_core
            q_tiles = max_requests + (max_tokens * shape.group // tile.m if is_final else 0)
            most = q_tiles + triton.cdiv(WAVES * ctas, shape.kv_heads)
            passes.append(Pass(index, above, EVERY if is_final else tile.m, items, most, parts, ctas))
            # Split at all only if there are at most WAVES waves of q tiles, and then into less than twice as many.
            parts += min(most, triton.cdiv(2 * WAVES * ctas, shape.kv_heads)) * shape.kv_heads * tile.m
            items += most
            above = tile.m
        self.passes = tuple(passes)

        def words(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self.items, self.counts = words(items, ITEM), words(len(passes))
        self.requests, self.request_of = words(max_requests, REQUEST), words(max_tokens)
        self.part = torch.empty(parts, shape.v_dim, dtype=torch.float32, device=device)
        self.part_lse = torch.empty(parts, dtype=torch.float32, device=device)
        self.qo_indptr: torch.Tensor | None = None
        self.kv_indptr: torch.Tensor | None = None
        self.window = -1

    def update(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, window: int = -1) -> None:
        """Divide a batch: ``qo_indptr``, ``kv_indptr`` ``[requests + 1]`` of its new tokens and of their prefixes.

        Both are kept, not copied. Of a prefix, what no window reaches may be left out.
        """
        requests = qo_indptr.shape[0] - 1
        assert requests <= self.max_requests and kv_indptr.shape == qo_indptr.shape
        self.qo_indptr, self.kv_indptr, self.window = qo_indptr, kv_indptr, window
        for run, tile in zip(self.passes, self.config.tiles, strict=True):
            plan_kernel[(requests,)](
                *_arguments(
                    qo_indptr,
                    kv_indptr,
                    self.items[run.first_item :],
                    self.counts[run.index :],
                    self.requests,
                    self.request_of,
                ),
                requests,
                run.above,
                run.up_to,
                run.ctas,
                window,
                run.first_part,
                HEADS=self.shape.kv_heads,
                GROUP=self.shape.group,
                BLOCK_M=tile.m,
                BLOCK_N=tile.n,
                WAVES=WAVES,
                ITEM=ITEM,
                REQUEST=REQUEST,
                BLOCK_B=max(256, triton.next_power_of_2(requests)),
                num_warps=1 if requests <= 256 else 4,
            )


class Far:
    """A tensor as an argument of whose memory's size HIP's compiler is not told.

    It addresses up to 2 GiB in another way. The kernel, which chooses between new tokens and pool, does not compile
    where only the pool is larger; and where it does, it spills.
    """

    __slots__ = ("_tensor", "dtype")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.dtype = tensor, tensor.dtype

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()


def _arguments(*arguments: Any) -> tuple[Any, ...]:
    """As they go to a kernel."""
    if torch.version.hip:
        return tuple(Far(one) if isinstance(one, torch.Tensor) else one for one in arguments)
    return arguments


def _aligned(x: torch.Tensor) -> bool:
    """The compiler was promised so."""
    return not (x.data_ptr() | x.stride(0) * x.element_size() | x.stride(1) * x.element_size()) % 16


def extend_decode(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    new_slots: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lse: torch.Tensor | None = None,
    write: bool = True,
) -> None:
    """Write the new tokens' K and V into the pool and attend; the arguments are `reference.extend_attention`'s.

    ``new_slots`` ``[tokens]``: where the new tokens go; with ``write`` False they are there already.
    ``kv_indices``: the prefixes' slots, packed as the plan's ``kv_indptr`` says. ``out`` ``[tokens, heads, v_dim]`` and
    ``lse`` ``[tokens, heads]`` (fp32) are written in full. An fp8 pool holds ``k / k_scale`` and ``v / v_scale``.
    Tokens and heads may be strided; the last dimension of each tensor is dense and its rows begin at 16 bytes.
    """
    shape = plan.shape
    tokens = q.shape[0]
    assert tokens <= plan.max_tokens and plan.qo_indptr is not None, "the plan was made for another batch"
    assert all(x.stride(-1) == 1 for x in (q, k_new, v_new, k_pool, v_pool, out)), "rows must be dense"
    assert all(_aligned(x) for x in (k_new, v_new, k_pool, v_pool)), "rows must be aligned: they are copied so"
    (k0, k1), (v0, v1) = halves(shape.qk_dim), halves(shape.v_dim)
    dims = {"K0": k0, "K1": k1, "V0": v0, "V1": v1, "LATENT": shape.latent}
    kv_strides = [n for x in (k_new, v_new, k_pool, v_pool) for n in x.stride()[:2]]
    # Where the pool has the tokens' dtype, the attention kernel writes them on its way.
    fused = write and k_new.dtype == k_pool.dtype
    if write and not fused:
        grid = (triton.cdiv(tokens, 16), shape.kv_heads)
        tensors = _arguments(k_new, v_new, k_pool, v_pool, new_slots)
        write_kernel[grid](*tensors, tokens, k_scale, v_scale, *kv_strides, **dims)
    for run, tile in zip(plan.passes, plan.config.tiles, strict=True):
        attend_kernel[(run.items * shape.kv_heads,)](
            *_arguments(
                q,
                k_new,
                v_new,
                k_pool,
                v_pool,
                out,
                lse,
                plan.part,
                plan.part_lse,
                sinks,
                new_slots,
                plan.qo_indptr,
                plan.kv_indptr,
                kv_indices,
                plan.items[run.first_item :],
                plan.counts[run.index :],
            ),
            scale,
            cap,
            k_scale,
            v_scale,
            plan.window,
            run.first_part,
            *q.stride()[:2],
            *kv_strides,
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
            HEADS=shape.kv_heads,
            GROUP=shape.group,
            **dims,
            CAP=cap > 0,
            WINDOW=plan.window >= 0,
            FUSED=fused,
            PEEL=tile.peel,
            ITEM=ITEM,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    merge_kernel[(tokens, shape.heads)](
        *_arguments(
            out,
            lse,
            plan.part,
            plan.part_lse,
            sinks,
            plan.qo_indptr,
            plan.requests,
            plan.request_of,
        ),
        plan.qo_indptr.shape[0] - 1,
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        HEADS=shape.kv_heads,
        GROUP=shape.group,
        V=shape.v_dim,
        REQUEST=REQUEST,
        BLOCK_V=triton.next_power_of_2(shape.v_dim),
        BLOCK_S=8,
        num_warps=4,
    )
