"""MD's cache in one process: SGLang's own tree, allocator and rows, and requests as its decode queues handle them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sglang_pdd.patches.drc import DecodeCache

MODEL = Path(__file__).parent / "tiny" / "model"


def publish_arguments() -> None:
    """SGLang's functions read the server's arguments from the process."""
    runtime_context.publish(ServerArgs(model_path=str(MODEL), device="cpu"), role="scheduler")


class World:
    """A pool of ``size`` tokens, and MD's cache (or stock's) over it."""

    def __init__(
        self,
        size: int,
        page: int,
        kind: type[UnifiedRadixCache] = DecodeCache,
        rows: int = 64,
        context: int | None = None,
    ) -> None:
        shape: dict[str, Any] = {"head_num": 1, "head_dim": 2, "layer_num": 1, "enable_memory_saver": False}
        kv = MHATokenToKVPool(size=size, page_size=page, dtype=torch.float32, device="cpu", **shape)
        paged = (size, page, torch.float32, "cpu", kv, False)
        self.allocator = TokenToKVPoolAllocator(size, *paged[2:]) if page == 1 else PagedTokenToKVPoolAllocator(*paged)
        self.rows = ReqToTokenPool(size=rows, max_context_len=context or size, device="cpu", enable_memory_saver=False)
        self.page, self.size, self.made = page, size, 0
        self.cache: Any = kind(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=(ComponentType.FULL,),
            )
        )

    def request(self, ids: Sequence[int], **fields: Any) -> Req:
        self.made += 1
        return Req(f"r{self.made}", "", array("q", ids), SamplingParams(max_new_tokens=8), **fields)

    def admit(self, req: Req) -> int | None:
        """What `DecodePreallocQueue` does until it sends its metadata; returns the hit, None if the pool is full."""
        found = match_kv_cache(req, self.cache, req.origin_input_ids)
        req.lock = self.cache.lock(found.last_device_node)
        prefix = self.cache.prefix_device_indices(req)
        hit, tokens = len(prefix), len(req.origin_input_ids)
        if not self._room_for(self._pages(tokens) - self._pages(hit)):
            self.cache.unlock(req.lock)
            return None
        self.rows.alloc([req])
        self.rows.write((req.kv.req_pool_idx, slice(0, hit)), prefix.to(torch.int32))
        self._grow(req, hit, tokens, prefix)
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.kv.kv_committed_len = req.extend_end = tokens
        req.prefix_len = req.kv.cache_protected_len = hit
        return hit

    def decode(self, req: Req, output: Sequence[int]) -> bool:
        """It generates this; all but the last token get KV. False: the pool is full."""
        start = len(req.origin_input_ids)
        end = start + len(output) - 1
        if not self._room_for(self._pages(end) - self._pages(start)):
            return False
        self._grow(req, start, end, self.slots(req, start))
        req.output_ids.extend(output)
        req.kv.kv_committed_len = end
        return True

    def finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)

    def release(self, req: Req) -> None:
        """As SGLang does with a transfer that has failed."""
        release_kv_cache(req, self.cache, checkpoint=False)

    def slots(self, req: Req, tokens: int) -> torch.Tensor:
        """Where the KV of the first ``tokens`` tokens is."""
        return self.rows.req_to_token[req.kv.req_pool_idx, :tokens]

    def accounted(self) -> int:
        """Tokens that are free or the tree's."""
        return int(self.allocator.available_size() + self.cache.evictable_size() + self.cache.protected_size())

    def private(self, req: Req) -> int:
        """Tokens of pages that are this request's alone."""
        return (self._pages(req.kv.kv_allocated_len) - req.kv.cache_protected_len // self.page) * self.page

    def tree_slots(self) -> np.ndarray:
        values: np.ndarray = self.cache.tree_core.all_values_flatten().numpy()
        return values

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _room_for(self, pages: int) -> bool:
        short = pages * self.page - self.allocator.available_size()
        if short > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=short))
        return bool(self.allocator.available_size() >= pages * self.page)

    def _grow(self, req: Req, start: int, end: int, before: torch.Tensor) -> None:
        if end > start:
            new = alloc_for_decode_prealloc(
                self.allocator,
                req=req,
                fill_len=end,
                delta_len=end - start,
                prefix_len=start,
                total_prefix_len=start,
                prefix_indices=before,
                uses_swa_tail=False,
                swa_tail_len=0,
            )
            self.rows.write((req.kv.req_pool_idx, slice(start, end)), new.to(torch.int32))
        req.kv.kv_allocated_len = end
