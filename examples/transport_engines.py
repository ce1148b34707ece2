"""SGLang's transfer engines as ends of `bench_transport.py`: Mooncake and NIXL."""

from __future__ import annotations

import base64
import time
import unittest.mock
from typing import Any

from transport_memory import LAYERS, Memory, moves

NIXL_SLEEP_US = 10_000  # at most; whatever comes in wakes it
NIXL_POLL_S = 0.0005


def _mooncake(host: str, memory: Memory) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("Mooncake does not start")
    for address, layer in zip(memory.bases, memory.layers, strict=True):
        if engine.register_memory(address, len(layer)) != 0:
            raise SystemExit("Mooncake cannot register memory")
    return engine


class MooncakeTarget:
    def __init__(self, host: str, mib: int, **_: Any) -> None:
        self.memory = Memory(mib, content=False)
        self.engine = _mooncake(host, self.memory)
        self.hello = {"session": f"{host}:{self.engine.get_rpc_port()}", "bases": self.memory.bases}

    def sums(self) -> list[int]:
        return self.memory.sums()


class MooncakeSource:
    def __init__(self, host: str, mib: int, there: dict[str, Any], **_: Any) -> None:
        self.memory = Memory(mib, content=True)
        self.engine = _mooncake(host, self.memory)
        self.there = there
        self.hello = None

    def push(self, room: int, block: int) -> dict[str, Any]:
        """As `Source.push`; one call, as SGLang makes it for a chunk. ``ending``: 0 is good."""
        columns = [list(column) for column in zip(*self.memory.blocks(self.there["bases"], room, block), strict=True)]
        begun = time.monotonic()
        status = self.engine.batch_transfer_sync_write(self.there["session"], *columns)
        seconds = time.monotonic() - begun
        return {"s": seconds, "ending": int(status), "sums": self.memory.sums_after(room, block)}


class Nixl:
    """Its agent with UCX. Its thread sleeps while nothing moves, as on the plugin's CPU platform: else it keeps a core
    busy that the other ends need."""

    def __init__(self, name: str, memory: Memory) -> None:
        from nixl import _bindings
        from nixl._api import nixl_agent, nixl_agent_config

        class Sleeping(_bindings.nixlAgentConfig):  # type: ignore[misc]
            def __setattr__(self, key: str, value: Any) -> None:
                super().__setattr__(key, NIXL_SLEEP_US if key == "pthrDelay" else value)

        with unittest.mock.patch.object(_bindings, "nixlAgentConfig", Sleeping):
            self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        rows = [(address, len(layer), 0, "") for address, layer in zip(memory.bases, memory.layers, strict=True)]
        if not self.agent.register_memory(rows, "DRAM"):
            raise SystemExit("NIXL cannot register memory")


class NixlTarget:
    def __init__(self, mib: int, **_: Any) -> None:
        self.memory = Memory(mib, content=False)
        self.nixl = Nixl("md", self.memory)
        metadata = base64.b64encode(self.nixl.agent.get_agent_metadata()).decode()
        self.hello = {"metadata": metadata, "bases": self.memory.bases}

    def sums(self) -> list[int]:
        return self.memory.sums()


class NixlSource:
    def __init__(self, mib: int, there: dict[str, Any], **_: Any) -> None:
        self.memory = Memory(mib, content=True)
        self.nixl = Nixl("p", self.memory)
        self.there = there
        self.peer = self.nixl.agent.add_remote_agent(base64.b64decode(there["metadata"]))
        self.lists: dict[int, tuple[Any, Any]] = {}  # by size of a block: all of them, here and there
        self.hello = None

    def push(self, room: int, block: int) -> dict[str, Any]:
        """As `Source.push`; one transfer of prepared places, as SGLang makes it for a chunk. ``ending``: 0 is good."""
        agent, layer = self.nixl.agent, len(self.memory.layers[0])
        if block not in self.lists:
            near, far = (
                [(base + at, block, 0) for base in bases for at in range(0, layer, block)]
                for bases in (self.memory.bases, self.there["bases"])
            )
            self.lists[block] = agent.prep_xfer_dlist("", near, "DRAM"), agent.prep_xfer_dlist(self.peer, far, "DRAM")
        near_at, far_at = (
            [first + each for first in range(0, LAYERS * len(half), len(half)) for each in half]
            for half in moves(room, block, layer)
        )
        near_list, far_list = self.lists[block]
        begun = time.monotonic()
        handle = agent.make_prepped_xfer("WRITE", near_list, near_at, far_list, far_at)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(NIXL_POLL_S)
            state = agent.check_xfer_state(handle)
        seconds = time.monotonic() - begun
        handle.release()
        ending = 0 if state == "DONE" else state
        return {"s": seconds, "ending": ending, "sums": self.memory.sums_after(room, block)}
