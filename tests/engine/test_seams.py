"""Pieces of the seams that need SGLang's classes but no server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pdd.metrics import Counters
from sglang_pdd.patches import idle, logprobs, mooncake, sampling, streams
from sglang_pdd.patches import lanes as patches_lanes
from sglang_pdd.patches.idle import Bell
from sglang_pdd.patches.lanes import Lanes
from sglang_pdd.protocol import Ping, RelayOpen, Request, decode, encode
from sglang_pdd.transport import Endpoint


class Manager:
    """What a lane asks of SGLang's KV manager."""

    def __init__(self) -> None:
        self.request_status: dict[int, int] = {7: KVPoll.WaitingForInput}
        self.taken: list[Any] = []
        self.go_on = threading.Event()
        self.ended = threading.Event()

    def transfer_worker(self, queue: Any, executor: Any, staging: Any, index: int) -> None:
        while (chunk := queue.get()) is not None:
            self.taken.append(chunk)
            self.go_on.wait(10)
        self.ended.set()


def lane_in_use(rate: float | None, lan: bool = False) -> tuple[Lanes, Manager, list[tuple[int, int]]]:
    """A lane to session ``b:1`` whose worker has a chunk of room 7 in hand; what it reports as sent."""
    sent: list[tuple[int, int]] = []
    lanes = Lanes(rate, lambda session: lan, lambda room, size, seconds: sent.append((room, size)))
    manager = Manager()
    lane = lanes.of(manager, ["b:1"])
    lane.put(SimpleNamespace(room=7))
    end = time.monotonic() + 5
    while lane.in_hand is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return lanes, manager, sent


BLOCKS = [(1000, 9000, 100_000), (500_000, 700_000, 50_000)]


def test_wan_blocks_go_in_segments_and_cover_everything() -> None:
    lanes, _manager, sent = lane_in_use(rate=5e6)  # 100 kB in 20 ms
    calls: list[list[tuple[int, int, int]]] = []
    assert mooncake.transfer(lanes, lambda blocks: calls.append(blocks) or 0, "b:1", BLOCKS) == 0
    assert [sum(n for _, _, n in call) for call in calls] == [100_000, 50_000]
    covered = sorted((src, dst, n) for call in calls for src, dst, n in call)
    assert sum(n for _, _, n in covered) == 150_000 and covered[0][:2] == (1000, 9000)
    assert all(dst - src in (8000, 200_000) for src, dst, _ in covered)
    assert sent == [(7, 100_000), (7, 50_000)]


def test_a_cancelled_room_stops_within_a_segment_and_is_no_failure() -> None:
    lanes, manager, sent = lane_in_use(rate=5e6)

    def send(blocks: Any) -> int:
        manager.request_status[7] = KVPoll.Failed
        return 0

    assert mooncake.transfer(lanes, send, "b:1", BLOCKS) == 0  # anything else would blacklist the session
    assert sent == [(7, 100_000)]
    del manager.request_status[7]
    assert mooncake.transfer(lanes, send, "b:1", BLOCKS) == 0 and len(sent) == 1


def test_a_forgotten_room_is_no_backlog() -> None:
    lanes, manager, _ = lane_in_use(rate=5e6)
    lane = lanes.of(manager, ["b:1"])
    lane.queued(7, 100_000)
    lane.queued(8, 60_000)
    assert lanes.link(["b:1"]).backlog == 160_000
    lanes.forget(7)
    assert lanes.link(["b:1"]).backlog == 60_000
    lane.sent(7, 10_000, 0.1)  # its last segment was on the way
    assert lanes.link(["b:1"]).backlog == 60_000
    lane.sent(8, 10_000, 0.1)
    assert lanes.link(["b:1"]).backlog == 50_000


def test_an_error_of_the_engine_is_passed_on() -> None:
    lanes, _manager, sent = lane_in_use(rate=None)
    assert mooncake.transfer(lanes, lambda blocks: -1, "b:1", BLOCKS) == -1
    assert sent == [] and lanes.link(["b:1"]).backlog == 0


def test_a_lan_session_is_neither_cut_nor_paced() -> None:
    lanes, _manager, sent = lane_in_use(rate=1.0, lan=True)
    calls: list[Any] = []
    assert mooncake.transfer(lanes, lambda blocks: calls.append(blocks) or 0, "b:1", BLOCKS) == 0
    assert calls == [BLOCKS] and sent == []


def test_a_room_that_is_cleared_under_a_worker_is_over() -> None:
    def stock(manager: Manager, room: int) -> int:
        return manager.request_status[room]

    manager = Manager()
    with ThreadPoolExecutor(1) as worker:
        assert worker.submit(mooncake.check_status, stock, manager, 7).result() == KVPoll.WaitingForInput
        assert worker.submit(mooncake.check_status, stock, manager, 8).result() == KVPoll.Success
    with pytest.raises(KeyError):
        mooncake.check_status(stock, manager, 8)


def test_each_destination_has_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, manager, _ = lane_in_use(rate=None)
    manager.go_on.set()
    assert lanes.of(manager, ["b:1"]) is lanes.of(manager, ["b:1"])
    assert lanes.of(manager, ["c:1", "c:2"]) is lanes.of(manager, ["c:2", "c:1"]) is not lanes.of(manager, ["b:1"])
    monkeypatch.setattr(patches_lanes, "IDLE_LANE", -1.0)
    lanes.of(manager, ["d:1"])  # the others have been idle for too long
    assert manager.ended.wait(5)
    assert mooncake.transfer(lanes, lambda blocks: 0, "b:1", BLOCKS) == 0


def test_sampling_parameters_survive_the_wire() -> None:
    asked = SamplingParams(
        max_new_tokens=77, temperature=0.5, top_p=0.9, stop=["a", "b"], stop_token_ids=[3, 1], logit_bias={"5": 1.5}
    )
    asked.normalize(SimpleNamespace(encode=lambda text, **options: list(text)))
    message = RelayOpen(1, 2, "tcp://m:1", "", Request((1, 2), sampling.sampling_to_wire(asked)))
    got = decode(encode(message))
    assert isinstance(got, RelayOpen)
    params = sampling.sampling_from_wire(dict(got.request.sampling))
    for name in SamplingParams.__struct_fields__:
        assert getattr(params, name) == getattr(asked, name), name


@pytest.mark.parametrize("wire", [{"no_such_thing": 1}, {"temperature": "hot"}, {"max_new_tokens": [1]}])
def test_sampling_parameters_that_are_none_are_refused(wire: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"unknown sampling|Expected|expected|not supported"):
        sampling.sampling_from_wire(wire)


def test_logprobs_go_over_and_come_back() -> None:
    def request() -> Any:
        fields = ("output_token_logprobs_val", "output_token_logprobs_idx", "output_top_logprobs_val")
        state = {name: [] for name in (*fields, "output_top_logprobs_idx")}
        return SimpleNamespace(
            return_logprob=True, logprob=SimpleNamespace(**state, top_logprobs_num=2, token_ids_logprob=None)
        )

    source, target = request(), request()
    for i in range(3):
        source.logprob.output_token_logprobs_val.append(-float(i))
        source.logprob.output_token_logprobs_idx.append(10 + i)
        source.logprob.output_top_logprobs_val.append([-float(i), -2.0 - i])
        source.logprob.output_top_logprobs_idx.append([10 + i, 20 + i])
    carried = logprobs.output_logprobs(source, 1, 3)
    for i in range(2):
        logprobs.append_output_logprob(target, 11 + i, carried, i)
    for name in vars(source.logprob):
        value = getattr(source.logprob, name)
        assert getattr(target.logprob, name) == (value[1:3] if isinstance(value, list) else value), name


def test_messages_wake_a_sleeping_scheduler() -> None:
    sleeper = IdleSleeper(sockets=[])
    node, early, late = (Endpoint(name, None, Counters()) for name in ("node", "early", "late"))
    try:
        where = node.bind("tcp://127.0.0.1:0")
        Bell(sleeper.poller).watch(node)
        early.dial(where, "")
        early.send(where, Ping())
        assert sleeper.poller.poll(5000), "the ROUTER does not wake it"
        assert node.receive()
        other = late.bind("tcp://127.0.0.1:0")
        node.dial(other, "")  # a connection made while the scheduler is up
        node.send(other, Ping())
        assert late.poll(5000)
        late.receive()
        late.send("node", Ping())
        assert sleeper.poller.poll(5000), "a DEALER does not wake it"
        node.hangup(other)
        assert not sleeper.poller.poll(0), "a closed socket is still watched"
    finally:
        for endpoint in (node, early, late):
            endpoint.close()


def test_a_copy_that_ends_wakes_a_scheduler_that_awaits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rooms(CommonKVManager):
        def __init__(self) -> None:
            self.request_status, self.deferred_bootstrap = {7: KVPoll.WaitingForInput}, None

    bell = Bell(IdleSleeper(sockets=[]).poller)
    monkeypatch.setattr(idle, "LONGEST_MS", 5000)
    monkeypatch.setattr(idle, "bell", bell)

    def nap() -> float:
        begin = time.monotonic()
        idle.after_idle(None, None)
        return time.monotonic() - begin

    naps = [nap() for _ in range(9)]
    assert all(slept >= 0.9e-3 * 2**n for n, slept in enumerate(naps[:6])), naps
    rooms = Rooms()
    status = (CommonKVManager.update_status, rooms, 7, KVPoll.Success)
    worker = threading.Timer(0.05, streams.status_changed, status)
    worker.start()
    assert nap() < 0.4
    assert rooms.check_status(7) == KVPoll.Success
    worker.join()
    assert nap() < 0.1  # soon: what belongs to it may follow
    streams.status_changed(*status)
    streams.status_changed(*status)  # rings already
    nap()
    assert 0.9e-3 <= nap() < 0.1  # silent again
