"""The one table of everything of SGLang's that we rely on. `guard` checks it at start and installs its hooks.

To rely on something new, add an `Entry`; nothing else may touch SGLang unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["function", "method", "classmethod", "class", "attribute", "field"]
Hook = Literal["before", "after", "around"]
Process = Literal["launcher", "scheduler"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of SGLang's.

    ``path``: dotted, module first. For an attribute or a field its owner is a module, a class, a dataclass or a
    msgspec struct; an attribute that only ``__init__`` and its like assign counts.
    ``signature``: parameter names with defaults and without annotations, ``(self, req, last_chunk=False)``; a default
    that is no plain literal is written ``...``. None: only existence is checked.
    ``roles``: who relies on it: ``prefill``, ``relay``, ``main``, ``pace`` (a rate limit without a role), ``attention`` (our backend), or ``any``.
    ``by``: our hook, ``module:function`` within ``sglang_pdd.patches``; called as SGLang's HookRegistry says.
    ``safe``: if our hook raises, log once, count, and go on as without it (an around hook: call the original). Only for
    hooks that change nothing before they can raise.
    """

    path: str
    kind: Kind
    why: str
    signature: str | None = None
    roles: tuple[str, ...] = ("any",)
    process: Process = "scheduler"
    hook: Hook | None = None
    by: str | None = None
    safe: bool = False


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
REGISTRY = "sglang.srt.plugins.hook_registry.HookRegistry"
REQ = "sglang.srt.managers.schedule_batch.Req"
BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
SENDER = "sglang.srt.disaggregation.common.conn.CommonKVSender"
KV_MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager"
NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
BOOTSTRAP_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
PREFILL_MIXIN = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
REQ_INPUT = "sglang.srt.managers.io_struct.TokenizedGenerateReqInput"
DECODE_REQUEST = "sglang.srt.disaggregation.decode.DecodeRequest"
MODEL_CONFIG = "sglang.srt.configs.model_config.ModelConfig"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
TRANSFER_QUEUE = "sglang.srt.disaggregation.decode.DecodeTransferQueue"
BOOTSTRAP_SERVER = "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer"
DISAGG_UTILS = "sglang.srt.disaggregation.utils"
ATTENTION_REGISTRY = "sglang.srt.layers.attention.attention_registry"
TRITON_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
RADIX_REGISTRY = "sglang.srt.mem_cache.registry"
RADIX_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
TREE_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface"
RECEIVER = "sglang.srt.disaggregation.common.conn.CommonKVReceiver"

ROLES = ("prefill", "relay", "main")
SENDERS = ("prefill", "pace")
ATTENTION = ("main", "attention")


def _hook(owner: str, name: str, signature: str, hook: Hook, by: str, why: str, **more: Any) -> Entry:
    """We hook it."""
    return Entry(f"{owner}.{name}", more.pop("kind", "method"), why, signature, hook=hook, by=by, **more)


def _calls(owner: str, name: str, signature: str | None, why: str, **more: Any) -> Entry:
    """We call it, or are called by it."""
    return Entry(f"{owner}.{name}", more.pop("kind", "method"), why, signature, **more)


def _uses(owner: str, names: str, why: str, **more: Any) -> list[Entry]:
    """We read or set these; they need only exist."""
    kind = more.pop("kind", "attribute")
    return [Entry(f"{owner}.{name}", kind, why, **more) for name in names.split()]


# fmt: off
ENTRIES: tuple[Entry, ...] = (
    # --- Flags: server_args.py
    _hook(
        SERVER_ARGS, "add_cli_args",
        "(parser)",
        "after", "server_args:add_flags", "adds the flags --pdd-*", process="launcher", kind="function",
    ),
    _hook(
        SERVER_ARGS, "from_cli_args",
        "(cls, args)",
        "before", "server_args:take_flags", "takes our flags off the namespace, sets the stock flags that a role implies", process="launcher", kind="classmethod",
    ),
    _hook(
        SERVER_ARGS, "resolve_once",
        "(self)",
        "after", "server_args:check_resolved", "when SGLang has resolved its arguments, refuses what PDD cannot serve", process="launcher",
    ),
    _calls(
        "sglang.srt.arg_groups.overrides", "resolving_view",
        "(server_args)",
        "resolved arguments", process="launcher", kind="function",
    ),
    _calls(
        "sglang.srt.arg_groups.overrides", "model_config_of",
        "(server_args)",
        "the model's kind", process="launcher", kind="function",
    ),
    _calls(
        "sglang.srt.mem_cache.kv_cache_builder", "uses_ssm_state",
        "(model_config)",
        "the model's kind", process="launcher", kind="function",
    ),
    *_uses("sglang.srt.environ.Envs", "SGLANG_TIMEOUT_KEEP_ALIVE", "idle HTTP connections stay open", process="launcher"),
    *_uses(
        SERVER_ARGS,
        "attn_cp_size attn_dp_size dcp_size decoupled_spec_role disable_radix_cache "
        "disaggregation_decode_allocation_policy disaggregation_decode_enable_offload_kvcache disaggregation_enable_kv_checksum "
        "disaggregation_decode_enable_radix_cache disaggregation_decode_host_receive_threshold disaggregation_decode_retraction_backup "
        "disaggregation_mode disaggregation_transfer_backend dp_size dwdp_size enable_dp_attention "
        "enable_hierarchical_cache enable_hisparse enable_kv_cache_sharding enable_lmcache enable_lora enable_session_radix_cache "
        "enable_pd_role_switch enable_pdmux enable_unified_memory encoder_only grpc_mode host language_only "
        "lora_paths moe_a2a_backend nnodes optimistic_prefill_attempts pp_size radix_cache_backend smg_grpc_mode "
        "speculative_algorithm tokenizer_worker_num tp_size use_ray",
        "read, implied or refused", process="launcher", kind="field",
    ),
    _calls(
        "sglang.srt.configs.model_config", "is_deepseek_dsa",
        "(config)",
        "the model's kind", process="launcher", kind="function",
    ),
    _calls(
        "sglang.srt.configs.model_config", "is_minimax_sparse",
        "(config)",
        "the model's kind", process="launcher", kind="function",
    ),
    *_uses(
        MODEL_CONFIG,
        "hf_config is_encoder_decoder is_generation is_hybrid_swa is_multimodal",
        "the model's kind", process="launcher",
    ),
    _calls(
        REGISTRY, "register",
        "(cls, target, hook, hook_type=..., *, source=None)",
        "registers hooks", kind="classmethod",
    ),
    _calls(REGISTRY, "apply_hooks", "(cls)", "is watched: our hooks must be in place after it", kind="classmethod"),
    _calls(REGISTRY, "_apply_target", "(cls, target, hooks)", "puts a hook on a patched target", kind="classmethod"),
    *_uses(REGISTRY, "_patched", "names patched targets"),
    *_uses(
        "sglang.srt.platforms.cpu",
        "CpuDeviceMixin",
        "the CPU platform derives from it or is made of it", kind="class",
    ),
    *_uses(
        "sglang.srt.platforms.device_mixin",
        "PlatformEnum",
        "the CPU platform derives from it or is made of it", kind="class",
    ),
    *_uses(
        "sglang.srt.platforms.interface",
        "PlatformCapabilities SRTPlatform",
        "the CPU platform derives from it or is made of it", kind="class",
    ),
    _calls(
        "sglang.srt.platforms.interface.SRTPlatform", "apply_server_args_defaults",
        "(self, server_args)",
        "the CPU platform's defaults",
    ),
    *_uses(
        SERVER_ARGS,
        "attention_backend dtype",
        "has a default of the CPU platform's", process="launcher", kind="field",
    ),

    # --- Attention: attention.py, triton_backend.py
    *_uses(
        "sglang.srt.arg_groups.choices",
        "ATTENTION_BACKEND_CHOICES add_attention_backend_choices",
        "the name pdd_triton on the command line", process="launcher",
    ),
    *_uses(
        SERVER_ARGS,
        "prefill_attention_backend decode_attention_backend",
        "may say pdd_triton", process="launcher", kind="field",
    ),
    _calls(
        ATTENTION_REGISTRY, "register_attention_backend",
        "(name)",
        "our class behind the name triton", roles=ATTENTION, kind="function",
    ),
    *_uses(ATTENTION_REGISTRY, "ATTENTION_BACKENDS", "the class behind the name triton", roles=ATTENTION),
    *_uses("sglang.srt.layers.attention.triton_backend", "TritonAttnBackend", "ours derives from it", roles=ATTENTION, kind="class"),
    _calls(TRITON_BACKEND, "init_forward_metadata", "(self, forward_batch)", "ours extends it", roles=ATTENTION),
    _calls(
        TRITON_BACKEND, "forward_extend",
        "(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, score_mod=None, aux_tensors=None)",
        "ours replaces it for some batches", roles=ATTENTION,
    ),
    *_uses(
        TRITON_BACKEND,
        "dcp_size device dllm_attention enable_deterministic forward_metadata token_to_kv_pool",
        "ours reads it", roles=ATTENTION,
    ),
    *_uses(
        "sglang.srt.layers.attention.triton_backend.ForwardMetadata",
        "kv_indices kv_indptr qo_indptr window_kv_indices window_kv_indptr",
        "where a batch's prefixes lie", roles=ATTENTION, kind="field",
    ),
    *_uses("sglang.srt.layers.radix_attention", "AttentionType RadixAttention", "what a layer means", roles=ATTENTION, kind="class"),
    *_uses("sglang.srt.model_executor.model_runner.ModelRunner", "model dtype", "its layers' kernels are compiled at start", roles=ATTENTION, kind="field"),
    *_uses("sglang.srt.layers.radix_attention.AttentionType", "DECODER", "what a layer means", roles=ATTENTION),
    *_uses(
        "sglang.srt.layers.radix_attention.RadixAttention",
        "attn_type is_cross_attention k_scale k_scale_float layer_id logit_cap logit_capping_method qk_head_dim scaling "
        "sliding_window_size tp_k_head_num tp_q_head_num v_head_dim v_scale_float xai_temperature_len",
        "what a layer means", roles=ATTENTION,
    ),
    *_uses(
        "sglang.srt.mem_cache.memory_pool",
        "MHATokenToKVPool MLATokenToKVPool",
        "pools whose layout our kernel knows", roles=ATTENTION, kind="class",
    ),
    *_uses("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool", "is_quantized_kv_cache", "its buffers are copies then", roles=ATTENTION),
    *_uses(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "batch_size extend_prefix_lens_cpu extend_seq_lens_cpu forward_mode out_cache_loc spec_info",
        "a batch's lengths", roles=ATTENTION, kind="field",
    ),
    _calls(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode", "is_extend",
        "(self, include_draft_extend_v2=False)",
        "a batch's kind", roles=ATTENTION,
    ),

    # --- Requests that would end a stock server: samples.py
    _hook(
        "sglang.srt.managers.io_struct.GenerateReqInput", "normalize_batch_and_arguments",
        "(self)",
        "after", "samples:refuse", "n > 1 is refused, since stock schedulers die of it", roles=("prefill", "main"), process="launcher",
    ),
    *_uses(
        "sglang.srt.managers.io_struct.GenerateReqInput", "parallel_sample_num bootstrap_room",
        "how many samples, in which rooms", roles=("prefill", "main"), process="launcher",
    ),

    # --- P: discovery: bootstrap.py; P, RLD: drain.py
    _hook(
        BOOTSTRAP_SERVER, "_setup_routes",
        "(self)",
        "after", "bootstrap:add_route", "publishes this prefill's PDD endpoint at GET /pdd", roles=("prefill",), process="launcher",
    ),
    *_uses(
        BOOTSTRAP_SERVER,
        "app",
        "the aiohttp application that gets the route", roles=("prefill",), process="launcher",
    ),
    _hook(
        TOKENIZER_MANAGER, "sigterm_watchdog",
        "(self)",
        "around", "drain:finish_work", "holds back the shutdown while KV copies or relays are in flight", roles=("prefill", "relay"), process="launcher",
    ),
    *_uses(
        TOKENIZER_MANAGER,
        "gracefully_exit rid_to_state server_status",
        "read while holding back the shutdown", roles=("prefill", "relay"), process="launcher",
    ),
    *_uses(
        "sglang.srt.managers.tokenizer_manager.ServerStatus",
        "UnHealthy",
        "an unhealthy server exits at once", roles=("prefill",), process="launcher",
    ),

    # --- Commands into the scheduler, state out: ingress.py; its sleep: idle.py
    _hook(
        SCHEDULER, "init_internal_state",
        "(self)",
        "after", "ingress:start", "the scheduler is complete: PDD starts", roles=ROLES,
    ),
    _hook(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver", "_pull_raw_reqs",
        "(self)",
        "after", "ingress:pull", "commands ride with the requests that rank 0 pulls", roles=ROLES,
    ),
    _hook(
        SCHEDULER, "get_internal_state",
        "(self, recv_req)",
        "after", "ingress:internal_state", "PDD's part of /get_server_info", roles=ROLES, safe=True,
    ),
    _hook(
        SCHEDULER, "on_idle",
        "(self)",
        "after", "idle:after_idle", "sleeps also while only transfers are awaited", roles=ROLES,
    ),
    *_uses("sglang.utils", "TypeBasedDispatcher", "dispatches our commands", roles=ROLES, kind="class"),
    *_uses(
        SCHEDULER,
        "_request_dispatcher idle_sleeper tree_cache token_to_kv_pool_allocator max_total_num_tokens "
        "model_config tokenizer tp_worker metrics_reporter",
        "read by the seams", roles=ROLES,
    ),

    # --- What several of them use
    _calls("sglang.srt.runtime_context", "get_parallel", "()", "tensor-parallel rank, size and group", kind="function"),
    _calls("sglang.srt.runtime_context", "get_disagg", "()", "the resolved disaggregation arguments", kind="function"),
    *_uses("sglang.srt.disaggregation.base.KVPoll", "Failed Success WaitingForInput", "states of a copy", roles=ROLES),
    *_uses("sglang.srt.disaggregation.utils", "FAKE_BOOTSTRAP_HOST", "health checks are left alone", roles=ROLES),
    *_uses("sglang.srt.disaggregation.utils.KVClassType", "SENDER", "the sender's class", roles=("prefill",)),
    _calls("sglang.srt.managers.schedule_batch", "FINISH_LENGTH", "(length)", "P's early end", roles=("prefill",), kind="class"),
    _calls("sglang.srt.managers.schedule_batch", "FINISH_ABORT", "(message=None, status_code=None, err_type=None)", "a request that cannot go on", roles=("relay", "main"), kind="class"),
    *_uses("sglang.srt.managers.schedule_batch.NextBatchPlan", "batch_to_run running_batch", "the next batch", roles=("main",), kind="field"),
    *_uses("sglang.srt.managers.io_struct.AbortReq", "rid", "stops a relay", roles=("relay",), kind="field"),
    *_uses("sglang.srt.sampling.sampling_params.SamplingParams", "__struct_fields__ max_new_tokens stop_token_ids is_normalized", "travels with a relay", roles=("prefill", "relay")),
    _calls("sglang.srt.observability.req_time_stats", "set_time_batch", "(reqs, set_func, trace_only=False, attrs=None)", "stock time stamps", roles=("main",), kind="function"),
    _calls("sglang.srt.observability.req_time_stats", "set_schedule_time_batch", "(batch)", "stock time stamps", roles=("main",), kind="function"),
    *_uses("sglang.srt.plugins.hook_registry", "HookSource HookType", "names of hooks"),
    *_uses(REQ, "finished_reason finished_output finished_len to_finish output_ids output_ids_through_stop send_token_offset rid kv logprob grammar return_logprob origin_input_ids bootstrap_room bootstrap_host", "a request's state", roles=ROLES),
    *_uses(REQ, "disagg_kv_sender start_send_idx disagg_decode_prefix_len metadata_buffer_index pending_bootstrap extend_end extra_key cache_salt cached_tokens", "shown from RLD's side while the second copy is sent", roles=("prefill",)),
    *_uses(REQ, "retracted_stain extend_len return_sampling_mask", "a request's state", roles=("main",)),
    *_uses("sglang.srt.managers.schedule_batch.ReqKvInfo", "kv_committed_len cache_protected_len", "how much of a request has KV", roles=("main",), kind="field"),
    *_uses("sglang.srt.disaggregation.common.conn.CommonKVReceiver", "conclude_state kv_mgr", "has a transfer ended?", roles=("main",)),
    *_uses("sglang.srt.disaggregation.decode.DecodeTransferQueue", "queue has_pending_deferred_releases", "can anything free memory?", roles=("main",)),
    *_uses("sglang.srt.disaggregation.decode.DecodePreallocQueue", "retracted_queue kv_manager", "can anything free memory?", roles=("main", "relay")),
    *_uses("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache", "evictable_size protected_size", "the pool, for operators and for the extend pass", roles=ROLES),
    *_uses("sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper", "poller", "our sockets end an idle scheduler's sleep", roles=ROLES),
    *_uses(MOONCAKE, "get_session_id", "names this engine to P", roles=ROLES),
    *_uses("sglang.srt.disaggregation.nixl.conn", "NixlKVManager", "is it NIXL's?", roles=(*ROLES, "pace"), kind="class"),
    *_uses(NIXL, "agent", "names this engine to P", roles=ROLES),
    _calls(NIXL, "__init__", "(self, args, disaggregation_mode, server_args, is_mla_backend=False)", "the CPU platform says that KV is memory of the host"),

    # --- P: prefill.py, fanout.py, followers.py, unwanted.py
    _hook(
        BOOTSTRAP_QUEUE, "_process_req",
        "(self, req)",
        "before", "prefill:keep_sampling", "keeps the sampling parameters that P is about to shorten", roles=("prefill",),
    ),
    _hook(
        BOOTSTRAP_QUEUE, "finalize_bootstrap",
        "(self, req)",
        "after", "prefill:after_bootstrap", "MD has said what it holds: relay or not", roles=("prefill",),
    ),
    _calls(
        BOOTSTRAP_QUEUE, "_num_pages_to_send",
        "(self, req, decode_prefix_len)",
        "size of the second copy", roles=("prefill",),
    ),
    _hook(
        PREFILL_MIXIN, "_send_kv_chunk",
        "(self, req, last_chunk=False, end_idx=None)",
        "around", "prefill:send_kv_chunk", "first token, second copy, early end of the HTTP response", roles=("prefill",),
    ),
    _hook(
        PREFILL_MIXIN, "get_next_disagg_prefill_batch_to_run",
        "(self, running_batch, last_batch, should_retry_storage_prefetch=True)",
        "after", "prefill:after_planning", "does a prompt wait for memory that copies hold?", roles=("prefill",),
    ),
    _hook(
        PREFILL_MIXIN, "process_disagg_prefill_inflight_queue",
        "(self, rids_to_check=None)",
        "around", "prefill:inflight_queue", "once a step: the relays' progress", roles=("prefill",),
    ),
    _calls(
        DISAGG_UTILS, "poll_and_all_reduce_attn_cp_tp_group",
        "(pollers, attn_cp_cpu_group, attn_tp_cpu_group)",
        "all ranks see the same state of a copy", roles=("prefill",), kind="function",
    ),
    _calls(
        DISAGG_UTILS, "get_kv_class",
        "(transfer_backend, class_type)",
        "the sender's class", roles=("prefill",), kind="function",
    ),
    _calls(
        DISAGG_UTILS, "is_aborted",
        "(req)",
        "an aborted request needs no relay", roles=("prefill",), kind="function",
    ),
    _calls(
        SENDER, "__init__",
        "(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False)",
        "a second sender for the relay", roles=("prefill",),
    ),
    *_uses(SENDER, "_early_send_wait_event", "the relay waits for the same writes", roles=("prefill",)),
    _calls(SENDER, "init", "(self, num_kv_indices, aux_index=None)", "drives the second copy", roles=("prefill",)),
    _calls(SENDER, "pop_decode_prefix_len", "(self)", "drives the second copy", roles=("prefill",)),
    _calls(SENDER, "poll", "(self)", "drives the second copy", roles=("prefill",)),
    _calls(SENDER, "abort", "(self)", "drives the second copy", roles=("prefill",)),
    _calls(SENDER, "clear", "(self)", "drives the second copy", roles=("prefill",)),
    *_uses(
        SCHEDULER,
        "disagg_prefill_bootstrap_queue disagg_prefill_inflight_queue req_to_metadata_buffer_idx_allocator "
        "attn_cp_cpu_group attn_tp_cpu_group output_streamer waiting_queue chunked_req",
        "read by P's seam", roles=("prefill",),
    ),

    # --- P: lanes and pacing: lanes.py, mooncake.py, nixl.py
    *(
        _hook(
            engine, "add_transfer_request",
            "(self, bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index=None, state_indices=None, num_kv_tokens=None, *, wait_event=None, indices_event=None, trace_ctx=None)",
            "around", "lanes:add_transfer_request", "a lane for each destination", roles=SENDERS,
        )
        for engine in (MOONCAKE, NIXL)
    ),
    _hook(
        NIXL, "register_buffer_to_engine",
        "(self)",
        "before", "nixl:stand_before", "by stream, or pacing and cancellation", roles=SENDERS,
    ),
    _hook(
        "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine", "batch_transfer_sync",
        "(self, session_id, buffers, peer_buffer_addresses, lengths)",
        "around", "mooncake:batch_transfer", "by stream, or pacing and cancellation", roles=SENDERS,
    ),

    # --- P: KV streams: streams.py
    _hook(
        MOONCAKE, "send_kvcache",
        "(self, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor, dst_layer_ids=None, dst_device_kv_indices=None, dst_kv_item_len=None, dst_attn_tp_size=None)",
        "around", "streams:send_pages", "a chunk's blocks are known: they go by stream", roles=("prefill",),
    ),
    _hook(
        MOONCAKE, "send_kvcache_slice",
        "(self, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_tp_rank, dst_attn_tp_size, dst_kv_item_len, executor, dst_layer_ids=None)",
        "around", "streams:send_pages", "the same, between unequal tensor-parallel sizes", roles=("prefill",),
    ),
    _hook(
        MOONCAKE, "send_aux",
        "(self, req, prefill_aux_index, dst_aux_ptrs)",
        "around", "streams:send_metadata", "the last of a room: wait until it has landed", roles=("prefill",),
    ),
    _hook(
        NIXL, "send_kvcache",
        "(self, peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_gpu_id, dst_mem_kind='VRAM')",
        "around", "nixl:send_pages", "a chunk's blocks are known: they go by stream", roles=("prefill",),
    ),
    _hook(
        NIXL, "send_kvcache_slice",
        "(self, peer_name, prefill_kv_indices, dst_kv_indices)",
        "around", "nixl:send_pages", "the same, between unequal tensor-parallel sizes", roles=("prefill",),
    ),
    _hook(
        NIXL, "send_aux",
        "(self, peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index)",
        "around", "nixl:send_metadata", "the last of a room: wait until it has landed", roles=("prefill",),
    ),
    _hook(
        KV_MANAGER, "update_status",
        "(self, bootstrap_room, status)",
        "around", "streams:status_changed", "a failed room frees the link at once; whatever changes wakes the scheduler", roles=ROLES,
    ),
    _calls(
        KV_MANAGER, "conclude_failure",
        "(self, *, bootstrap_room, failure_reason, targets=None)",
        "a stream has failed, or a copy is given up", roles=("prefill",),
    ),
    _calls(MOONCAKE, "_unblacklist_session", "(self, session_id)", "an engine's error does not close the streams", roles=("prefill",)),
    *_uses(MOONCAKE, "session_lock", "guards what SGLang refuses", roles=("prefill",)),
    *_uses(KV_MANAGER, "decode_kv_args_table is_mla_backend", "where MD's regions are, in its own numbering", roles=("prefill",)),
    *_uses("sglang.srt.disaggregation.mooncake.conn.TransferInfo", "mooncake_session_id", "a rank of MD", roles=("prefill",), kind="field"),
    *(
        entry
        for engine in ("mooncake", "nixl")
        for entry in (
            *_uses(
                f"sglang.srt.disaggregation.{engine}.conn.TransferInfo", "dst_kv_indices dst_aux_index is_dummy",
                "names a room on the streams", roles=("prefill",), kind="field",
            ),
            *_uses(
                f"sglang.srt.disaggregation.{engine}.conn.KVArgsRegisterInfo", "dst_kv_ptrs dst_aux_ptrs",
                "where MD's regions are, in its own numbering", roles=("prefill",), kind="field",
            ),
        )
    ),

    # --- P, MD: the pool as regions: pool.py
    *_uses(
        "sglang.srt.disaggregation.base.conn.KVArgs",
        "kv_data_ptrs kv_data_lens kv_item_lens aux_data_ptrs aux_data_lens aux_item_lens",
        "what may be read or written", roles=("prefill", "main"),
    ),
    *_uses(KV_MANAGER, "kv_args", "what may be read or written", roles=("prefill", "main")),
    *_uses(SCHEDULER, "chunked_prefill_size max_prefill_tokens", "how much KV one pass makes", roles=("prefill",)),
    *_uses(SCHEDULER, "disagg_metadata_buffers", "is it memory of the device?", roles=("prefill", "main")),
    *_uses("sglang.srt.disaggregation.utils.MetadataBuffers", "output_ids", "is it memory of the device?", roles=("prefill", "main")),
    *_uses("sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator", "device", "where the pool is", roles=("prefill", "main")),

    # --- MD: KV streams: landing.py
    *(
        _hook(
            engine, "build_receiver_metadata_message",
            "(self, *, bootstrap_room, required_dst_info_num, kv_indices, aux_index, state_indices, decode_prefix_len, is_dummy, device_kv_indices=None)",
            "before", "landing:before_metadata", "a room opens before P is told where to write", roles=("main",),
        )
        for engine in (MOONCAKE, NIXL)
    ),
    _hook(
        KV_MANAGER, "is_abort_release_safe",
        "(self, bootstrap_room, required_acks)",
        "around", "landing:release_safe", "no page is reused while a stream may write to it; also asked for what is fetched again", roles=("main",),
    ),
    _hook(
        "sglang.srt.disaggregation.common.conn.CommonKVManager", "check_status",
        "(self, bootstrap_room)",
        "around", "mooncake:check_status", "a worker must not end because a room was cleared", roles=SENDERS,
    ),
    _calls(
        MOONCAKE, "transfer_worker",
        "(self, queue, executor, staging_buffer=None, worker_index=0)",
        "a lane's worker", roles=SENDERS,
    ),
    _calls(NIXL, "transfer_worker", "(self, queue, staging_buffer=None, worker_index=0)", "a lane's worker", roles=SENDERS),
    *_uses(MOONCAKE, "transfer_queues", "read by lanes", roles=SENDERS),
    *_uses(NIXL, "transfer_queues", "read by lanes", roles=SENDERS),
    *_uses(
        KV_MANAGER, "transfer_infos request_status req_to_decode_prefix_len failure_records kv_item_lens_sum",
        "read by lanes and seams", roles=SENDERS,
    ),
    *_uses("sglang.srt.disaggregation.common.utils", "FastQueue", "a lane is one", roles=SENDERS, kind="class"),
    *_uses(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender",
        "supports_host_tensor_indices",
        "the CPU platform sets it False", roles=SENDERS,
    ),

    # --- P: prefill.py, aborts
    _hook(
        SCHEDULER, "_release_aborted_request",
        "(self, req)",
        "after", "prefill:aborted_released", "an aborted request gets no relay any more", roles=("prefill",),
    ),
    _calls(
        SCHEDULER, "handle_generate_request",
        "(self, recv_req, *, mm_input_error=None)",
        "a relayed request comes in", roles=("relay",),
    ),
    _calls(SCHEDULER, "abort_request", "(self, recv_req)", "a relayed request is stopped", roles=("relay",)),

    # --- RLD: relay.py
    _hook(
        STREAMER, "stream_output",
        "(self, reqs, return_logprob, skip_req=None)",
        "around", "relay:stream_output", "relayed tokens go to MD", roles=("relay",),
    ),
    _hook(
        SCHEDULER, "send_abort_output",
        "(self, abort_req, req)",
        "around", "relay:abort_output", "nobody waits for a stopped relay's output", roles=("relay",),
    ),
    *_uses(
        REQ_INPUT,
        "rid input_text input_ids input_embeds mm_inputs token_type_ids sampling_params return_logprob "
        "logprob_start_len top_logprobs_num token_ids_logprob custom_logit_processor require_reasoning extra_key cache_salt stream "
        "bootstrap_host bootstrap_port bootstrap_room",
        "a relayed request is made of these", roles=("relay",), kind="field",
    ),

    # --- MD: main.py, passes.py, extend.py
    _hook(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue", "_send_kv_metadata",
        "(self, decode_req, kv_indices, page_size, state_indices=None, **metadata_kwargs)",
        "around", "main:send_metadata", "the prompt is in the tree before P may answer", roles=("main",),
    ),
    _hook(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue", "pop_preallocated",
        "(self, rids_to_check=None, pp_good_rids=None, pp_bad_rids=None)",
        "before", "main:before_admission", "what is fetched again takes its slot first", roles=("main",),
    ),
    _hook(
        TRANSFER_QUEUE, "_poll_with_metadata_gate",
        "(self)",
        "around", "main:poll_transfers", "who waits for others has not landed", roles=("main",),
    ),
    _hook(
        TRANSFER_QUEUE, "_release_request",
        "(self, decode_req)",
        "around", "main:release_request", "nobody writes a failed transfer's pages any more, even after a time-out", roles=("main",),
    ),
    _hook(
        SCHEDULER, "abort_request",
        "(self, recv_req)",
        "around", "late:abort_request", "a transfer that others wait for goes on", roles=("main",),
    ),
    _hook(
        SCHEDULER, "is_fully_idle",
        "(self, for_health_check=False, ignore_waiting=False)",
        "after", "main:is_idle", "no flush while something is fetched again", roles=("main",),
    ),
    _hook(
        TRANSFER_QUEUE, "_commit_transfer_to_req",
        "(self, decode_req)",
        "around", "main:commit_transfer", "the KV has landed", roles=("main",),
    ),
    _hook(
        TRANSFER_QUEUE, "pop_transferred",
        "(self, rids_to_check=None)",
        "after", "main:after_transfers", "transfers that ended otherwise, or for requests that have ended", roles=("main",),
    ),
    _hook(
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin", "get_next_disagg_decode_batch_to_run",
        "(self, running_batch)",
        "around", "main:next_batch", "the extend pass", roles=("main",),
    ),
    _hook(
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin", "process_decode_queue",
        "(self)",
        "before", "main:step_begins", "the last extend pass joins the running batch", roles=("main",),
    ),
    _hook(
        BATCH, "cumulate_penalty_output_tokens",
        "(self)",
        "around", "extend:first_history", "penalties see what they see on a single server", roles=("relay", "main"),
    ),
    _hook(
        RESULTS, "process_batch_result_prefill",
        "(self, batch, result)",
        "after", "main:extend_processed", "an extend pass is done", roles=("main",),
    ),
    _hook(
        STREAMER, "stream_output",
        "(self, reqs, return_logprob, skip_req=None)",
        "after", "main:output_streamed", "an answer is complete", roles=("main",), safe=True,
    ),
    _hook(
        SCHEDULER, "send_abort_output",
        "(self, abort_req, req)",
        "after", "main:abort_sent", "an answer will never be complete", roles=("main",), safe=True,
    ),
    _calls(
        BATCH, "init_new",
        "(cls, reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, model_config, enable_overlap, spec_algorithm, chunked_req=None, dllm_config=None)",
        "the extend batch", roles=("main",), kind="classmethod",
    ),
    _calls(BATCH, "prepare_for_extend", "(self)", "the extend batch", roles=("main",)),
    _calls(BATCH, "merge_batch", "(self, other)", "the extend batch", roles=("main",)),
    _calls(BATCH, "prepare_for_decode", "(self)", "a mixed pass", roles=("main",)),
    _calls(BATCH, "mix_with_running", "(self, running_batch)", "a mixed pass", roles=("main",)),
    _calls(BATCH, "check_decode_mem", "(self, selected_indices=None)", "a mixed pass", roles=("main",)),
    _calls(SCHEDULER, "_reqs_finishing_inflight", "(self, batch)", "a mixed pass", roles=("main",)),
    *_uses(BATCH, "decoding_reqs batch_is_full", "a mixed pass", roles=("main",), kind="field"),
    _calls(
        "sglang.srt.managers.schedule_policy.SchedulePolicy", "calc_priority",
        "(self, waiting_queue, running_batch=None, processed_tokens=0)",
        "who is taken over first", roles=("main",),
    ),
    *_uses(
        "sglang.srt.sampling.penaltylib.frequency_penalty.BatchedFrequencyPenalizer",
        "frequency_penalties cumulated_frequency_penalties",
        "penalties of relayed tokens", roles=("main",),
    ),
    *_uses(
        "sglang.srt.sampling.penaltylib.presence_penalty.BatchedPresencePenalizer",
        "presence_penalties cumulated_presence_penalties",
        "penalties of relayed tokens", roles=("main",),
    ),
    *_uses(
        "sglang.srt.sampling.penaltylib.repetition_penalty.BatchedRepetitionPenalizer",
        "repetition_penalties cumulated_repetition_penalties",
        "penalties of relayed tokens", roles=("main",),
    ),
    *_uses(
        "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer", "len_output_tokens",
        "penalties of relayed tokens", roles=("main",),
    ),
    *_uses(
        "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator", "penalizers",
        "penalties of relayed tokens", roles=("main",),
    ),
    _calls(
        BATCH, "filter_batch",
        "(self, reqs_to_exclude=None, keep_indices=None)",
        "the extend batch", roles=("main",),
    ),
    _calls(
        BATCH, "new_tokens_required_next_decode",
        "(self, selected_indices=None)",
        "the extend batch", roles=("main",),
    ),
    _calls(
        REQ, "init_next_round_input",
        "(self, tree_cache=None, cow_mamba=None)",
        "an eager token becomes output", roles=("main",),
    ),
    _calls(
        REQ, "update_finish_state",
        "(self, new_accepted_len=1)",
        "an eager token becomes output", roles=("main",),
    ),
    _calls(
        "sglang.srt.mem_cache.common", "release_kv_cache",
        "(req, tree_cache, *, checkpoint)",
        "an answer that is complete before its extend pass", roles=("main",), kind="function",
    ),
    _calls(
        "sglang.srt.disaggregation.common.conn.CommonKVReceiver", "abort",
        "(self)",
        "an answer that is complete before its KV landed", roles=("main",),
    ),
    _calls(
        RESULTS, "_maybe_update_reasoning_tokens",
        "(self, req, next_token_id)",
        "counts reasoning tokens", roles=("main",),
    ),
    _calls(DISAGG_UTILS, "prepare_abort", "(req, error_message, status_code=None)", "a leader's client has gone", roles=("main",), kind="function"),

    # --- MD: the cache: drc.py
    _calls(RADIX_REGISTRY, "register_radix_cache_backend", "(name, factory)", "MD's cache", roles=("main",), kind="function"),
    _calls(RADIX_REGISTRY, "get_radix_cache_factory", "(name)", "MD's cache", roles=("main",), kind="function"),
    _calls(RADIX_REGISTRY, "create_unified_radix_cache", "(ctx, *, cache_class=None)", "MD's cache", roles=("main",), kind="function"),
    *_uses(RADIX_REGISTRY, "TreeCacheBuildContext", "what MD's cache is built from", roles=("main",), kind="class"),
    *_uses("sglang.srt.mem_cache.cache_init_params.CacheInitParams", "token_to_kv_pool_allocator page_size", "the pool's pages", roles=("main",), kind="field"),
    _calls(RADIX_CACHE, "__init__", "(self, params)", "MD's cache derives from it", roles=("main",)),
    _calls(RADIX_CACHE, "reset", "(self)", "MD's cache derives from it", roles=("main",)),
    _calls(RADIX_CACHE, "checkpoint_into_tree", "(self, req, *, up_to, **kwargs)", "a prompt enters the tree when its transfer begins", roles=("main",)),
    _calls(RADIX_CACHE, "_match_tree", "(self, params)", "what is in the tree on a prompt's way", roles=("main",)),
    _calls(RADIX_CACHE, "_evict_device_leaf", "(self, node_id, tracker)", "what a failed transfer has left", roles=("main",)),
    _calls(RADIX_CACHE, "lock", "(self, node_id, skip_lock_components=...)", "what is fetched again", roles=("main",)),
    _calls(RADIX_CACHE, "unlock", "(self, lock)", "what is fetched again", roles=("main",)),
    _calls(RADIX_CACHE, "path_device_indices", "(self, node)", "pages on a prompt's way", roles=("main",)),
    _calls(RADIX_CACHE, "protected_size", "(self)", "is a node locked?", roles=("main",)),
    *_uses(RADIX_CACHE, "page_size tree_core tree_components req_to_token_pool", "MD's cache derives from it", roles=("main",)),
    _calls(f"{TREE_CORE}.UnifiedTreeCoreInterface", "collect_path_info", "(self, end_node_ids)", "nodes on a prompt's way", roles=("main",)),
    *_uses(f"{TREE_CORE}.TreePathNodeInfo", "node_id path_start path_end num_children", "nodes on a prompt's way", roles=("main",), kind="field"),
    _calls("sglang.srt.mem_cache.radix_cache.RadixKey", "__init__", "(self, token_ids, extra_key=None, is_bigram=False, limit=None, cache_salt=None)", "a prompt as a key", roles=("main",)),
    *_uses("sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams", "key", "a prompt as a key", roles=("main",), kind="field"),
    *_uses("sglang.srt.mem_cache.base_prefix_cache", "TreeLock", "a lock of the tree's", roles=("main",), kind="class"),
    *_uses("sglang.srt.mem_cache.base_prefix_cache.MatchResult", "device_prefix_len last_device_node", "what was matched", roles=("main",)),
    *_uses(REQ, "skip_radix_cache_insert extra_key cache_salt", "what may enter the tree, and where", roles=("main",)),

    # --- MD: followers: prefixes.py
    _calls(
        DISAGG_UTILS, "poll_and_all_reduce",
        "(pollers, gloo_group, decode_reqs=None, metadata_buffers=None)",
        "what is fetched again", roles=("main",), kind="function",
    ),
    _calls(DISAGG_UTILS, "all_reduce_flags", "(flags, group, op)", "what is fetched again", roles=("main",), kind="function"),
    _calls(DISAGG_UTILS, "get_kv_class", "(transfer_backend, class_type)", "the receiver's class", roles=("main",), kind="function"),
    *_uses(f"{DISAGG_UTILS}.KVClassType", "RECEIVER", "the receiver's class", roles=("main",)),
    *_uses("sglang.srt.disaggregation.base.KVPoll", "Transferring", "who waits for others has not landed", roles=("main",)),
    _calls(RECEIVER, "__init__", "(self, mgr, bootstrap_addr, bootstrap_room=None)", "what is fetched again", roles=("main",)),
    _calls(RECEIVER, "init", "(self, prefill_dp_rank)", "what is fetched again", roles=("main",)),
    _calls(
        RECEIVER, "send_metadata",
        None,  # the default of ``destination`` is an enum's member
        "what is fetched again", roles=("main",),
    ),
    _calls(RECEIVER, "ensure_abort_notified", "(self, *, force_arm=False)", "what is fetched again has failed", roles=("main",)),
    _calls(RECEIVER, "clear", "(self)", "what is fetched again", roles=("main",)),
    *_uses(RECEIVER, "bootstrap_infos bootstrap_room abort_notified bootstrap_addr prefill_dp_rank", "what is fetched again", roles=("main",)),
    _calls(KV_MANAGER, "submit_prefill_recompute", "(self, kv_receiver, payload)", "what is fetched again", roles=("main",)),
    _calls(KV_MANAGER, "clear_deferred_abort_state", "(self, bootstrap_room)", "its writer has ended", roles=("main",)),
    _hook(
        KV_MANAGER, "_fail_prefill_recompute",
        "(self, kv_receiver, reason)",
        "around", "refetch:recompute_failed", "P does not answer; or what is over must not come back", roles=("main",),
    ),
    *_uses(KV_MANAGER, "failure_records waiting_timeout", "what is fetched again", roles=("main",)),
    _calls(REQ, "build_rebootstrap_payload", "(self)", "what is fetched again", roles=("main",)),
    *_uses(
        TRANSFER_QUEUE, "gloo_group metadata_buffers req_to_metadata_buffer_idx_allocator deferred_kv_release_timeout",
        "what is fetched again", roles=("main",),
    ),
    *_uses("sglang.srt.disaggregation.decode.DecodePreallocQueue", "queue transfer_backend", "who waits for memory", roles=("main",)),
    *_uses(DECODE_REQUEST, "is_rebootstrap kv_receiver req host_staged waiting_for_input", "a transfer", roles=("main",), kind="field"),
    *_uses(
        REQ,
        "prefix_len extend_end full_untruncated_fill_ids already_computed _cache_breakdown_computed "
        "logprob_start_len cached_tokens cached_tokens_device cached_tokens_host cached_tokens_storage "
        "pd_rebootstrap_forced_output_id inflight_middle_chunks is_retracted decode_batch_idx",
        "a request's state", roles=("main",),
    ),
    *_uses(
        SCHEDULER,
        "_engine_paused disagg_decode_transfer_queue disagg_decode_prealloc_queue last_batch waiting_queue req_to_token_pool "
        "max_running_requests enable_overlap spec_algorithm dp_attn_adapter schedule_stream forward_stream "
        "batch_result_processor is_mixed_chunk enable_priority_scheduling policy running_batch "
        "grammar_manager",
        "read by MD's seam", roles=("main",),
    ),
)
# fmt: on
