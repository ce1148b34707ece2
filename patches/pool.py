"""A rank's KV pool and metadata slots as memory that a transport may touch."""

from __future__ import annotations

from typing import Any

import torch

from sglang_pdd.config import PddConfig
from sglang_pdd.patches.device import DeviceRegions
from sglang_pdd.wan.regions import Memory, Region, Regions


def by_stream(scheduler: Any, config: PddConfig) -> bool:
    """Does KV cross the WAN by stream? Ends the process if it was asked for and cannot be."""
    device = _device(scheduler)
    if config.wan_transport == "stream" and device.type not in ("cpu", "cuda"):
        raise SystemExit(
            f"sglang-pdd: --pdd-wan-transport stream: the KV pool is on {device.type}, expected cpu or cuda: "
            "use --pdd-wan-transport engine"
        )
    return config.wan_transport == "stream" or (config.wan_transport is None and device.type == "cpu")


def memory(scheduler: Any, kv_args: Any) -> Memory:
    """The regions of this rank, in the order in which its registration with a prefill names them: KV, then metadata."""
    kv = list(zip(kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens, strict=True))
    slots = list(zip(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens, strict=True))
    spans = [(int(address), int(size), int(unit)) for address, size, unit in [*kv, *slots]]
    device = _device(scheduler)
    if device.type == "cpu":
        return Regions(Region.at(*span) for span in spans)
    slots_too = scheduler.disagg_metadata_buffers.output_ids.device.type != "cpu"
    return DeviceRegions(spans, _indexed(device), len(spans) if slots_too else len(kv))


def _device(scheduler: Any) -> torch.device:
    return torch.device(scheduler.token_to_kv_pool_allocator.device)


def _indexed(device: torch.device) -> torch.device:
    """SGLang leaves the index away, and the streams' threads have another current device than this one."""
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
