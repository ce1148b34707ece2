"""P's sending by NIXL: SGLang's own manager and worker, our agent before one that only copies memory."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from test_streams import LAYERS, PAGE, PAGES, Rank, memory, wait_for

from sglang_pdd.config import ConfigError
from sglang_pdd.metrics import Counters
from sglang_pdd.patches import engines, lanes, nixl, server_args, streams
from sglang_pdd.patches.streams import Streams
from sglang_pdd.wan.sender import Sender

ROOM = 77
HEADS, TOKENS = 2, 4  # of a page


class Copies:
    """NIXL's agent, as far as SGLang uses it to send: bytes are there when somebody asks for the state."""

    name = "p"

    def __init__(self) -> None:
        self.going = threading.Event()  # cleared: whatever is posted stays on its way
        self.going.set()
        self.posted: list[int] = []  # bytes of each transfer
        self.bad: set[int] = set()  # numbers of transfers that fail
        self.running = self.most_running = 0

    def get_xfer_descs(self, rows: Any, mem_type: str) -> Any:
        return np.asarray([(a, n) for a, n, _ in np.asarray(rows).tolist()], np.int64).reshape(-1, 2)

    def prep_xfer_dlist(self, peer: str, rows: Any, mem_type: str) -> Any:
        return np.asarray([(a + i * step, n) for a, n, _, step, count in rows.tolist() for i in range(count)], np.int64)

    def make_prepped_xfer(self, operation: str, near: Any, near_at: Any, far: Any, far_at: Any) -> Any:
        return self.initialize_xfer(operation, near[near_at], far[far_at], "")

    def initialize_xfer(self, operation: str, near: Any, far: Any, peer: str) -> Any:
        assert operation == "WRITE" and (near[:, 1] == far[:, 1]).all()
        return SimpleNamespace(near=near, far=far, state="PROC")

    def transfer(self, handle: Any) -> str:
        handle.number = len(self.posted)
        self.posted.append(int(handle.near[:, 1].sum()))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if handle.state == "PROC" and self.going.is_set():
            self.running -= 1
            handle.state = "ERR" if handle.number in self.bad else "DONE"
            if handle.state == "DONE":
                for (source, size), (target, _) in zip(handle.near.tolist(), handle.far.tolist(), strict=True):
                    ctypes.memmove(target, source, size)
        return str(handle.state)

    def check_remote_metadata(self, peer: str) -> bool:
        return True

    def add_remote_agent(self, metadata: bytes) -> None:
        pass


class Manager(NixlKVManager):
    """SGLang's on P, with what its constructor would have taken from a scheduler, and our hooks in place."""

    def __init__(self, regions: list[Any], ranks: list[Rank], copies: Copies) -> None:
        *kv, slot = regions
        self.kv_args = SimpleNamespace(
            kv_data_ptrs=[r.address for r in kv],
            kv_data_lens=[r.size for r in kv],
            kv_item_lens=[r.unit for r in kv],
            kv_layer_ids=[],
            kv_data_mem_kinds=["VRAM"] * len(kv),
            aux_data_ptrs=[slot.address],
            aux_item_lens=[slot.unit],
            page_size=TOKENS,
            gpu_id=0,
            engine_rank=0,
            kv_head_num=HEADS,
            total_kv_head_num=HEADS,
            prefill_start_layer=0,
        )
        self.kv_item_lens_sum = sum(self.kv_args.kv_item_lens)
        self.src_mem_kind, self._num_slots_src = "VRAM", PAGES
        self.attn_tp_size = self.pp_size = self.dcp_size = self.attn_cp_size = 1
        self.dcp_rank = self.attn_tp_rank = self.pp_rank = self.attn_cp_rank = 0
        self.is_mla_backend = self.is_hybrid_mla_backend = self.enable_staging = False
        self.enable_deferred_decode_kv_release = True
        self.deferred_bootstrap = self.prep_handle_slice_src = None
        self.disaggregation_mode = DisaggregationMode.PREFILL
        self.request_status, self.transfer_infos, self.failure_records = {}, {}, {}
        self.decode_kv_args_table, self.prep_handles, self.prep_handles_slice_dst = {}, {}, {}
        self.req_to_decode_prefix_len, self._prepared_state_plans, self._state_layout_rejections = {}, {}, {}
        self._prepared_state_components = frozenset()
        self._staging_outstanding = defaultdict(int)
        self._deferred_ack_targets, self._deferred_ack_poisoned_rooms = {}, set()
        self.failure_lock, self._dcp_pack_buffers = threading.Lock(), None
        self.transfer_queues = [None]
        self.said: list[tuple[int, int]] = []  # (room, status) as told to MD
        self.ranks = ranks
        self.agent = copies
        nixl.stand_before(self)
        for i, rank in enumerate(ranks):
            *far, far_slot = rank.regions
            unit = far[0].unit // len(ranks)
            self._add_remote_peer(
                SimpleNamespace(
                    agent_name=rank.session,
                    agent_metadata=b"",
                    dst_dcp_size=1,
                    dst_dcp_rank=0,
                    dst_kv_ptrs=[r.address for r in far],
                    dst_kv_mem_kinds=["VRAM"] * len(far),
                    dst_kv_item_lens=[unit] * len(far),
                    dst_kv_item_len=unit,
                    dst_kv_layer_ids=[],
                    dst_num_slots=PAGES,
                    dst_aux_ptrs=[far_slot.address],
                    decode_tp_size=len(ranks),
                    decode_tp_rank=i,
                    gpu_id=0,
                    kv_xfer_segments=None,
                    dst_homogeneous_mem_kind=None,
                    staging_base_ptr=0,
                    staging_total_size=0,
                )
            )

    def requires_dcp_relayout(self, *_: Any) -> bool:
        return False

    def check_peer_aux_buffer_count(self, *_: Any) -> None:
        pass

    def told(self, room: int, pages: list[int]) -> None:
        """MD's metadata has come."""
        indices = np.array(pages, np.int32)
        self.update_status(room, KVPoll.WaitingForInput)
        self.transfer_infos[room] = {
            rank.session: SimpleNamespace(
                room=room,
                agent_name=rank.session,
                dst_kv_indices=indices,
                dst_aux_index=0,
                is_dummy=False,
                endpoint="md",
                dst_port=1,
            )
            for rank in self.ranks
        }

    def send_kvcache(self, *args: Any, **named: Any) -> Any:
        return nixl.send_pages(NixlKVManager.send_kvcache, self, *args, **named)

    def send_kvcache_slice(self, *args: Any, **named: Any) -> Any:
        return nixl.send_pages(NixlKVManager.send_kvcache_slice, self, *args, **named)

    def send_aux(self, *args: Any) -> Any:
        return nixl.send_metadata(NixlKVManager.send_aux, self, *args)

    def update_status(self, room: int, status: Any) -> None:
        streams.status_changed(NixlKVManager.update_status, self, room, status)

    def send_kv_status_message(self, *, bootstrap_room: int, status: Any, **_: Any) -> None:
        self.said.append((bootstrap_room, status))

    def _send_abort_ack(self, room: int, target: Any) -> None:
        self.said.append((room, "quiet"))

    def chunk(self, pages: range, last: bool, room: int = ROOM, **more: Any) -> None:
        indices = np.arange(pages.start, pages.stop, dtype=np.int32)
        lanes.add_transfer_request(
            NixlKVManager.add_transfer_request,
            self,
            room,
            indices,
            slice(pages.start, pages.stop),
            last,
            aux_index=0 if last else None,
            **more,
        )


class World:
    """P, and a rank or two of MD: ``by`` stream, or by engine over the ``wan`` or the ``lan``."""

    def __init__(self, by: str, ranks: int = 1, rate: float | None = None) -> None:
        self.copies = Copies()
        self.ranks = [Rank.start(f"md{i}") for i in range(ranks)]
        self.buffers, regions, pool = memory(100, staged=False)
        for i, buffer in enumerate(self.buffers[:-1]):  # each byte tells its place
            buffer[:] = np.arange(i, i + len(buffer), dtype=np.uint32).astype(np.uint8).tobytes()
        self.sent = 0
        lanes.lanes = lanes.Lanes(rate, lambda session: by == "lan", self._sent)
        self.manager = Manager(regions, self.ranks, self.copies)
        self.sender = Sender("p", pool, Counters(), rate=rate)
        self.streams = streams.streams = Streams(self.sender, self.manager) if by == "stream" else None
        if self.streams is not None:
            self.streams.know([r.session for r in self.ranks], [r.place for r in self.ranks])

    def _sent(self, room: int, size: int, seconds: float) -> None:
        assert seconds >= 0
        self.sent += size

    def begin(self, pages: list[int], room: int = ROOM) -> None:
        self.manager.told(room, pages)
        if self.streams is not None:
            for rank in self.ranks:
                rank.landings.open(room, np.array(pages, np.int32).tobytes(), 0)
            assert self.streams.open(room, len(pages) * LAYERS * PAGE) is not None

    def landed(self, target: list[int]) -> bool:
        """Is P's page i at MD's page target[i], each rank with its heads?"""
        equal = True
        for n, rank in enumerate(self.ranks):
            for i in range(LAYERS):
                near = np.frombuffer(self.buffers[i], np.uint8).reshape(PAGES, TOKENS, len(self.ranks), -1)
                far = np.frombuffer(rank.buffers[i], np.uint8)[: PAGES * PAGE // len(self.ranks)]
                far = far.reshape(PAGES, TOKENS, -1)
                equal &= bool((far[target] == near[: len(target), :, n]).all())
            equal &= rank.buffers[-1] == self.buffers[-1]
        return equal

    def close(self) -> None:
        self.copies.going.set()
        streams.streams = None
        lanes.lanes = None
        self.sender.shutdown()
        for rank in self.ranks:
            rank.receiver.shutdown()


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*args: Any, **named: Any) -> World:
        worlds.append(World(*args, **named))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by", ["lan", "wan", "stream"])
def test_pages_land_where_they_belong(world: Any, by: str, ranks: int) -> None:
    w = world(by, ranks)
    target = [40, 41, 42, *np.random.default_rng(1).permutation(40)[:17].tolist()]
    w.begin(target)
    w.manager.chunk(range(0, 8), last=False)
    w.manager.chunk(range(8, 20), last=True)
    wait_for(lambda: w.manager.said)
    assert w.manager.said == [(ROOM, KVPoll.Success)]
    assert w.landed(target)
    assert not w.copies.posted if by == "stream" else w.copies.posted
    assert w.sent == (20 * LAYERS * PAGE if by == "wan" else 0)
    wait_for(lambda: not w.manager._staging_outstanding)


def test_over_the_wan_only_a_few_segments_are_on_their_way(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "FREE_SEGMENT", 4 * PAGE * nixl.IN_FLIGHT)
    w = world("wan")
    w.begin(list(range(PAGES)))
    w.copies.going.clear()
    w.manager.chunk(range(0, PAGES), last=True)
    wait_for(lambda: len(w.copies.posted) == nixl.IN_FLIGHT)
    w.copies.going.set()
    wait_for(lambda: w.manager.said)
    *segments, slot = w.copies.posted
    assert segments == [4 * PAGE] * (PAGES * LAYERS // 4) and slot == 64
    assert w.copies.most_running == nixl.IN_FLIGHT and w.landed(list(range(PAGES)))


def test_an_aborted_room_sends_no_more_and_says_when_it_is_quiet(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "FREE_SEGMENT", 4 * PAGE * nixl.IN_FLIGHT)
    w = world("wan")
    w.begin(list(range(PAGES)))
    w.begin([5], room=8)
    w.copies.going.clear()
    w.manager.chunk(range(0, PAGES), last=True)
    wait_for(lambda: len(w.copies.posted) == nixl.IN_FLIGHT)
    w.manager.update_status(ROOM, KVPoll.Failed)
    target = SimpleNamespace(ip="md", port=1)
    w.manager.register_deferred_ack_target(ROOM, target)
    w.manager._maybe_ack_drained_abort(ROOM)
    w.manager.chunk(range(0, 1), last=True, room=8)
    time.sleep(0.2)
    assert not w.manager.said, "P has said that nothing is on its way any more"
    w.copies.going.set()
    wait_for(lambda: (8, KVPoll.Success) in w.manager.said)
    assert (ROOM, "quiet") in w.manager.said and (ROOM, KVPoll.Success) not in w.manager.said
    assert sum(size == 4 * PAGE for size in w.copies.posted) <= nixl.IN_FLIGHT + 1  # room 8's page is as large


def test_a_segment_that_fails_fails_the_room(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "FREE_SEGMENT", 4 * PAGE * nixl.IN_FLIGHT)
    w = world("wan")
    w.copies.bad = {2}
    w.begin(list(range(PAGES)))
    w.manager.chunk(range(0, PAGES), last=True)
    wait_for(lambda: w.manager.said)
    assert w.manager.said == [(ROOM, KVPoll.Failed)] and len(w.copies.posted) < 10
    assert lanes.get_lanes().link([w.ranks[0].session]).backlog == 0


def test_a_failure_with_others_on_their_way_is_never_called_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "SETTLE_S", 0.2)
    agent = nixl.Agent(SimpleNamespace(check_xfer_state=lambda state: state))
    transfer = nixl._Transfer("md", (None, None), (None, None), lambda part: None)  # type: ignore[arg-type]
    for states, said in ((["DONE"], "DONE"), (["DONE", "PROC"], "PROC"), (["ERR", "DONE"], "ERR"), ([], "DONE")):
        transfer.posted.clear()
        transfer.posted.extend((state, 1) for state in states)
        assert agent.check_xfer_state(transfer) == said
    transfer.posted.extend([("ERR", 1), ("PROC", 1)])
    assert agent.check_xfer_state(transfer) == "PROC"  # they may end yet
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match="on their way"):
        agent.check_xfer_state(transfer)


def test_a_worker_waits_for_what_is_not_written_yet_and_ends(world: Any) -> None:
    w = world("lan")
    written = SimpleNamespace(waited=threading.Event(), come=threading.Event())

    def synchronize() -> None:
        written.waited.set()
        written.come.wait(10)

    w.begin([3, 4])
    w.manager.chunk(range(0, 1), last=False, wait_event=SimpleNamespace(synchronize=synchronize))
    assert written.waited.wait(10) and not w.copies.posted
    written.come.set()
    w.manager.chunk(range(1, 2), last=True)
    wait_for(lambda: w.manager.said)
    assert w.landed([3, 4])
    lane = lanes.get_lanes().of(w.manager, [w.ranks[0].session])
    lane.put(None)
    assert lane.worker is not None
    lane.worker.join(10)
    assert not lane.worker.is_alive()


def test_managers_are_told_apart(world: Any) -> None:
    w = world("lan")
    assert engines.session_of(w.manager) == "p" and engines.name_of(w.manager) == "nixl"
    other = SimpleNamespace(get_session_id=lambda: "host:1")
    assert engines.session_of(other) == "host:1" and engines.name_of(other) == "mooncake"


@pytest.mark.parametrize(
    ("there", "held", "words"), [(False, None, "pip install nixl"), (True, "30", "unset it"), (True, None, "")]
)
def test_what_nixl_needs(monkeypatch: pytest.MonkeyPatch, there: bool, held: str | None, words: str) -> None:
    monkeypatch.setattr(server_args.importlib.util, "find_spec", lambda name: there or None)
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
    monkeypatch.setenv(name, held or "")
    if held is None:
        monkeypatch.delenv(name)
    server_args.prepare_nixl(SimpleNamespace(disaggregation_transfer_backend="mooncake"))
    args = SimpleNamespace(disaggregation_transfer_backend="nixl")
    if not words:
        server_args.prepare_nixl(args)
        assert float(os.environ[name]) > 900
        return
    with pytest.raises(ConfigError, match=words):
        server_args.prepare_nixl(args)
