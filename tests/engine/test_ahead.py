"""P's share in MD's cache: what a follower waits for, and how well MD keeps up."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from sglang_pdd.metrics import Counters
from sglang_pdd.patches.prefill import PrefillSeam

PAGE = 4


def seam(*requests: Any) -> Any:
    made = object.__new__(PrefillSeam)
    made.scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE))
    made._requests = {r.bootstrap_room: r for r in requests}
    made._sessions_of = lambda room: next(r.to for r in requests if r.bootstrap_room == room)  # type: ignore[method-assign]
    made.counters = Counters()
    return made


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
    return sum(seam(follower, *others)._leaders(follower, follower.to).values())


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


def test_what_main_decode_missed_by_hit_rate() -> None:
    one = seam()
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
