"""Where PDD meets the scheduler: commands come in with the ordinary requests, on all ranks in the same step.

`Seam` is what the three roles share. There is one for each scheduler process; rank 0's has the `Node`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from sglang_pdd import keys
from sglang_pdd.actions import Action, Command
from sglang_pdd.config import PddConfig
from sglang_pdd.discovery import Finder
from sglang_pdd.metrics import Counters
from sglang_pdd.node import Machine, Node
from sglang_pdd.patches import engines, guard, idle
from sglang_pdd.protocol import Hello, Landing
from sglang_pdd.timeline import Timeline
from sglang_pdd.transport import Endpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Flags on which it depends what a server samples for the same request.
_SAMPLING_FLAGS = (
    "enable_deterministic_inference",
    "grammar_backend",
    "reasoning_parser",
    "enable_custom_logit_processor",
    "constrained_json_whitespace_pattern",
    "constrained_json_disable_any_whitespace",
    "constrained_json_max_whitespace_cnt",
    "enable_strict_thinking",
    "enable_watermark",
)

seam: Seam | None = None  # of this process, once the scheduler is up


class PddCommands(tuple[Command, ...]):
    """What the scheduler's dispatcher sees: the commands of one poll."""


class Seam:
    """Args:
    scheduler: SGLang's; this object lives as long as it does.
    """

    def __init__(self, scheduler: Any, config: PddConfig) -> None:
        self.scheduler = scheduler
        self.config = config
        self.rank = get_parallel().tp_rank
        self.counters = Counters(prometheus=self.rank == 0 and scheduler.metrics_reporter.enable_metrics)
        self.node_id = secrets.token_hex(8)
        assert config.role is not None
        path = config.timeline if self.rank == 0 else None
        lost = partial(self.counters.inc, "timeline.errors")
        self.timeline = Timeline(path, config.role, self.node_id, lost)
        self.node: Node | None = None
        self._known_keys = keys.Keys.load(config.keys) if config.keys else None
        self._public_key = self._known_keys.public if self._known_keys else ""
        self._engine_sessions = all_ranks(engines.session_of(self.kv_manager))
        self._places: tuple[Landing, ...] = ()  # where all ranks take KV streams
        self._fingerprint = fingerprint(scheduler, self.kv_manager)

    # --- what a role provides ---

    @property
    def kv_manager(self) -> Any:
        raise NotImplementedError

    def open_rooms(self) -> int:
        """Requests that this role holds state for."""
        raise NotImplementedError

    def relays(self) -> int:
        """Relays that this role takes part in."""
        raise NotImplementedError

    def run(self, command: Command) -> None:
        """Carry out one command. All ranks, same step."""
        raise NotImplementedError

    # --- what all roles share ---

    def connect(self, machine: Machine, *, listen: bool, capacity: Callable[[], int] = lambda: 0) -> None:
        """Rank 0: make the node, and let its sockets wake an idle scheduler."""
        config = self.config
        endpoint = Endpoint(self.node_id, self._known_keys, self.counters)
        address = ""
        if listen:
            endpoint.bind(config.bind)
            address = config.endpoint

        def hello() -> Hello:
            return Hello(
                config.role or "",
                address,
                self._engine_sessions,
                self._fingerprint,
                self._public_key,
                capacity(),
                self.relays(),
                self._places,
            )

        finder = Finder(self.counters)
        says = None if config.role == "prefill" else hello
        self.node = Node(machine, endpoint, finder, self.counters, says, keyed=self._known_keys is not None)
        for bootstrap in config.prefills:
            self.node.want(bootstrap)
        if self.scheduler.idle_sleeper is not None:
            idle.bell = idle.Bell(self.scheduler.idle_sleeper.poller)
            idle.bell.watch(endpoint)

    def trusted(self, public_key: str) -> bool:
        """May a node with this CURVE public key be dialled?"""
        return self._known_keys is None or public_key in self._known_keys.peers

    def do(self, actions: list[Action]) -> None:
        """Rank 0 carries out what its state machine asks for."""
        if self.node is not None:
            self.node.do(actions)

    def carry_out(self, commands: PddCommands) -> None:
        for command in commands:
            self.run(command)

    def state(self) -> dict[str, Any]:
        """For ``/get_server_info``."""
        scheduler = self.scheduler
        available = scheduler.token_to_kv_pool_allocator.available_size()
        evictable = scheduler.tree_cache.evictable_size()
        total = scheduler.max_total_num_tokens
        return {
            "role": self.config.role,
            "node": self.node_id,
            "rooms": self.open_rooms(),
            "relays": self.relays(),
            "pool": {
                "total": total,
                "available": available,
                "evictable": evictable,
                "protected": scheduler.tree_cache.protected_size(),
                "used": total - available - evictable,
            },
            "counters": self.counters.snapshot(),
            "hook_failures": dict(guard.failures),
            "hook_seconds": dict(guard.seconds),
        }


def fingerprint(scheduler: Any, manager: Any) -> dict[str, str]:
    """What two roles must have in common, each as a short text."""
    config = scheduler.model_config
    model = config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        model.pop(name, None)
    return {
        "model": _digest(json.dumps([model, _weights(config.model_path)], sort_keys=True, default=str)),
        "tokenizer": _digest(json.dumps(sorted(scheduler.tokenizer.get_vocab().items())))
        if scheduler.tokenizer
        else "none",
        "page_size": str(scheduler.token_to_kv_pool_allocator.page_size),
        "transfer_engine": engines.name_of(manager),
        "kv_cache_dtype": str(scheduler.tp_worker.model_runner.kv_cache_dtype),
        "sampling": " ".join(f"{name}={getattr(scheduler.server_args, name)}" for name in _SAMPLING_FLAGS),
    }


def _weights(path: str) -> list[tuple[str, int]]:
    """Names and sizes of a local model's weight files: enough to tell two checkpoints of one shape apart, mostly."""
    if not os.path.isdir(path):
        return []
    names = sorted(n for n in os.listdir(path) if n.endswith((".safetensors", ".bin")))
    return [(n, os.path.getsize(os.path.join(path, n))) for n in names]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def all_ranks(mine: T) -> tuple[T, ...]:
    """What all ranks say, in their order. Blocks until all have."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return (mine,)
    said: list[Any] = [None] * parallel.tp_size
    torch.distributed.all_gather_object(said, mine, group=parallel.tp_group.cpu_group)
    return tuple(said)


# --- hooks ------------------------------------------------------------------------------------------------------


def start(result: Any, scheduler: Any) -> None:
    """After the last step of the scheduler's construction."""
    global seam
    config = PddConfig.from_env()
    if config.role is None:
        return
    from sglang_pdd.patches import server_args

    if problem := server_args.check_model(scheduler.model_config):
        raise SystemExit(f"sglang-pdd: {problem}")
    if config.role == "prefill":
        from sglang_pdd.patches.prefill import PrefillSeam as Role
    elif config.role == "relay":
        from sglang_pdd.patches.relay import RelaySeam as Role  # type: ignore[assignment]
    else:
        from sglang_pdd.patches.main import MainSeam as Role  # type: ignore[assignment]
    seam = Role(scheduler, config)
    scheduler._request_dispatcher += TypeBasedDispatcher([(PddCommands, seam.carry_out)])
    logger.info("PDD: %s node %s is up", config.role, seam.node_id)


def pull(received: list[Any] | None, receiver: Any) -> list[Any] | None:
    """After rank 0 has pulled its requests: add what PDD's peers have brought."""
    if received is not None and seam is not None and seam.node is not None:
        commands = seam.node.poll()
        if commands:
            received.append(PddCommands(commands))
    return received


def internal_state(output: Any, scheduler: Any, request: Any) -> Any:
    """After ``Scheduler.get_internal_state``: PDD's part of ``/get_server_info``."""
    if seam is not None:
        output.internal_state["pdd"] = seam.state()
    return output
