"""KV streams over loopback sockets: what never lands, and what happens when a connection breaks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from wan_pair import LAYERS, LONG, PAGE, QUICK, SIZE, Pair, shuffled, wait_for

from sglang_pdd.metrics import Counters
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.tls import Identity

# --- what never lands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
def test_after_a_cancellation_nothing_is_written(make_pair: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make_pair(identities=identities, rate=16e6)
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: len(pair.landed) >= 3)
    before = time.monotonic()
    pair.peer.cancel(1)
    assert ticket.wait(LONG) == "cancelled"
    assert time.monotonic() - before < 0.5
    pair.scribble()
    assert pair.peer.settled(1)
    pair.assert_scribbled()
    assert pair.peer.submit(1, pair.pages([(0, 0)])).wait(1) == "failed"
    pair.receiver.open(2)
    assert pair.peer.submit(2, pair.pages([(1, 1)])).wait(LONG) == "landed"


def test_pages_that_are_used_again_at_once_have_not_landed(make_pair: Callable[..., Pair]) -> None:
    """The sender's owner puts something else into its pages when the room is cancelled, in the midst of a frame."""
    pair = make_pair(relayed=True, tuning=replace(QUICK, streams=1, unsent=64 << 10))
    assert pair.relay is not None
    pages = shuffled(1000)
    for room in range(5):
        pair.receiver.open(room)
        before, landed = [bytes(layer) for layer in pair.near], len(pair.landed)
        ticket = pair.peer.submit(room, pair.pages(pages), last=True)
        wait_for(lambda: len(pair.landed) > landed + 2)  # noqa: B023
        pair.relay.hold(True)
        time.sleep(0.05)  # the next frame has begun, there and here
        pair.peer.cancel(room)
        for layer in pair.near:
            layer[:] = os.urandom(SIZE)
        pair.relay.hold(False)
        assert ticket.wait(LONG) == "cancelled"
        (whole,) = pair.receiver.pages(room).values()
        assert 0 < whole < len(pages)
        for near, far in pages[:whole]:
            for old, new in zip(before, pair.far, strict=True):
                assert old[near * PAGE : (near + 1) * PAGE] == new[far * PAGE : (far + 1) * PAGE]


def test_a_closed_room_is_quiet_at_once(make_pair: Callable[..., Pair]) -> None:
    """The receiver's owner needs no word from the sender to use its pages again."""
    pair = make_pair(rate=16e6)
    for attempt in range(5):
        pair.receiver.open(attempt)
        ticket = pair.peer.submit(attempt, pair.pages(shuffled(1000)), last=True)
        wait_for(lambda: pair.landed and pair.landed[-1].room == attempt)  # noqa: B023
        if not pair.receiver.close(attempt):
            assert pair.receiver.wait_quiet(attempt, 1.0)
        pair.scribble()
        pair.assert_scribbled(0.1)
        assert ticket.wait(LONG) == "refused"


def test_a_room_is_quiet_soon_even_if_its_sender_hangs(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(relayed=True, tuning=replace(QUICK, progress_s=5.0, streams=1))
    pair.receiver.open(1)
    pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    assert pair.relay is not None
    pair.relay.hold(True)  # most likely in the middle of a frame
    pair.receiver.close(1)
    assert pair.receiver.wait_quiet(1, 1.0)
    pair.scribble()
    pair.relay.hold(False)
    pair.assert_scribbled()


def test_a_cancellation_before_anything_was_sent(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(rate=1e6)
    for room in (1, 2):
        pair.receiver.open(room)
    pair.peer.submit(1, pair.pages(shuffled(10)), last=True)
    ticket = pair.peer.submit(2, pair.pages(shuffled(1000)), last=True)
    pair.peer.cancel(2)
    assert ticket.wait(1) == "cancelled"
    pair.peer.cancel(3)  # before it was submitted
    assert pair.peer.submit(3, pair.pages([(1, 1)])).wait(1) == "failed"


def test_a_room_that_is_opened_again_begins_anew(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    for life in range(3):
        pair.scribble()
        pair.receiver.open(1)
        assert pair.receiver.pages(1) == {}
        pair.peer.open(1)
        if life == 1:
            pair.peer.cancel(1)
            continue
        pages = shuffled(20, life)
        tickets = [pair.peer.submit(1, pair.pages(pages[:10])), pair.peer.submit(1, pair.pages(pages[10:]), last=True)]
        assert [ticket.wait(LONG) for ticket in tickets] == ["landed", "landed"]
        assert list(pair.receiver.pages(1).values()) == [20]
        assert pair.receiver.close(1)


# --- what breaks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
def test_a_broken_transfer_is_resumed(make_pair: Callable[..., Pair], folders: Path, tls: bool) -> None:
    identities = (Identity(folders / "p"), Identity(folders / "md")) if tls else (None, None)
    pair = make_pair(identities=identities, relayed=True, rate=16e6)
    assert pair.relay is not None
    pages = shuffled(1000)
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(pages), last=True)
    for n in (3, 12, 24):
        wait_for(lambda: len(pair.landed) >= n)  # noqa: B023
        pair.relay.cut()
    assert ticket.wait(LONG) == "landed"
    pair.check(pages)
    snapshot = pair.counters.snapshot()
    assert sum(n for name, n in snapshot.items() if name.startswith("stream.reconnects")) >= 3
    assert sum(n for name, n in snapshot.items() if name.startswith("stream.retransmitted")) >= 1
    assert sum(each.stop - each.start for each in pair.landed) == 1000 * PAGE * LAYERS  # each byte was written once


def test_a_connection_without_progress_is_made_anew(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(relayed=True, tuning=replace(QUICK, progress_s=0.4))
    assert pair.relay is not None
    pages = shuffled(1000)
    pair.receiver.open(1)
    wait_for(lambda: pair.peer.any_up)
    pair.relay.hold(True)
    ticket = pair.peer.submit(1, pair.pages(pages), last=True)
    assert ticket.wait(0.2) is None
    wait_for(lambda: any(name.startswith("stream.reconnects") for name in pair.counters.snapshot()))
    pair.relay.cut()
    pair.relay.hold(False)
    assert ticket.wait(LONG) == "landed"
    pair.check(pages)


def test_an_unreachable_peer_fails_its_transfers_and_recovers(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(relayed=True, rate=8e6, tuning=replace(QUICK, give_up_s=0.5))
    assert pair.relay is not None
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    pair.relay.refusing = True
    pair.relay.cut()
    assert ticket.wait(LONG) == "failed" and "cannot be reached" in ticket.reason
    pair.relay.refusing = False
    pair.receiver.close(1)
    pair.scribble()
    pair.receiver.open(2)
    wait_for(lambda: pair.peer.any_up)
    assert pair.peer.submit(2, pair.pages([(1, 1)]), last=True).wait(LONG) == "landed"
    assert pair.far[0][PAGE : 2 * PAGE] == pair.near[0][PAGE : 2 * PAGE]


def test_a_cancellation_survives_a_broken_connection(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(relayed=True, rate=8e6)
    assert pair.relay is not None
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    pair.relay.hold(True)
    pair.peer.cancel(1)
    pair.relay.cut()
    pair.relay.hold(False)
    assert ticket.wait(LONG) == "cancelled"
    pair.scribble()
    pair.assert_scribbled()


def test_a_receiver_that_dies_and_another_life(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(rate=8e6, tuning=replace(QUICK, give_up_s=0.5))
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    wait_for(lambda: pair.landed)
    pair.receiver.shutdown()
    pair.scribble()
    assert ticket.wait(LONG) == "failed"
    pair.assert_scribbled(0.1)
    old, pair.receiver = pair.peer, Receiver(pair.targets, Counters(), tuning=QUICK)
    pair.address = pair.receiver.listen("127.0.0.1")
    assert pair.connect() is not old
    pair.receiver.open(1)
    assert pair.connect().submit(1, pair.pages([(3, 3)])).wait(LONG) == "landed"


def test_dropping_a_peer_ends_its_tickets(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(rate=1e6)
    pair.receiver.open(1)
    ticket = pair.peer.submit(1, pair.pages(shuffled(1000)), last=True)
    pair.sender.drop("md")
    assert ticket.wait(0) == "failed"
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(0) == "failed"


def test_idle_streams_stay(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(tuning=replace(QUICK, idle_s=0.1))
    wait_for(lambda: pair.peer.any_up)
    time.sleep(0.7)
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "landed"
    assert not [name for name in pair.counters.snapshot() if "reconnects" in name]


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_pages_are_whole_or_untouched(make_pair: Callable[..., Pair], seed: int) -> None:
    """Rooms with pages of their own, while connections break and hang and rooms are cancelled and closed at random."""
    pair = make_pair(relayed=True, rate=40e6, tuning=replace(QUICK, progress_s=1.0))
    assert pair.relay is not None
    rng = random.Random(seed)
    rooms, each = 24, 40
    sources = rng.sample(range(SIZE // PAGE), rooms * each)
    targets = rng.sample(range(SIZE // PAGE), rooms * each)
    pages = [list(zip(sources[r * each :][:each], targets[r * each :][:each], strict=True)) for r in range(rooms)]
    tickets, closed = {}, set()

    def scribble(room: int) -> None:
        assert pair.receiver.wait_quiet(room)
        scribble_all(pair, pages[room])
        closed.add(room)

    for room in range(rooms):
        pair.receiver.open(room)
        tickets[room] = pair.peer.submit(room, pair.pages(pages[room]), last=True)
        time.sleep(rng.random() * 0.03)
        victim, dice = rng.randrange(room + 1), rng.random()
        if dice < 0.2:
            pair.relay.cut()
        elif dice < 0.3:
            pair.relay.hold(True)
            time.sleep(0.05)
            pair.relay.hold(False)
        elif dice < 0.5:
            pair.peer.cancel(victim)
        elif dice < 0.7 and tickets[victim].ending is None:
            pair.receiver.close(victim)
            scribble(victim)
    for room, ticket in tickets.items():
        ending = ticket.wait(LONG)
        assert ending in ("landed", "cancelled", "refused")
        if ending == "cancelled" and room not in closed:
            scribble_all(pair, pages[room])  # the acknowledgement alone must do
            closed.add(room)
    time.sleep(0.2)
    for room in range(rooms):
        for near, far in zip(pair.near, pair.far, strict=True):
            for a, b in pages[room]:
                wanted = b"\xee" * PAGE if room in closed else near[a * PAGE : (a + 1) * PAGE]
                assert far[b * PAGE : (b + 1) * PAGE] == wanted


def scribble_all(pair: Pair, pages: list[tuple[int, int]]) -> None:
    for far in pair.far:
        for _, b in pages:
            far[b * PAGE : (b + 1) * PAGE] = b"\xee" * PAGE
