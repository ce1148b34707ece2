"""Our flags in SGLang's command line: add them, take them off, imply stock flags, refuse what PDD cannot serve.

All of it runs in the launcher. The configuration travels to the other processes in the environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from sglang_pdd.config import DEFAULT_HOST, FLAGS, RADIX_CACHE, ConfigError, PddConfig
from sglang_pdd.config import add_flags as add_pdd_flags
from sglang_pdd.keys import Keys, KeysError
from sglang_pdd.patches import attention, guard
from sglang_pdd.patches.drain import Drain
from sglang_pdd.wan.tls import Identity

# Set by the launcher once it has checked the configuration; a scheduler without it was started past our checks.
CHECKED = "PDD_CHECKED"

# role -> (stock flag's field, value, default)
_DECODE = (
    ("disaggregation_mode", "decode", "null"),
    ("disaggregation_decode_enable_radix_cache", True, False),
    ("disable_radix_cache", False, False),
)
_IMPLIED: dict[str, tuple[tuple[str, Any, Any], ...]] = {
    "prefill": (("disaggregation_mode", "prefill", "null"),),
    "relay": _DECODE,
    "main": (
        *_DECODE,
        ("enable_mixed_chunk", True, False),  # an extend pass takes the running decodes along
        ("radix_cache_backend", RADIX_CACHE, None),
    ),
}

# Stock flags that PDD has not been run with: field -> the only value served. Of a union, any of them.
SERVED: dict[str, tuple[Any, ...]] = {
    "disaggregation_transfer_backend": ("mooncake", "mooncake_tcp", "nixl"),
    "disaggregation_decode_allocation_policy": ("early",),
    "disaggregation_decode_host_receive_threshold": (1.0,),
    "disaggregation_decode_enable_offload_kvcache": (False,),
    "disaggregation_decode_retraction_backup": (None, "cpu_tensor"),  # a host pool would back up KV still on its way
    "disaggregation_enable_kv_checksum": (False,),  # SGLang verifies on its own path only, not before an extend pass
    "optimistic_prefill_attempts": (0,),
    "enable_pd_role_switch": (False,),
    "enable_pdmux": (False,),
    "decoupled_spec_role": ("null",),
    "encoder_only": (False,),
    "language_only": (False,),
    "dp_size": (1,),
    "attn_dp_size": (1,),
    "enable_dp_attention": (False,),
    "pp_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "dwdp_size": (1,),
    "nnodes": (1,),
    "use_ray": (False,),
    "enable_kv_cache_sharding": (False,),
    "speculative_algorithm": (None,),
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_lmcache": (False,),
    "enable_unified_memory": (False,),
    "moe_a2a_backend": ("none",),  # sizes its buffers for decode steps, an extend pass is larger
    "radix_cache_backend": (None, RADIX_CACHE),
    "enable_session_radix_cache": (False,),
    "enable_lora": (None, False),
    "lora_paths": (None, []),
    "tokenizer_worker_num": (1,),
    "grpc_mode": (False,),
    "smg_grpc_mode": (False,),
}
_DEFERRED = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
_RELEASE = _DEFERRED + "_TIMEOUT"
# By then the kernel has given up whatever a connection had on its way (tcp_retries2).
TCP_GIVES_UP = 960.0
# A server that closes an idle connection loses a request that is on its way to it, and main decode then waits minutes
# for its KV. Longer than what clients keep (90 s in hyper's and Go's pools), so that they close first.
_KEEP_ALIVE, _KEEP_ALIVE_S = "SGLANG_TIMEOUT_KEEP_ALIVE", 120
_UNSERVED_ENVIRONMENT = (
    "SGLANG_RUST_SERVER",
    "SGLANG_DISAGG_STAGING_BUFFER",
    "SGLANG_RADIX_FORCE_MISS",
    "SGLANG_MOONCAKE_SEND_AUX_TCP",
)


def add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``."""
    attention.add_choice()
    try:
        add_pdd_flags(parser)
    except ConfigError as error:
        guard.fail(str(error))


def take_flags(_: type, args: argparse.Namespace) -> None:
    """Before ``ServerArgs.from_cli_args``: the role's stock flags go in, its hooks are installed."""
    try:
        config = PddConfig.from_namespace(args, getattr(args, "host", None) or DEFAULT_HOST)
        config.validate()
        if config.keys is not None:
            Keys.load(config.keys)
            if config.role in ("prefill", "main") and config.wan_transport != "engine":
                Identity(config.keys)
        if config.active:
            imply(config, args, sys.argv[1:])
            refuse(args)
            refuse_code_of_strangers(config, args)
            prepare_nixl(args)
    except (ConfigError, KeysError) as error:
        guard.fail(str(error))
    attention.take(args, wanted=config.role == "main")
    for flag in FLAGS:
        if hasattr(args, flag.dest):
            delattr(args, flag.dest)
    if not config.active:
        return
    os.environ.update(config.to_env())
    os.environ.setdefault(_KEEP_ALIVE, str(_KEEP_ALIVE_S))
    os.environ[CHECKED] = "1"
    if config.role in ("prefill", "relay"):
        Drain.create()
    guard.install(config.role or "pace", "launcher")
    guard.apply_now()


def check_resolved(_: None, server_args: Any) -> None:
    """After ``ServerArgs.resolve_once``: the same refusals on what SGLang made of the flags, and the model's kind."""
    if not PddConfig.from_env().active:
        return
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    try:
        if os.environ.get(CHECKED) != "1":
            raise ConfigError("start PDD through `sglang serve` or `python -m sglang.launch_server`, not Engine(...)")
        refuse(resolving_view(server_args))
        problem = check_model(model_config_of(server_args))
        if problem is not None:
            raise ConfigError(problem)
    except ConfigError as error:
        guard.fail(str(error))


def imply(config: PddConfig, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Set the stock flags that the role needs; raises `ConfigError` if one was given otherwise."""
    if config.role is None:
        if args.disaggregation_mode != "prefill":
            raise ConfigError("--pdd-wan-rate-limit without --pdd-role paces --disaggregation-mode prefill only")
        return
    for field, value, default in _IMPLIED[config.role]:
        given = getattr(args, field)
        option = _option(field)
        explicit = given != default or any(word == option or word.startswith(option + "=") for word in argv)
        if explicit and given != value:
            wrong, right = _spell(field, given), _spell(field, value)
            raise ConfigError(f"{wrong} contradicts --pdd-role {config.role}, which implies {right}: drop it")
        setattr(args, field, value)


def refuse(args: Any) -> None:
    """Raise `ConfigError` for the first stock setting in ``args`` that PDD has not been run with."""
    for field, served in SERVED.items():
        value = getattr(args, field, served[0])  # what has no flag is not on a namespace
        if value not in served:
            wanted = "drop it" if served[0] in (None, False) else f"use {_spell(field, served[0])}"
            raise ConfigError(f"{_spell(field, value)} is not supported with PDD: {wanted}")
    if os.environ.get(_DEFERRED, "1").lower() not in ("1", "true", "yes", "y", "on", "t"):
        raise ConfigError(f"{_DEFERRED}={os.environ[_DEFERRED]}: PDD would reuse pages too early: unset it")
    for name in _UNSERVED_ENVIRONMENT:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t"):
            raise ConfigError(f"{name}={os.environ[name]} is not supported with PDD: unset it")


def refuse_code_of_strangers(config: PddConfig, args: Any) -> None:
    """A custom logit processor is code, and a relay takes it from whoever its prefill is."""
    if config.role == "relay" and config.insecure and getattr(args, "enable_custom_logit_processor", False):
        raise ConfigError("--enable-custom-logit-processor on a relay: drop --pdd-insecure, use --pdd-keys")


def prepare_nixl(args: Any) -> None:
    """NIXL neither cancels a transfer nor notices soon that a link is down: what it may yet write to is not reused.

    SGLang holds the pages of an aborted transfer until P has acknowledged its end, but not for ever.
    """
    if args.disaggregation_transfer_backend != "nixl":
        return
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("--disaggregation-transfer-backend nixl: NIXL is not installed: pip install nixl")
    held = os.environ.setdefault(_RELEASE, str(TCP_GIVES_UP))
    if float(held) < TCP_GIVES_UP:
        raise ConfigError(f"{_RELEASE}={held}: NIXL may write to a page for {TCP_GIVES_UP:.0f} s: unset it")


def check_model(model_config: Any) -> str | None:
    """Why PDD cannot serve this model (an SGLang ``ModelConfig``), or None. It must keep no state but the KV cache."""
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_minimax_sparse
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    hf_config = model_config.hf_config
    kinds = (
        (not model_config.is_generation, "does not generate text"),
        (model_config.is_encoder_decoder, "is an encoder-decoder"),
        (model_config.is_multimodal, "is multimodal (a text-only start needs --language-model-only)"),
        (model_config.is_hybrid_swa, "keeps sliding-window state"),
        (uses_ssm_state(model_config), "keeps recurrent (Mamba, linear-attention) state"),
        (is_deepseek_dsa(hf_config) or is_minimax_sparse(hf_config), "keeps a sparse-attention index"),
    )
    for wrong, what in kinds:
        if wrong:
            name = (hf_config.architectures or ["the model"])[0]
            return f"{name} {what}: PDD serves models whose only state is the KV cache"
    return None


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _spell(field: str, value: Any) -> str:
    if value is True:
        return _option(field)
    return f"no {_option(field)}" if value in (False, None) else f"{_option(field)} {value}"
