"""Plugins for SGLang that say when a request's KV lands on MD, and how many eager tokens MD gets.

A request whose rid ends in ``@LL.KK`` lands once MD has emitted LL of its tokens, and MD hears of KK and no more. P
sends MD nothing before the relay has its copy. Another plugin lets SGLang honour sampling seeds on a CPU.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from cluster import Cluster
from plugin import install

_FORCE = """
import dataclasses
import re

SPEC = re.compile("@([0-9]{2})[.]([0-9]{2})$")


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_pdd.patches.main.MainSeam._emit", emit, HookType.AROUND)
    target = "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred"
    HookRegistry.register(target, pop_transferred, HookType.AROUND)


def forced(req):
    found = SPEC.search(req.rid)
    return (int(found[1]), int(found[2])) if found else None


def emit(original, seam, command):
    session = seam._sessions.get(command.room)
    spec = forced(session.req) if session else None
    if spec and seam.scheduler._engine_paused:  # these tokens are lost, it may never have enough
        session.req.pdd_test_free = True
    if spec:
        keep = max(0, spec[1] - command.start)
        logprobs = command.logprobs.slice(0, keep) if command.logprobs else None
        command = dataclasses.replace(command, ids=command.ids[:keep], logprobs=logprobs)
    original(seam, command)


def held(transfer):
    from sglang.srt.disaggregation.base import KVPoll

    spec = forced(transfer.req)
    gone = transfer.kv_receiver is None or transfer.kv_receiver.conclude_state == KVPoll.Failed
    free = gone or transfer.req.finished() or hasattr(transfer.req, "pdd_test_free")
    return spec and not free and len(transfer.req.output_ids) < spec[0]


def pop_transferred(original, queue, rids_to_check=None):
    if rids_to_check is None and any(held(t) for t in queue.queue):
        rids_to_check = [t.req.rid for t in queue.queue if not held(t)]
    return original(queue, rids_to_check)
"""

_WAIT = """
import time


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_pdd.patches.mooncake.transfer", transfer, HookType.AROUND)
    HookRegistry.register("sglang_pdd.patches.streams.Lane.submit", submit, HookType.AROUND)


def transfer(original, lanes, send, session, blocks):
    if (lane := lanes.wan(session)) is not None:
        wait(lane.in_hand.room)
    return original(lanes, send, session, blocks)


def submit(original, lane, *args, **kwargs):
    wait(lane.room)
    return original(lane, *args, **kwargs)


def wait(room):
    from sglang_pdd.patches import ingress

    end = time.monotonic() + 30
    while any(r.room == room for r in list(ingress.seam.fanout._relays.values())) and time.monotonic() < end:
        time.sleep(0.002)
"""

_SEEDS = """
def register():
    from sglang.srt.arg_groups import choices

    for name in ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"):
        getattr(choices, name).append("torch_native")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"
    HookRegistry.register(target, lambda original, runner: None, HookType.AROUND)  # it is for GPUs only
    HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", mixed, HookType.AROUND)  # as is its kernel


def mixed(original, seed, positions, columns):
    import torch

    rows = seed.to(torch.int64) * 0x2545F4914F6CDD1D + positions.to(torch.int64) * 0x9E3779B1
    x = rows[:, None] + columns.to(torch.int64)[None, :] * 0x85EBCA77
    for shift in (33, 29, 32):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * 0x62A9D9ED799705F5
    return (x >> 24) & 0xFFFFFFFF
"""


def install_force_plugin(spec: Cluster, folder: Path) -> Cluster:
    """The same cluster, in which a request lands when its rid says so."""
    spec = install(spec, folder, "pdd_test_force", _FORCE, ["main"])
    return install(spec, folder, "pdd_test_wait", _WAIT, ["prefill"])


def install_seeds_plugin(spec: Cluster, folder: Path) -> Cluster:
    """The same cluster, whose servers take ``--enable-deterministic-inference``."""
    roles = ["single", "prefill", "relay", "main"]
    return install(spec, folder, "pdd_test_seeds", _SEEDS, roles, {"TORCHDYNAMO_DISABLE": "1"})


def forced_rid(land: int, take: int | None = None) -> str:
    """A rid for a request that lands after ``land`` tokens; MD hears of ``take`` (default: as many)."""
    return f"{secrets.token_hex(8)}@{land:02d}.{land if take is None else take:02d}"
