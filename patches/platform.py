"""`PddCpuPlatform`: SGLang on a machine without a GPU. A reference for tests and demos, not for production."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.runtime_context import get_disagg

NIXL_SLEEP_US = 10_000  # at most, between two looks at its sockets; whatever comes in wakes it


class PddCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device in plain PyTorch, since the CPU build of sgl_kernel is not on PyPI."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        # SGLang looks for GPUs by itself; the platform is made before it does.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Called while SGLang resolves its arguments, in the launcher; what is in the environment wins."""
        if server_args.attention_backend == "intel_amx":  # what SGLang chooses on x86; it needs sgl_kernel
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.dtype == "auto":
            server_args.dtype = "float32"  # half precision is slow on CPUs and differs between batch sizes
        if server_args.tp_size > _numa_nodes():
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", share_cpus(server_args.tp_size))
        if server_args.disaggregation_mode == "null":
            return
        os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")
        os.environ.setdefault("UCX_TLS", "tcp")  # NIXL's
        if server_args.disaggregation_mode == "prefill":
            # Sending a cached prefix early records CUDA events.
            os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
        elif server_args.disaggregation_decode_retraction_backup is None:
            # Without a decode radix cache SGLang would choose a pinned host pool.
            server_args.disaggregation_decode_retraction_backup = "cpu_tensor"

    def post_load_model(self, model: Any) -> None:
        """Called in the scheduler, before it makes its transfer engine."""
        mode, backend = get_disagg().disaggregation_mode, get_disagg().disaggregation_transfer_backend
        if mode != "null" and backend == "nixl":
            _prepare_nixl()
        if mode == "prefill" and backend == "mooncake":
            from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

            # There is no pinned memory and there are no events: page indices go to the sender as arrays.
            MooncakeKVSender.supports_host_tensor_indices = False


def _prepare_nixl() -> None:
    """SGLang tells NIXL that its KV is memory of a GPU, and NIXL that its thread may have a core for itself."""
    from nixl import _bindings
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    original = NixlKVManager.__init__

    @functools.wraps(original)
    def init(manager: Any, args: Any, *more: Any, **named: Any) -> None:
        args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
        original(manager, args, *more, **named)

    class Config(_bindings.nixlAgentConfig):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, NIXL_SLEEP_US if name == "pthrDelay" else value)

    NixlKVManager.__init__ = init
    _bindings.nixlAgentConfig = Config


def share_cpus(ranks: int) -> str:
    """This process's CPUs dealt to ``ranks``, as SGLang wants them: ``0,1|2,3``. Too few CPUs are shared."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // ranks
    groups = [cpus[i * each : (i + 1) * each] if each else [cpus[i % len(cpus)]] for i in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def _numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
