"""A plugin for SGLang that damages one page of KV which has just landed on MD.

While the order file exists, the next request that lands has the page that holds the token position written there turned
upside down, on every layer.
"""

from __future__ import annotations

from pathlib import Path

from cluster import Cluster
from plugin import install

ORDER = "PDD_TEST_FLIP_ORDER"

_MODULE = """
import os
from pathlib import Path


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_hicache_local_restore_to_req"
    HookRegistry.register(target, flip, HookType.BEFORE)


def flip(queue, decode_req):
    order = Path(os.environ["PDD_TEST_FLIP_ORDER"])
    if not order.exists():
        return
    allocator = queue.scheduler.token_to_kv_pool_allocator
    page, position = allocator.page_size, int(order.read_text())
    start = position // page * page
    row = queue.scheduler.req_to_token_pool.req_to_token[decode_req.req.kv.req_pool_idx]
    slots = row[start : start + page].long()
    pool = allocator.get_kvcache()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] *= -1
    order.unlink()
"""


def install_flip_plugin(spec: Cluster, folder: Path) -> Cluster:
    """The same cluster, whose MD takes its orders in ``folder``."""
    return install(spec, folder, "pdd_test_flip", _MODULE, ["main"], {ORDER: str(folder / "order")})


def order_flip(spec: Cluster, position: int) -> Path:
    """Damage the page of this position in the next request that lands; the file is gone once it is done."""
    order = Path(spec.env["main"][ORDER])
    order.write_text(str(position))
    return order
