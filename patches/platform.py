"""`PddCpuPlatform`: SGLang on a machine without a GPU. A reference for tests and demos, not for production."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PddCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device without its kernel library (sgl_kernel's CPU build is not on PyPI): plain PyTorch."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        print("DEBUG", server_args.device, server_args.dtype, server_args.attention_backend)
        server_args.device = "cpu"
