"""The schedule, by simulation: a world of links in which a frame takes its bytes over the link's bandwidth."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pdd.policy import LinkEstimate
from sglang_pdd.wan.peer import Peer
from sglang_pdd.wan.plan import Load
from sglang_pdd.wan.schedule import (
    BURST_S,
    CROWD,
    HELP_S,
    PATIENCE,
    SMALL,
    SMALL_S,
    Frame,
    Lane,
    Link,
    Meter,
    Pace,
    Room,
    Schedule,
)

MB = 1_000_000
RATE = 100 * MB  # bytes/s of a simulated link


def loads(size: int, frame: int = MB) -> list[Load]:
    return [Load(at, min(frame, size - at), (), (), (), (), ()) for at in range(0, size, frame)]


@dataclass
class World:
    """Links that carry one frame at a time, and acknowledge it a round trip after it has left."""

    rtt: float = 0.02
    now: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    links: dict[Link, float] = field(default_factory=dict)  # -> bandwidth
    landed: dict[int, float] = field(default_factory=dict)  # room -> when all of it had
    sent: list[tuple[float, str, int, int]] = field(default_factory=list)  # when, link, room, bytes
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _busy: set[Link] = field(default_factory=set)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def link(self, name: str = "md", bandwidth: float = RATE, pace: Pace | None = None) -> Link:
        link = Link(name, pace, LinkEstimate(bandwidth), self.rtt)
        self.links[link] = bandwidth
        return link

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), what))

    def send(self, link: Link, room: int, size: int, promised: int = 0) -> Room:
        opened = self.schedule.open(link, room, size + promised, self.now)
        self.schedule.submit(opened, loads(size), self.now, last=not promised)
        self.kick(link)
        return opened

    def send_at(self, when: float, link: Link, room: int, size: int) -> None:
        self.at(when, lambda: void(self.send(link, room, size)))

    def run(self, until: float = 1e9) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = max(self.now, min(until, 1e8)) if until < 1e8 else self.now

    def kick(self, link: Link) -> None:
        if link in self._busy:
            return
        frame = self.schedule.next(link, self.now)
        if not isinstance(frame, Frame):
            if frame < float("inf"):
                self.at(self.now + frame + 1e-9, lambda: self.kick(link))
            return
        self._busy.add(link)
        size = frame.load.size
        self.sent.append((self.now, link.name, frame.room.id, size))
        self.at(self.now + size / self.links[link], lambda: self._left(link))
        self.at(self.now + size / self.links[link] + self.rtt, lambda: self._landed(frame))

    def _left(self, link: Link) -> None:
        self._busy.discard(link)
        self.kick(link)

    def _landed(self, frame: Frame) -> None:
        self.schedule.acknowledged(frame, self.now, landed=True)
        room = frame.room
        if not room.left and not room.flying:
            self.landed[room.id] = self.now - self.rtt / 2
            self.schedule.close(room)


def void(_: object) -> None:
    return None


# --- order --------------------------------------------------------------------------------------------------------


def test_the_shortest_goes_first_and_preempts_between_frames() -> None:
    world = World()
    link = world.link()
    world.send(link, 1, 100 * MB)
    world.send_at(0.2005, link, 2, 2 * MB)  # in the middle of a frame, which ends at 0.21
    world.run()
    assert world.landed[2] == pytest.approx(0.21 + 0.02 + 0.01)
    assert world.landed[1] == pytest.approx(1.02 + 0.01)


def test_what_is_promised_counts() -> None:
    world = World()
    link = world.link()
    world.send(link, 1, 10 * MB, promised=200 * MB)  # the first chunk of a long prompt
    world.send(link, 2, 20 * MB)
    world.run()
    assert [room for _, _, room, _ in world.sent][1:21] == [2] * 20


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(20, 60))
def test_nothing_starves(arrivals: list[int], size: int) -> None:
    """A room is overtaken only by rooms that came within PATIENCE times its own need after it."""
    world = World()
    link = world.link()
    subject = size * MB
    world.send(link, 0, subject)
    bound = PATIENCE * subject / RATE
    for n, megabytes in enumerate(arrivals):  # a full link, long past the bound
        world.send_at(n * 0.4, link, n + 1, megabytes * MB)
    flood = itertools.count(1000)
    for tick in range(int((bound + 10) / 0.1)):
        world.at(tick * 0.1, lambda: void(world.send(link, next(flood), 10 * MB)))
    world.run(until=bound + 30)
    done = world.landed[0]
    for when, _, room, _ in world.sent:
        if when < done and room >= 1000:
            assert (room - 1000) * 0.1 <= bound + 0.11
    assert all(room in world.landed for room in range(len(arrivals) + 1))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 30)), min_size=1, max_size=20))
def test_the_link_never_idles_and_every_byte_goes_once(arrivals: list[tuple[float, int]]) -> None:
    world = World()
    link = world.link()
    for room, (when, megabytes) in enumerate(arrivals):
        world.send_at(when, link, room, megabytes * MB)
    world.run()
    assert sum(n for *_, n in world.sent) == sum(megabytes * MB for _, megabytes in arrivals)
    free, queued = 0.0, sorted((when, megabytes * MB / RATE) for when, megabytes in arrivals)
    for when, need in queued:  # any order without idling ends at the same time
        free = max(free, when) + need
    assert max(world.landed.values()) == pytest.approx(free + world.rtt / 2, abs=1e-6)
    assert not link.rooms and link.flying == 0


def test_high_hit_requests_are_unharmed_by_a_cold_one() -> None:
    alone, mixed = World(), World()
    for world in (alone, mixed):
        link = world.link()
        if world is mixed:
            world.send(link, 0, 400 * MB)
        for n in range(1, 101):
            world.send_at(n * 0.05, link, n, 2 * MB)
        world.run()
    worst = [max(world.landed[n] - n * 0.05 for n in range(1, 101)) for world in (alone, mixed)]
    assert worst[1] <= worst[0] + MB / RATE + 1e-6  # one frame's time
    assert mixed.landed[0] < 6.2


def test_followers_lend_their_urgency() -> None:
    world = World()
    link = world.link()
    leader = world.send(link, 1, 60 * MB)
    world.send(link, 2, 30 * MB)
    world.at(0.105, lambda: world.schedule.urge(leader, 1 * MB, world.now))
    world.run()
    assert [room for _, _, room, _ in world.sent] == [1] + [2] * 10 + [1] * 59 + [2] * 20


def test_a_less_urgent_follower_adds_nothing() -> None:
    schedule = Schedule()
    room = schedule.open(Link("md"), 1, 10 * MB, 0.0)
    schedule.urge(room, 5 * MB, 1.0)
    rank = room.rank(RATE)
    schedule.urge(room, 6 * MB, 2.0)
    schedule.urge(room, 5 * MB, 3.0)
    assert room.rank(RATE) == rank and len(room.claims) == 1


def test_the_background_waits_for_everybody_and_uses_what_is_left() -> None:
    world = World()
    link = world.link()
    world.schedule.demote(world.send(link, 1, 5 * MB))
    world.send(link, 2, 90 * MB)
    world.run()
    order = [room for _, _, room, _ in world.sent]
    assert order == [1] + [2] * 90 + [1] * 4  # the first frame had begun


def test_a_live_request_does_not_notice_the_background() -> None:
    """Not even one that came much later and is much larger; and a follower brings the room back."""
    alone, mixed, joined = World(), World(), World()
    for world in (alone, mixed, joined):
        link, pace = world.link(), Pace(RATE)
        other = world.link("other", pace=pace)
        late = world.link("late", pace=pace)
        for at in (link, late) if world is not alone else ():
            room = world.send(at, 1 if at is link else 2, 300 * MB)
            world.at(0.1, lambda world=world, room=room: world.schedule.demote(room))
            if world is joined:
                world.at(1.0, lambda world=world, room=room: world.schedule.urge(room, MB, world.now))
        for at, room in ((link, 3), (other, 4)):
            world.send_at(0.5, at, room, 400 * MB)
        world.run()
    for room in (3, 4):  # but for a frame, the burst after a pause, and what a link waits for another one of its pace
        assert mixed.landed[room] <= alone.landed[room] + 0.1
        assert mixed.landed[room] < mixed.landed[room - 2] and joined.landed[room - 2] < joined.landed[room]


# --- lanes --------------------------------------------------------------------------------------------------------


def test_a_lan_copy_never_waits_for_a_wan_copy() -> None:
    quiet, loud = World(), World()
    for world in (quiet, loud):
        lan = world.link("rld", 1000 * MB)
        if world is loud:
            wan = world.link("md", 10 * MB, Pace(10 * MB))
            for room in range(100, 120):
                world.send(wan, room, 50 * MB)
        for n in range(20):
            world.send_at(n * 0.01, lan, n, 30 * MB)
        world.run(until=5)
    assert [quiet.landed[n] for n in range(20)] == [loud.landed[n] for n in range(20)]


def test_links_have_queues_of_their_own() -> None:
    world = World()
    slow, fast = world.link("a", 1 * MB), world.link("b", 100 * MB)
    world.send(slow, 1, 20 * MB)
    world.send(fast, 2, 20 * MB)
    world.run()
    assert world.landed[2] == pytest.approx(0.21)
    assert world.landed[1] == pytest.approx(20.01)


@settings(max_examples=20, deadline=None)
@given(st.integers(5, 60), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=3, max_size=20))
def test_a_pace_holds_for_all_its_links_together(rate: int, rooms: list[tuple[int, int]]) -> None:
    pace = Pace(rate * MB)
    world = World()
    links = [world.link(name, pace=pace) for name in "abc"]
    for room, (link, megabytes) in enumerate(rooms):
        world.send(links[link], room, megabytes * MB)
    world.run()
    total = 0
    for when, _, _, n in world.sent:
        assert total <= rate * MB * when + pace.burst + 1
        total += n
    assert set(world.landed) == set(range(len(rooms)))
    last = max(world.landed.values())
    assert last <= (total - pace.burst) / (rate * MB) + MB / RATE * len(links) + 0.05 + total / RATE / 50


def test_on_a_shared_pace_the_shortest_goes_first_too() -> None:
    world = World()
    pace = Pace(20 * MB)
    bulk, small = world.link("a", pace=pace), world.link("b", pace=pace)
    world.send(bulk, 1, 100 * MB)
    for n in range(10):
        world.send_at(0.5 + n * 0.4, small, 10 + n, 4 * MB)
    world.run()
    for n in range(10):  # its own time at this pace, and the bulk's last frame
        assert world.landed[10 + n] - (0.5 + n * 0.4) <= 0.2 + MB / (20 * MB) + 0.05
    assert world.landed[1] == pytest.approx(140 / 20, abs=0.2)


def test_the_parts_of_a_request_for_several_ranks_go_level() -> None:
    """What has landed of one that is cut off is what all ranks have."""
    world, beside = World(), list[Room]()
    pace = Pace(20 * MB)
    links = [world.link(name, pace=pace) for name in "ab"]
    rooms = [world.schedule.open(link, n, 10 * MB, 0.0, beside) for n, link in enumerate(links)]
    for room in rooms:
        world.schedule.submit(room, loads(10 * MB), 0.0, last=True)
        world.kick(room.link)
    world.send_at(0.2, links[0], 7, 4 * MB)  # goes before both
    world.run(0.8)
    sent = [room for _, _, room, _ in world.sent]
    assert abs(sent.count(0) - sent.count(1)) <= 1 and sent.count(7) == 4 and len(sent) == pytest.approx(16, abs=2)
    assert beside == rooms
    world.run()
    assert not beside and world.landed[0] == pytest.approx(world.landed[1], abs=0.1)


def test_a_link_that_has_gone_is_not_waited_for() -> None:
    schedule, pace = Schedule(), Pace(10 * MB)
    dead, alive = Link("a", pace), Link("b", pace)
    schedule.submit(schedule.open(dead, 1, 0, 0.0), loads(2 * MB), 0.0, last=True)
    schedule.submit(schedule.open(alive, 2, 0, 0.0), loads(20 * MB), 0.0, last=True)
    assert isinstance(schedule.next(dead, 0.0), Frame)
    wait = schedule.next(dead, 0.0)
    assert isinstance(wait, float)
    assert schedule.next(alive, wait) == 0.001  # the other one would go first, and asks no more
    assert isinstance(schedule.next(alive, wait + 0.05), Frame)


def test_a_pace_refuses_nonsense() -> None:
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive"):
            Pace(rate)


# --- lanes --------------------------------------------------------------------------------------------------------


def room_of(frame: Frame | float) -> int | None:
    return frame.room.id if isinstance(frame, Frame) else None


def test_small_rooms_have_a_lane_of_their_own() -> None:
    schedule, link = Schedule(), Link("md", estimate=LinkEstimate(RATE))
    small = int(RATE * SMALL_S)
    for room, size in ((1, 50 * MB), (2, small), (3, small + 1)):
        schedule.submit(schedule.open(link, room, 0, 0.0), loads(size), 0.0, last=True)
    assert room_of(schedule.next(link, 0.0, "small")) == 2
    assert schedule.next(link, 0.0, "small") == float("inf")
    assert room_of(schedule.next(link, 0.0, "large")) == 3
    assert room_of(schedule.next(link, 0.0, "any")) == 1
    schedule.submit(schedule.open(link, 4, 0, 0.0), loads(small), 0.0, last=True)
    assert room_of(schedule.next(link, 0.0, "large")) == 1
    for room in range(5, 5 + CROWD):
        schedule.submit(schedule.open(link, room, 0, 0.0), loads(small), 0.0, last=True)
    assert room_of(schedule.next(link, 0.0, "large")) == 4, "more than one stream should carry alone"
    assert room_of(schedule.next(link, 0.0, "large")) == 1


def test_a_room_is_small_by_what_is_promised() -> None:
    schedule, link = Schedule(), Link("md", estimate=LinkEstimate(RATE))
    large, growing = schedule.open(link, 1, 50 * MB, 0.0), schedule.open(link, 2, 0, 0.0)
    schedule.submit(large, loads(1000), 0.0, last=False)
    schedule.submit(growing, loads(1000), 0.0, last=False)
    assert room_of(schedule.next(link, 0.0, "small")) == 2
    schedule.submit(growing, loads(MB), 0.0, last=True)
    assert schedule.next(link, 0.0, "small") == float("inf")


def test_small_rooms_do_not_wait_for_a_large_ones_debt() -> None:
    pace = Pace(10 * MB)
    schedule, link = Schedule(), Link("md", pace, LinkEstimate(10 * MB))
    for room, size in ((1, 50 * MB), *((each, SMALL) for each in range(2, 9))):
        schedule.submit(schedule.open(link, room, 0, 0.0), loads(size, 300_000), 0.0, last=True)
    assert room_of(schedule.next(link, 0.0, "any")) == 2
    assert room_of(schedule.next(link, 0.0, "any")) == 3
    wait = schedule.next(link, 0.0, "any")
    assert isinstance(wait, float) and 0 < wait < BURST_S
    taken = [room_of(schedule.next(link, 0.0, "small")) for _ in range(3)]
    assert taken == [4, 5, None], "but not without end"
    assert schedule.next(link, 0.0, "large") == pytest.approx((4 * SMALL - 0.02 * 10 * MB) / (10 * MB))


def test_what_nobody_waits_for_has_no_lane_of_its_own() -> None:
    schedule, link = Schedule(), Link("md", estimate=LinkEstimate(RATE))
    small = schedule.open(link, 1, 0, 0.0)
    schedule.submit(small, loads(1000), 0.0, last=True)
    schedule.submit(schedule.open(link, 2, 0, 0.0), loads(50 * MB), 0.0, last=True)
    schedule.demote(small)
    assert schedule.next(link, 0.0, "small") == float("inf")
    assert room_of(schedule.next(link, 0.0, "large")) == 2
    schedule.urge(small, 1000, 0.0)
    assert room_of(schedule.next(link, 0.0, "small")) == 1


def test_a_lane_that_hangs_is_helped() -> None:
    schedule, link = Schedule(), Link("md", estimate=LinkEstimate(RATE))
    schedule.submit(schedule.open(link, 1, 0, 0.0), loads(1000), 0.0, last=True)
    assert schedule.next(link, 0.0, "large") == HELP_S
    assert room_of(schedule.next(link, HELP_S, "large")) == 1
    assert schedule.next(link, HELP_S, "large") == float("inf")


@pytest.mark.parametrize(("express", "others", "lane"), [(True, False, "small"), (False, True, "large")])
def test_streams_that_are_up_carry_everything(express: bool, others: bool, lane: Lane) -> None:
    peer = object.__new__(Peer)
    peer._schedule, peer.link, peer._rooms = Schedule(), Link("md", estimate=LinkEstimate(RATE)), {}
    peer._streams = [SimpleNamespace(up=up) for up in (express, others, False)]  # type: ignore[misc]
    peer._express = peer._streams[0]
    for room, size in ((1, 1000), (2, 50 * MB)):
        known = peer._room(room, 0)
        peer._schedule.submit(known.room, loads(size), 0.0, last=True)
    assert {room_of(peer.next(0.0, lane)), room_of(peer.next(0.0, lane))} == {1, 2}


# --- cancellation and loss ----------------------------------------------------------------------------------------


def test_a_cancelled_room_frees_the_link_within_a_frame() -> None:
    world = World()
    link = world.link()
    big = world.send(link, 1, 500 * MB)
    world.send_at(0.5, link, 2, 499 * MB)
    world.at(1.0, lambda: void(world.schedule.cancel(big)))
    world.run(until=3)
    assert max(when for when, _, room, _ in world.sent if room == 1) <= 1.0
    second = [when for when, _, room, _ in world.sent if room == 2]
    assert second[0] <= 1.0 + MB / RATE + 1e-6
    assert big.left == 0


def test_lost_frames_go_again_first_and_in_order() -> None:
    schedule, link = Schedule(), Link("md")
    room = schedule.open(link, 1, 5 * MB, 0.0)
    part = schedule.submit(room, loads(5 * MB), 0.0, last=True)
    taken = [schedule.next(link, 0.0) for _ in range(3)]
    frames = [frame for frame in taken if isinstance(frame, Frame)]
    schedule.acknowledged(frames[1], 0.1, landed=True)
    assert schedule.lost([frames[2], frames[0]]) == 2
    again = [schedule.next(link, 0.2) for _ in range(5)]
    assert [f.load.position // MB for f in again if isinstance(f, Frame)] == [0, 2, 3, 4]
    assert part.landed == MB and room.flying == 4 * MB and room.left == 0
    schedule.cancel(room)
    assert schedule.lost([f for f in again if isinstance(f, Frame)]) == 0 and room.flying == 0


# --- the future ---------------------------------------------------------------------------------------------------


def test_the_landing_counts_only_what_goes_before() -> None:
    world = World()
    link = world.link()
    schedule = world.schedule
    assert schedule.landing(link, 10 * MB, 0.0) == pytest.approx(0.11)
    schedule.open(link, 1, 100 * MB, 0.0)
    assert schedule.landing(link, 10 * MB, 0.0) == pytest.approx(0.11)  # overtakes it
    assert schedule.landing(link, 200 * MB, 0.0) == pytest.approx(3.01)  # does not
    assert schedule.landing(link, 10 * MB, 30.0) == pytest.approx(1.11)  # it has aged
    schedule.demote(link.rooms[1])
    assert schedule.landing(link, 200 * MB, 0.0) == pytest.approx(2.01)


def test_a_paced_link_lands_at_its_pace() -> None:
    world = World()
    assert world.schedule.landing(world.link(pace=Pace(10 * MB)), 10 * MB, 0.0) == pytest.approx(1.01)


def test_what_prefill_has_yet_to_make_goes_while_it_makes_it() -> None:
    world = World()
    link, schedule = world.link(), world.schedule
    rooms = [schedule.open(link, n, 50 * MB, 0.0) for n in range(4)]
    assert schedule.landing(link, 50 * MB, 0.0) == pytest.approx(2.51), "how fast prefill is is not known yet"
    schedule.submit(rooms[0], loads(50 * MB), 1.0, last=True)
    assert link.supply.rate == 50 * MB
    assert schedule.landing(link, 50 * MB, 1.0) == pytest.approx(2.01), "all of them may come at once"
    assert schedule.landing(link, 50 * MB, 1.0, together=0) == pytest.approx(0.51), "nothing is left of the others"
    link.estimate = LinkEstimate(25 * MB)  # each takes two seconds of the link, and one of prefill
    assert schedule.landing(link, 50 * MB, 1.0, together=0) == pytest.approx((4 * 2 - 4) + 2.01)
    assert schedule.landing(link, 0, 1.0, room=rooms[1], together=0) == pytest.approx((3 * 2 - 3) + 2.01)
    assert schedule.landing(link, 0, 1.0, room=rooms[0]) == pytest.approx(8.01), "it is all there, and is overtaken"


@pytest.mark.parametrize(("together", "seconds"), [(0, 0.135), (37_500_000, 0.51), (1e12, 1.01)])
def test_of_what_one_pass_makes_nothing_goes_before_its_end(together: float, seconds: float) -> None:
    link = Link("md", estimate=LinkEstimate(RATE), rtt=0.02)
    link.supply.promised(0.0)
    link.supply.made(RATE, 1.0, more=False)
    for n in range(7):
        Schedule().open(link, n, 12_500_000, 2.0)
    assert Schedule().landing(link, 12_500_000, 2.0, together=together) == pytest.approx(seconds)


def test_a_standstill_of_prefill_says_nothing_about_its_speed() -> None:
    schedule, link = Schedule(), Link("md", estimate=LinkEstimate(RATE))
    for n in range(10):
        schedule.submit(schedule.open(link, n, 100 * MB, float(n)), [], n + 1.0, last=True)
    for room in list(link.rooms.values()):
        schedule.close(room)
    link.supply.promised(100.0)
    link.supply.made(20 * MB, 130.0, more=False)
    schedule.submit(schedule.open(link, 99, 500 * MB, 200.0), loads(500 * MB), 200.0, last=True)
    assert schedule.landing(link, 20 * MB, 260.0, together=0) > 4.5


def test_the_speed_of_prefill_leaves_out_its_pauses() -> None:
    schedule, link = Schedule(), Link("md")
    for start in (0.0, 100.0):
        one, two, three = (schedule.open(link, int(start) + n, 10 * MB, start) for n in range(3))
        schedule.submit(one, loads(4 * MB), start + 0.5, last=False)
        schedule.submit(one, loads(6 * MB), start + 1.0, last=False)
        schedule.submit(one, loads(1000), start + 1.0, last=True)  # was not promised
        schedule.submit(two, loads(10 * MB), start + 1.0, last=True)  # both in one batch
        schedule.cancel(three)
    assert link.supply.rate == pytest.approx(20 * MB, rel=0.03), "what is older counts less"
    schedule.open(link, 7, 0, 200.0)  # MD has all of it
    schedule.submit(schedule.open(link, 8, 20 * MB, 300.0), loads(MB), 301.0, last=True)  # less than was promised
    assert 10 * MB < link.supply.rate < 20 * MB
    schedule.close(schedule.open(link, 9, 20 * MB, 400.0))
    for n in range(30):
        schedule.submit(schedule.open(link, 10 + n, 20 * MB, 500.0 + n), loads(20 * MB), 501.0 + n, last=True)
    assert link.supply.rate == pytest.approx(20 * MB, rel=0.1), "nothing was made between 400 and 500"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(20, 500))
def test_predictions_hold_beside_a_prefill_that_goes_on(sizes: list[int], speed: int) -> None:
    """Of who is last in both orders."""
    sizes = [*sizes, max(sizes) + 1]
    world = World()
    link, schedule, own = world.link(), world.schedule, len(sizes) - 1
    link.supply.promised(0.0)
    link.supply.made(speed * MB, 1.0, more=False)
    prefilled = 0.0
    for n, size in enumerate(sizes):
        predicted = schedule.landing(link, size * MB, 0.0, together=0)
        schedule.open(link, n, size * MB, 0.0)
        prefilled += size / speed
        world.at(prefilled, lambda n=n, size=size: void(world.send(link, n, size * MB)))  # type: ignore[misc]
    world.run()
    assert world.landed[own] - prefilled == pytest.approx(predicted, abs=2 * MB / RATE)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_predictions_hold_when_nothing_else_comes(sizes: list[int]) -> None:
    world = World()
    link = world.link()
    rooms = [world.schedule.open(link, n, size * MB, 0.0) for n, size in enumerate(sizes)]
    for room, size in zip(rooms, sizes, strict=True):
        world.schedule.submit(room, loads(size * MB), 0.0, last=True)
    predicted = [world.schedule.landing(link, 0, 0.0, room=room) for room in rooms]
    world.kick(link)
    world.run()
    for n, seconds in enumerate(predicted):  # rooms of one size share the link frame by frame
        same = (sizes.count(sizes[n]) - 1) * sizes[n] * MB / RATE
        assert world.landed[n] == pytest.approx(seconds, abs=same + 2 * MB / RATE)


def test_the_meter_sees_the_link_and_not_the_round_trip() -> None:
    estimate = LinkEstimate()
    meter = Meter(estimate)
    rtt = 0.04
    for n in range(50):  # short transfers with pauses: 1 MB at 50 MB/s each
        start = n * 1.0
        meter.sent(start, True)
        meter.landed(MB, start + rtt + 0.02, rtt, True)
    assert estimate.bandwidth == pytest.approx(50 * MB, rel=0.01)


def test_the_meter_follows_a_long_transfer() -> None:
    estimate = LinkEstimate()
    meter = Meter(estimate)
    meter.sent(0.0, True)
    for n in range(1, 2000):
        meter.landed(MB, 0.02 + n * 0.01, 0.02, False)
        meter.sent(0.02 + n * 0.01, False)
    assert estimate.bandwidth == pytest.approx(100 * MB, rel=0.01)


def test_the_meter_ignores_what_says_nothing() -> None:
    estimate = LinkEstimate(7.0)
    meter = Meter(estimate)
    meter.landed(MB, 1.0, 0.0, True)  # never began
    meter.sent(2.0, True)
    meter.landed(100, 3.0, 0.0, True)  # a few bytes
    meter.sent(4.0, True)
    meter.landed(MB, 4.02, 0.02, True)  # no time at all
    assert estimate.bandwidth == 7.0
