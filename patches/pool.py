"""A rank's KV pool and metadata slots as memory that a transport may touch."""

from __future__ import annotations

from typing import Any

from sglang_pdd.config import PddConfig
from sglang_pdd.wan.regions import Region, Regions


def on_host(scheduler: Any) -> bool:
    """Is the KV pool ordinary memory?"""
    return str(scheduler.token_to_kv_pool_allocator.device).startswith("cpu")


def by_stream(scheduler: Any, config: PddConfig) -> bool:
    """Does KV cross the WAN by stream? Ends the process if it was asked for and cannot be."""
    if config.wan_transport == "stream" and not on_host(scheduler):
        raise SystemExit(
            "sglang-pdd: --pdd-wan-transport stream: the KV pool is not host memory, and streams serve nothing else: "
            "use --pdd-wan-transport engine"
        )
    return config.wan_transport != "engine" and on_host(scheduler)


def regions(kv_args: Any) -> Regions:
    """The regions of this rank, in the order in which its registration with a prefill names them: KV, then metadata."""
    spans = [
        *zip(kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens, strict=True),
        *zip(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens, strict=True),
    ]
    return Regions(Region.at(int(address), int(size), int(unit)) for address, size, unit in spans)
