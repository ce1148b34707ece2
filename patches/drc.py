"""MD's radix cache: SGLang's own tree and allocator, and marks on the pages whose KV is still on its way."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, TreeLock
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_pdd.config import RADIX_CACHE
from sglang_pdd.drc import Pages, Pending


class DecodeCache(UnifiedRadixCache):
    """A prompt is in the tree from the moment its transfer begins; `pending` knows what has landed of it.

    The transfer holds a lock of SGLang's on the whole of it, so that nothing on its way is ever evicted.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.pending = Pending(params.token_to_kv_pool_allocator.size // params.page_size + 2)
        super().__init__(params)

    def reset(self) -> None:
        self.pending.clear()
        super().reset()

    def publish(self, req: Any) -> None:
        """The transfer of this request's prompt begins: its whole pages are in the tree from now on.

        Its row must be protected up to where the tree ends, as SGLang does after it has written the row; published
        earlier, the release of a failed request would free pages that the tree owns.
        """
        if not req.skip_radix_cache_insert:
            super().checkpoint_into_tree(req, up_to=len(req.origin_input_ids))

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """As SGLang's, but never onto pages that another request is still bringing.

        The tree keeps its own pages and moves the request's row onto them; a running request would read what is not
        there yet.
        """
        new = up_to // self.page_size * self.page_size > req.kv.cache_protected_len
        if not new and not req.finished():
            return
        if new and len(self.pending):
            up_to = min(up_to, self._readable(req, up_to))
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)

    def row(self, req: Any, tokens: int) -> Pages:
        """The pages of the first ``tokens`` tokens, on the host."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : tokens : self.page_size]
        pages: Pages = row.cpu().numpy().astype("int64") // self.page_size
        return pages

    def hold(self, req: Any, pages: int) -> TreeLock | None:
        """Lock the first ``pages`` pages of a prompt that is in the tree."""
        length, node = self._find(req, req.origin_input_ids, pages * self.page_size)
        assert length == pages * self.page_size, (req.rid, length, pages)
        return self.lock(node)

    def cut(self, req: Any, row: Pages) -> None:
        """A prompt with these pages was let go of: what is behind its first page that holds nothing leaves the tree."""
        keep = self.pending.readable(row)
        if keep == len(row):
            return
        ids = req.origin_input_ids[: len(row) * self.page_size]
        self._find(req, ids, keep * self.page_size)  # no node reaches across
        _, last = self._find(req, ids, len(ids))
        (path,) = self.tree_core.collect_path_info([last])
        kept = len(path)
        for node in reversed(path):
            behind = 0 if kept == len(path) else 1  # the node that was cut before this one
            if node.path_start < keep * self.page_size or node.num_children > behind or self._locked(node.node_id):
                break
            self._evict_device_leaf(node.node_id, dict.fromkeys(self.tree_components, 0))
            kept -= 1
        end = path[kept - 1].path_end if kept else 0
        self.pending.cut(row, max(keep, end // self.page_size))

    def _readable(self, req: Any, up_to: int) -> int:
        """Up to where the tree, on this request's way, holds nothing that is still on its way."""
        known = req.kv.cache_protected_len
        if self._ends_at(req.last_node, known):
            return up_to
        length, node = self._find(req, req.full_untruncated_fill_ids, up_to)
        if length <= known:
            return up_to
        path = self.path_device_indices(node)[known : length : self.page_size]
        pages = path.cpu().numpy().astype("int64") // self.page_size
        readable = self.pending.readable(pages)
        return up_to if readable == len(pages) else known + readable * self.page_size

    def _ends_at(self, node: Any, tokens: int) -> bool:
        """Does the tree, on the way to this node, end after so many tokens? Nearly always; and to match costs more."""
        (path,) = self.tree_core.collect_path_info([node])
        return bool(path) and path[-1].path_end == tokens and path[-1].num_children == 0

    def _find(self, req: Any, ids: Any, limit: int) -> tuple[int, Any]:
        key = RadixKey(ids, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        found = self._match_tree(MatchPrefixParams(key=key))
        return found.device_prefix_len, found.last_device_node

    def _locked(self, node: Any) -> bool:
        """Does anybody hold this node? A lock of a node that is free protects more than before."""
        before = self.protected_size()
        lock = self.lock(node)
        locked = self.protected_size() == before
        self.unlock(lock)
        return locked


def build(context: TreeCacheBuildContext) -> DecodeCache:
    """SGLang's factory, with our class."""
    cache = create_unified_radix_cache(context, cache_class=DecodeCache)
    assert isinstance(cache, DecodeCache)
    return cache


def register() -> None:
    """Make ``--radix-cache-backend pdd`` known, which the role main implies."""
    if get_radix_cache_factory(RADIX_CACHE) is None:
        register_radix_cache_backend(RADIX_CACHE, build)
