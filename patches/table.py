"""The one table of everything of SGLang's that we rely on. `guard` checks it at start and installs its hooks.

To rely on something new, add an `Entry`; nothing else may touch SGLang unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    ``roles``: who relies on it: ``prefill``, ``relay``, ``main``, ``pace`` (a rate limit without a role), or ``any``.
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


_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"

ENTRIES: tuple[Entry, ...] = (
    # Flags: server_args.py
    Entry(
        f"{_SERVER_ARGS}.add_cli_args",
        "function",
        "adds the flags --pdd-*",
        "(parser)",
        process="launcher",
        hook="after",
        by="server_args:add_flags",
    ),
    Entry(
        f"{_SERVER_ARGS}.from_cli_args",
        "classmethod",
        "takes our flags off the namespace, sets the stock flags that a role implies",
        "(cls, args)",
        process="launcher",
        hook="before",
        by="server_args:take_flags",
    ),
    Entry(
        f"{_SERVER_ARGS}.resolve_once",
        "method",
        "when SGLang has resolved its arguments, refuses what PDD cannot serve",
        "(self)",
        process="launcher",
        hook="after",
        by="server_args:check_resolved",
    ),
    Entry(
        "sglang.srt.arg_groups.overrides.resolving_view",
        "function",
        "resolved arguments",
        "(server_args)",
        process="launcher",
    ),
    Entry(
        "sglang.srt.arg_groups.overrides.model_config_of",
        "function",
        "the model's kind",
        "(server_args)",
        process="launcher",
    ),
    Entry(
        "sglang.srt.mem_cache.kv_cache_builder.uses_ssm_state",
        "function",
        "the model's kind",
        "(model_config)",
        process="launcher",
    ),
    *(
        Entry(f"{_SERVER_ARGS}.{name}", "field", "read, implied or refused", process="launcher")
        for name in ["attn_cp_size", "attn_dp_size", "dcp_size", "decoupled_spec_role", "disable_radix_cache", "disaggregation_decode_allocation_policy", "disaggregation_decode_enable_offload_kvcache", "disaggregation_decode_enable_radix_cache", "disaggregation_decode_host_receive_threshold", "disaggregation_mode", "disaggregation_transfer_backend", "dp_size", "dwdp_size", "enable_dp_attention", "enable_hierarchical_cache", "enable_hisparse", "enable_kv_cache_sharding", "enable_lmcache", "enable_lora", "enable_pd_role_switch", "enable_pdmux", "enable_unified_memory", "encoder_only", "grpc_mode", "host", "language_only", "lora_paths", "nnodes", "optimistic_prefill_attempts", "pp_size", "radix_cache_backend", "smg_grpc_mode", "speculative_algorithm", "tokenizer_worker_num", "tp_size", "use_ray"]
    ),
    *(
        Entry(f"sglang.srt.configs.model_config.{name}", "function", "the model's kind", "(config)", process="launcher")
        for name in ("is_deepseek_dsa", "is_minimax_sparse")
    ),
    *(
        Entry(
            f"sglang.srt.configs.model_config.ModelConfig.{name}", "attribute", "the model's kind", process="launcher"
        )
        for name in ("hf_config", "is_encoder_decoder", "is_generation", "is_hybrid_swa", "is_multimodal")
    ),
    # Drain and discovery of a prefill: bootstrap.py
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
        "method",
        "publishes this prefill's PDD endpoint at GET /pdd",
        "(self)",
        roles=("prefill",),
        process="launcher",
        hook="after",
        by="bootstrap:add_route",
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer.app",
        "attribute",
        "the aiohttp application that gets the route",
        roles=("prefill",),
        process="launcher",
    ),
    Entry(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
        "method",
        "holds back the shutdown while KV copies are in flight",
        "(self)",
        roles=("prefill",),
        process="launcher",
        hook="around",
        by="bootstrap:finish_copies",
    ),
    *(
        Entry(
            f"sglang.srt.managers.tokenizer_manager.TokenizerManager.{name}",
            "attribute",
            "read while holding back the shutdown",
            roles=("prefill",),
            process="launcher",
        )
        for name in ("gracefully_exit", "rid_to_state", "server_status")
    ),
    Entry(
        "sglang.srt.managers.tokenizer_manager.ServerStatus.UnHealthy",
        "attribute",
        "an unhealthy server exits at once",
        roles=("prefill",),
        process="launcher",
    ),
    # Commands into the scheduler: ingress.py
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.init_internal_state",
        "method",
        "the scheduler is complete: PDD starts",
        "(self)",
        roles=("prefill", "relay", "main"),
        hook="after",
        by="ingress:start",
    ),
    Entry(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        "method",
        "commands ride with the requests that rank 0 pulls",
        "(self)",
        roles=("prefill", "relay", "main"),
        hook="after",
        by="ingress:pull",
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "method",
        "PDD's part of /get_server_info",
        "(self, recv_req)",
        roles=("prefill", "relay", "main"),
        hook="after",
        by="ingress:internal_state",
    ),
    Entry("sglang.utils.TypeBasedDispatcher", "class", "dispatches our commands", roles=("prefill", "relay", "main")),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler._request_dispatcher",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.idle_sleeper",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.tree_cache",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.token_to_kv_pool_allocator",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.max_total_num_tokens",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.model_config",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.tokenizer",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.tp_worker",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.metrics_reporter",
        "attribute",
        "read by the seams",
        roles=("prefill", "relay", "main"),
    ),
    # P: prefill.py
    Entry(
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._process_req",
        "method",
        "keeps the sampling parameters that P is about to shorten",
        "(self, req)",
        roles=("prefill",),
        hook="before",
        by="prefill:keep_sampling",
    ),
    Entry(
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.finalize_bootstrap",
        "method",
        "MD has said what it holds: relay or not",
        "(self, req)",
        roles=("prefill",),
        hook="after",
        by="prefill:after_bootstrap",
    ),
    Entry(
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._num_pages_to_send",
        "method",
        "size of the second copy",
        "(self, req, decode_prefix_len)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk",
        "method",
        "first token, second copy, early end of the HTTP response",
        "(self, req, last_chunk=False, end_idx=None)",
        roles=("prefill",),
        hook="around",
        by="prefill:send_kv_chunk",
    ),
    Entry(
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
        "method",
        "once a step: the relays' progress",
        "(self, rids_to_check=None)",
        roles=("prefill",),
        hook="around",
        by="prefill:inflight_queue",
    ),
    Entry(
        "sglang.srt.disaggregation.utils.poll_and_all_reduce_attn_cp_tp_group",
        "function",
        "all ranks see the same state of a copy",
        "(pollers, attn_cp_cpu_group, attn_tp_cpu_group)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.utils.get_kv_class",
        "function",
        "the sender's class",
        "(transfer_backend, class_type)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.utils.is_aborted",
        "function",
        "an aborted request needs no relay",
        "(req)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVSender.__init__",
        "method",
        "a second sender for the relay",
        "(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVSender.init",
        "method",
        "drives the second copy",
        "(self, num_kv_indices, aux_index=None)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVSender.pop_decode_prefix_len",
        "method",
        "drives the second copy",
        "(self)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVSender.poll",
        "method",
        "drives the second copy",
        "(self)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVSender.abort",
        "method",
        "drives the second copy",
        "(self)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVSender.clear",
        "method",
        "drives the second copy",
        "(self)",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.disagg_prefill_bootstrap_queue",
        "attribute",
        "read by P's seam",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.disagg_prefill_inflight_queue",
        "attribute",
        "read by P's seam",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.req_to_metadata_buffer_idx_allocator",
        "attribute",
        "read by P's seam",
        roles=("prefill",),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.attn_cp_cpu_group", "attribute", "read by P's seam", roles=("prefill",)
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.attn_tp_cpu_group", "attribute", "read by P's seam", roles=("prefill",)
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.output_streamer", "attribute", "read by P's seam", roles=("prefill",)
    ),
    # P: mooncake.py
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.add_transfer_request",
        "method",
        "a lane for each destination",
        "(self, bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index=None, state_indices=None, num_kv_tokens=None, *, wait_event=None, indices_event=None, trace_ctx=None)",
        roles=("prefill", "pace"),
        hook="around",
        by="mooncake:add_transfer_request",
    ),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager._transfer_data",
        "method",
        "pacing and cancellation",
        "(self, mooncake_session_id, transfer_blocks)",
        roles=("prefill", "pace"),
        hook="around",
        by="mooncake:transfer_data",
    ),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.transfer_worker",
        "method",
        "a lane's worker",
        "(self, queue, executor, staging_buffer=None, worker_index=0)",
        roles=("prefill", "pace"),
    ),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.transfer_queues",
        "attribute",
        "read by lanes and seams",
        roles=("prefill", "pace"),
    ),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.transfer_infos",
        "attribute",
        "read by lanes and seams",
        roles=("prefill", "pace"),
    ),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.request_status",
        "attribute",
        "read by lanes and seams",
        roles=("prefill", "pace"),
    ),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.failure_records",
        "attribute",
        "read by lanes and seams",
        roles=("prefill", "pace"),
    ),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.kv_item_lens_sum",
        "attribute",
        "read by lanes and seams",
        roles=("prefill", "pace"),
    ),
    Entry("sglang.srt.disaggregation.common.utils.FastQueue", "class", "a lane is one", roles=("prefill", "pace")),
    Entry(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.supports_host_tensor_indices",
        "attribute",
        "the CPU platform sets it False",
        roles=("prefill", "pace"),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler._release_aborted_request",
        "method",
        "an aborted request gets no relay any more",
        "(self, req)",
        roles=("prefill",),
        hook="after",
        by="prefill:aborted_released",
    ),
    # RLD: relay.py
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        "method",
        "a relayed request comes in",
        "(self, recv_req, *, mm_input_error=None)",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        "method",
        "a relayed request is stopped",
        "(self, recv_req)",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "method",
        "relayed tokens go to MD",
        "(self, reqs, return_logprob, skip_req=None)",
        roles=("relay",),
        hook="around",
        by="relay:stream_output",
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
        "method",
        "nobody waits for a stopped relay's output",
        "(self, abort_req, req)",
        roles=("relay",),
        hook="around",
        by="relay:abort_output",
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.rid",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.input_text",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.input_ids",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.input_embeds",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.mm_inputs",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.token_type_ids",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.sampling_params",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.return_logprob",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.logprob_start_len",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.top_logprobs_num",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.token_ids_logprob",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.stream",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.bootstrap_host",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.bootstrap_port",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    Entry(
        "sglang.srt.managers.io_struct.TokenizedGenerateReqInput.bootstrap_room",
        "field",
        "a relayed request is made of these",
        roles=("relay",),
    ),
    # MD: main.py
    Entry(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata",
        "method",
        "P may answer from now on",
        "(self, decode_req, kv_indices, page_size, state_indices=None, **metadata_kwargs)",
        roles=("main",),
        hook="after",
        by="main:metadata_sent",
    ),
    Entry(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        "method",
        "the KV has landed",
        "(self, decode_req)",
        roles=("main",),
        hook="around",
        by="main:commit_transfer",
    ),
    Entry(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred",
        "method",
        "transfers that ended otherwise",
        "(self, rids_to_check=None)",
        roles=("main",),
        hook="after",
        by="main:after_transfers",
    ),
    Entry(
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run",
        "method",
        "the extend pass",
        "(self, running_batch)",
        roles=("main",),
        hook="around",
        by="main:next_batch",
    ),
    Entry(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
        "method",
        "an extend pass is done",
        "(self, batch, result)",
        roles=("main",),
        hook="after",
        by="main:extend_processed",
    ),
    Entry(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "method",
        "an answer is complete",
        "(self, reqs, return_logprob, skip_req=None)",
        roles=("main",),
        hook="after",
        by="main:output_streamed",
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
        "method",
        "an answer will never be complete",
        "(self, abort_req, req)",
        roles=("main",),
        hook="after",
        by="main:abort_sent",
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.init_new",
        "classmethod",
        "the extend batch",
        "(cls, reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, model_config, enable_overlap, spec_algorithm, chunked_req=None, dllm_config=None)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        "method",
        "the extend batch",
        "(self)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.merge_batch",
        "method",
        "the extend batch",
        "(self, other)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch",
        "method",
        "the extend batch",
        "(self, reqs_to_exclude=None, keep_indices=None)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        "method",
        "the extend batch",
        "(self, selected_indices=None)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        "method",
        "an eager token becomes output",
        "(self, tree_cache=None, cow_mamba=None)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "method",
        "an eager token becomes output",
        "(self, new_accepted_len=1)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.mem_cache.common.release_kv_cache",
        "function",
        "an answer that is complete before its extend pass",
        "(req, tree_cache, *, checkpoint)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.disaggregation.common.conn.CommonKVReceiver.abort",
        "method",
        "an answer that is complete before its KV landed",
        "(self)",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_update_reasoning_tokens",
        "method",
        "counts reasoning tokens",
        "(self, req, next_token_id)",
        roles=("main",),
    ),
    Entry("sglang.srt.disaggregation.decode.DecodeRequest.is_rebootstrap", "field", "a transfer", roles=("main",)),
    Entry("sglang.srt.disaggregation.decode.DecodeRequest.kv_receiver", "field", "a transfer", roles=("main",)),
    Entry("sglang.srt.disaggregation.decode.DecodeRequest.req", "field", "a transfer", roles=("main",)),
    Entry("sglang.srt.disaggregation.decode.DecodeRequest.host_staged", "field", "a transfer", roles=("main",)),
    Entry("sglang.srt.managers.schedule_batch.Req.prefix_len", "attribute", "a request's state", roles=("main",)),
    Entry("sglang.srt.managers.schedule_batch.Req.extend_end", "attribute", "a request's state", roles=("main",)),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.full_untruncated_fill_ids",
        "attribute",
        "a request's state",
        roles=("main",),
    ),
    Entry("sglang.srt.managers.schedule_batch.Req.already_computed", "attribute", "a request's state", roles=("main",)),
    Entry(
        "sglang.srt.managers.schedule_batch.Req._cache_breakdown_computed",
        "attribute",
        "a request's state",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.logprob_start_len", "attribute", "a request's state", roles=("main",)
    ),
    Entry("sglang.srt.managers.schedule_batch.Req.cached_tokens", "attribute", "a request's state", roles=("main",)),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.cached_tokens_device", "attribute", "a request's state", roles=("main",)
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.cached_tokens_host", "attribute", "a request's state", roles=("main",)
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.cached_tokens_storage",
        "attribute",
        "a request's state",
        roles=("main",),
    ),
    Entry("sglang.srt.managers.schedule_batch.Req.output_ids", "attribute", "a request's state", roles=("main",)),
    Entry("sglang.srt.managers.schedule_batch.Req.finished_reason", "attribute", "a request's state", roles=("main",)),
    Entry("sglang.srt.managers.schedule_batch.Req.finished_len", "attribute", "a request's state", roles=("main",)),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.send_token_offset", "attribute", "a request's state", roles=("main",)
    ),
    Entry(
        "sglang.srt.managers.schedule_batch.Req.pd_rebootstrap_forced_output_id",
        "attribute",
        "a request's state",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.disagg_decode_transfer_queue",
        "attribute",
        "read by MD's seam",
        roles=("main",),
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.disagg_decode_prealloc_queue",
        "attribute",
        "read by MD's seam",
        roles=("main",),
    ),
    Entry("sglang.srt.managers.scheduler.Scheduler.last_batch", "attribute", "read by MD's seam", roles=("main",)),
    Entry("sglang.srt.managers.scheduler.Scheduler.waiting_queue", "attribute", "read by MD's seam", roles=("main",)),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.req_to_token_pool", "attribute", "read by MD's seam", roles=("main",)
    ),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.max_running_requests",
        "attribute",
        "read by MD's seam",
        roles=("main",),
    ),
    Entry("sglang.srt.managers.scheduler.Scheduler.enable_overlap", "attribute", "read by MD's seam", roles=("main",)),
    Entry("sglang.srt.managers.scheduler.Scheduler.spec_algorithm", "attribute", "read by MD's seam", roles=("main",)),
    Entry("sglang.srt.managers.scheduler.Scheduler.dp_attn_adapter", "attribute", "read by MD's seam", roles=("main",)),
    Entry("sglang.srt.managers.scheduler.Scheduler.schedule_stream", "attribute", "read by MD's seam", roles=("main",)),
    Entry("sglang.srt.managers.scheduler.Scheduler.forward_stream", "attribute", "read by MD's seam", roles=("main",)),
    Entry(
        "sglang.srt.managers.scheduler.Scheduler.batch_result_processor",
        "attribute",
        "read by MD's seam",
        roles=("main",),
    ),
)
