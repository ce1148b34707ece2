"""A plugin for SGLang that breaks one transfer to MD: MD sees it fail, as if the network had."""

from __future__ import annotations

from pathlib import Path

from cluster import Cluster
from plugin import install

ORDER = "PDD_TEST_BREAK_ORDER"

_MODULE = """
import os
from pathlib import Path


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred"
    HookRegistry.register(target, look, HookType.BEFORE)


def look(queue, rids_to_check=None):
    from sglang.srt.disaggregation.base import KVPoll

    order = Path(os.environ["PDD_TEST_BREAK_ORDER"])
    try:
        room = int(order.read_text())
    except FileNotFoundError:  # none, or another rank was faster
        return
    for transfer in queue.queue:
        receiver = transfer.kv_receiver
        if transfer.req.bootstrap_room == room and receiver.conclude_state is None:
            receiver.kv_mgr.record_failure(room, "broken by a test")
            receiver.kv_mgr.update_status(room, KVPoll.Failed)
            order.unlink(missing_ok=True)
"""


def install_break_plugin(spec: Cluster, folder: Path) -> Cluster:
    """The same cluster, whose MD takes its orders in ``folder``."""
    return install(spec, folder, "pdd_test_breaks", _MODULE, ["main"], {ORDER: str(folder / "break")})


def order_break(spec: Cluster, room: int) -> Path:
    """Break the transfer of this room; the file is gone once it is done."""
    order, whole = Path(spec.env["main"][ORDER]), Path(spec.env["main"][ORDER] + ".new")
    whole.write_text(str(room))
    whole.rename(order)
    return order
