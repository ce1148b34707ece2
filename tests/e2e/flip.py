"""A plugin for SGLang, of the tests' own, that damages one page of KV which has just landed on MD.

It is a distribution of one module in a temporary folder on ``PYTHONPATH``. While the order file exists, the next
request that lands has the page that holds the token position written there turned upside down, on every layer.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cluster import Cluster

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
    """The same cluster, whose MD loads the plugin from ``folder`` and takes its orders there."""
    info = folder / "pdd_test_flip-0.dist-info"
    info.mkdir(exist_ok=True)
    (folder / "pdd_test_flip.py").write_text(_MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pdd-test-flip\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\npdd_test_flip = pdd_test_flip:register\n")
    env = {**spec.env.get("main", {}), "PYTHONPATH": str(folder), ORDER: str(folder / "order")}
    return dataclasses.replace(spec, env={**spec.env, "main": env})


def order_flip(spec: Cluster, position: int) -> Path:
    """Damage the page of this position in the next request that lands; the file is gone once it is done."""
    order = Path(spec.env["main"][ORDER])
    order.write_text(str(position))
    return order
