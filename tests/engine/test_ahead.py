"""P's share in MD's cache: what a follower waits for, and how well MD keeps up."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pdd.actions import Follow, OpenRelay
from sglang_pdd.metrics import Counters
from sglang_pdd.patches import followers, prefill
from sglang_pdd.patches.followers import Followers
from sglang_pdd.patches.prefill import PrefillSeam
from sglang_pdd.patches.unwanted import Unwanted
from sglang_pdd.prefill import Job
from sglang_pdd.timeline import Timeline

PAGE = 4


SCHEDULER = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE))


def request(room: int, ids: list[int], known: int, sent: int = 0, to: str = "md", **fields: Any) -> Any:
    """A request of which MD says that it has the first ``known`` tokens; up to ``sent`` the link has been given."""
    key = {"extra_key": None, "cache_salt": None, **fields}
    return SimpleNamespace(
        bootstrap_room=room,
        origin_input_ids=array("q", ids),
        disagg_decode_prefix_len=known,
        start_send_idx=max(sent, known),
        to=(to,),
        **key,
    )


def ahead(follower: Any, *others: Any) -> int:
    requests = {each.bootstrap_room: each for each in (follower, *others)}
    return sum(Followers(SCHEDULER, requests, lambda room: requests[room].to).leaders(follower).values())


SHARED = list(range(100, 140))


def test_a_follower_waits_for_what_its_leader_has_yet_to_send() -> None:
    follower = request(2, [*SHARED, 1, 2], 40)
    assert ahead(follower, request(1, [*SHARED, 9], 0)) == 41
    assert ahead(follower, request(1, [*SHARED, 9], 0, sent=30)) == 11
    assert ahead(follower, request(1, [*SHARED, 9], 8, sent=8)) == 33
    assert ahead(follower) == 0


def test_and_for_nothing_else() -> None:
    follower = request(2, [*SHARED, 1, 2], 40)
    assert ahead(follower, request(1, [0, *SHARED], 0)) == 0, "another prompt"
    assert ahead(follower, request(1, [*SHARED, 9], 0, to="other")) == 0, "another MD"
    assert ahead(follower, request(1, [*SHARED, 9], 0, extra_key="lora")) == 0, "another namespace"
    assert ahead(request(2, [*SHARED, 1], 0), request(1, [*SHARED, 9], 0)) == 0, "it fetches all itself"
    assert ahead(follower, request(1, [*SHARED, 9, 9], 40)) == 0, "a follower itself"


class Node:
    """P on one rank whose links take a millisecond a token; ``jobs``: how its state machine is asked, and in how many
    milliseconds the KV is to land."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, by_stream: bool = True) -> None:
        self.jobs: list[tuple[str, float]] = []
        self.urged: list[tuple[int, int]] = []
        self.together: list[int] = []
        monkeypatch.setattr(prefill, "get_parallel", lambda: SimpleNamespace(tp_size=1))
        monkeypatch.setattr(prefill, "request_of", lambda req: None)
        monkeypatch.setattr(prefill, "obstacle", lambda req: None)
        self.reqs: dict[int, Any] = {}
        self.seam: Any = object.__new__(PrefillSeam)
        made = self.seam
        made._requests, made._relayed, made._unplanned, made._bytes_per_token = {}, set(), set(), 1.0
        made._early, made._queued = set(), set()
        made.scheduler = SimpleNamespace(chunked_prefill_size=None, max_prefill_tokens=100)
        made._sessions_of = lambda room: self.reqs[room].to if room in self.reqs else ()
        made.node, made.timeline, made.counters = object(), Timeline(None, "prefill", ""), Counters()
        made.followers = Followers(SCHEDULER, made._requests, made._sessions_of)
        made.unwanted = Unwanted(None, by_stream, made.counters, made.timeline)
        made.machine = SimpleNamespace(bootstrapped=self._asked("new"), reconsidered=self._asked("again"))
        made.do = lambda actions: None
        made.fanout = SimpleNamespace(open=lambda req, relay_room: None)
        streams = SimpleNamespace(
            open=self._opened,
            close=lambda room: None,
            landing_ms=lambda room, size: float(size),
            urge=lambda room, size: self.urged.append((room, size)),
        )
        made._streams = streams if by_stream else None
        made._lanes = SimpleNamespace(link=lambda sessions: SimpleNamespace(landing_ms=float), forget=lambda room: None)

    def _opened(self, room: int, size: int, leaders: dict[int, int], together: int) -> float:
        self.together.append(together)
        return float(size)

    def _asked(self, how: str) -> Any:
        def asked(job: Job) -> list[Any]:
            self.jobs.append((how, job.landing_ms))
            return []

        return asked

    @property
    def waiting(self) -> set[int]:
        return {room for room, req in self.reqs.items() if self.seam.followers.waits(req)}

    def come(self, req: Any) -> None:
        req.rid = "r"
        self.reqs[req.bootstrap_room] = req
        self.seam.bootstrapped(req)


def test_what_is_prefilled_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.seam.unwanted.planned = lambda batch: None
    for room, tokens in enumerate((30, 20, 40)):
        node.come(request(room, [room] * tokens, 0))
    assert node.together == [0, 30, 50]
    node.seam.planned(None)
    node.seam.planned(SimpleNamespace(reqs=[node.reqs[0], node.reqs[1]]))  # what SGLang has begun is apart
    node.come(request(3, [3] * 10, 0))
    node.come(request(4, [4] * 70, 0))
    node.seam.released(node.reqs[2])
    node.seam.scheduler.chunked_prefill_size = 75
    node.come(request(5, [5] * 20, 0))
    node.come(request(6, [6] * 80, 0))
    assert node.together[3:] == [40, 30, 55, 0], "no more than a pass takes"


@pytest.mark.parametrize("by_stream", [True, False])
def test_what_comes_from_another_prefill_is_waited_for_too(monkeypatch: pytest.MonkeyPatch, by_stream: bool) -> None:
    node = Node(monkeypatch, by_stream)
    node.seam.run(Follow(2, ("md",), 2, ((1, 40), (7, 3))))
    node.come(request(2, [*SHARED, 1, 2], 40))
    assert node.jobs == [("new", 43.0)] and node.waiting == {2}
    node.come(request(3, [7, *SHARED, 4], 40))
    assert node.jobs[1:] == [("new", 2.0)]
    node.seam.run(Follow(3, ("md",), 2, ((8, 39),)))
    assert node.jobs[2:] == [("again", 39.0)] and node.waiting == {2, 3}
    node.seam.run(OpenRelay(3, 33))
    node.seam.run(Follow(3, ("md",), 2, ((9, 39),)))
    node.seam.run(Follow(2, ("another",), 1, ((9, 39),)))
    assert len(node.jobs) == 3, "one has a relay, the other one is not this main decode's"
    node.come(request(2, [*SHARED, 1, 2], 40))
    assert node.jobs[3:] == [("new", 2.0)], "what was said of a request is said of no other one with its room"


def test_a_word_of_another_main_decode_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.seam.run(Follow(2, ("another",), 2, ((1, 40),)))
    node.come(request(2, [*SHARED, 1, 2], 40))
    assert node.jobs == [("new", 2.0)]


def test_a_leader_is_as_urgent_as_another_prefills_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.come(request(1, [*SHARED, 9], 0))
    node.come(request(5, [7, 8, 9, 7, 8], 0))
    node.seam.unwanted.rooms = {1, 5}
    node.seam.run(Follow(2, ("md",), 4, ((1, 40),)))
    node.seam.run(Follow(6, ("another",), 4, ((5, 5),)))
    assert node.urged == [(1, 4)] and node.seam.unwanted.rooms == {5}
    assert [how for how, _ in node.jobs] == ["new", "new"]


def test_words_about_requests_that_never_come_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    for room in range(followers.REMEMBERED + 5):
        node.seam.run(Follow(room, ("md",), 1, ((9999, 7),)))
    node.come(request(4, [1, 2], 0))
    node.come(request(5, [1, 2], 0))
    assert [landing_ms for _, landing_ms in node.jobs] == [2.0, 7.0] and node.waiting == {5}


def test_what_main_decode_missed_by_hit_rate() -> None:
    one: Any = object.__new__(PrefillSeam)
    one.scheduler, one.counters = SCHEDULER, Counters()
    for hit, known in ((0, 0), (912, 800), (996, 992)):
        one._count_hit(
            SimpleNamespace(rid="r", origin_input_ids=range(1000), cached_tokens=hit, disagg_decode_prefix_len=known)
        )
    counters = one.counters.snapshot()
    assert {k: v for k, v in counters.items() if k.startswith("drc.missed")} == {
        "drc.missed{bin=0-90}": 0,
        "drc.missed{bin=90-95}": 112,
        "drc.missed{bin=full}": 4,
    }
    assert counters["drc.prompt{bin=full}"] == 1000 and counters["drc.requests{bin=0-90}"] == 1
