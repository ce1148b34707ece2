"""P's side of the KV streams: SGLang's own worker, one for each room, hands its blocks to the transport.

SGLang's sending is left as it is, down to where it calls the transfer engine. A call there, in the thread of a room's
worker, only notes the blocks; once all layers of a chunk are known they are submitted together, and what waits for the
wire is the last submission of the last chunk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue

from sglang_pdd.patches import engines, idle
from sglang_pdd.protocol import Landing
from sglang_pdd.wan.frames import room_id
from sglang_pdd.wan.peer import Peer, Ticket
from sglang_pdd.wan.regions import BoundsError
from sglang_pdd.wan.schedule import Room
from sglang_pdd.wan.sender import Sender

logger = logging.getLogger(__name__)

REMEMBERED = 4096  # rooms that are over

_this_thread = threading.local()


class Superseded(BaseException):
    """Another request has taken the room's number. SGLang's worker must not catch this: whatever it then did or said
    would be about that request."""


class Lane(FastQueue):
    """SGLang's transfer queue of one room, and its worker.

    Args:
        peers: by engine session, the peer and the room's name there.
    """

    def __init__(self, manager: Any, room: int, peers: dict[str, tuple[Peer, int]]) -> None:
        super().__init__()
        self.manager = manager
        self.room = room
        self.peers = peers
        self._blocks: list[tuple[Sequence[int], ...]] = []  # noted and not submitted
        self._tickets: list[Ticket] = []
        self._complete = 0  # peers of which the last part is submitted
        self._worker: threading.Thread | None = None

    def begin(self, *, last: bool) -> None:
        """Work on what is queued; ``last``: nothing more will be."""
        if last:
            self.put(None)  # ends SGLang's worker
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=f"pdd-room-{self.room}", daemon=True)
            self._worker.start()

    def cancel(self) -> None:
        """Nothing more of this room is sent."""
        for peer, name in self.peers.values():
            peer.cancel(name)

    def note(self, *columns: Sequence[int]) -> None:
        """Source addresses, destination addresses and lengths of some blocks."""
        self._blocks.append(columns)

    def submit(self, session: str, *, last: bool) -> int:
        """Send what was noted. Returns at once, but with the last of all parts: then when everything has landed.

        Returns 0 also for a room that has failed, after saying so: an engine's error would make SGLang refuse the whole
        session, which has nothing to do with ours.

        Raises:
            Superseded: the room's number means another request by now.
        """
        self._check()
        noted, self._blocks = self._blocks, []
        peer, name = self.peers[session]
        table = np.concatenate([np.zeros((0, 3), np.int64), *(np.array(columns, np.int64).T for columns in noted)])
        try:
            self._tickets.append(peer.submit(name, table, last=last))
        except BoundsError as error:
            self._fail(f"{peer.name}: {error}")
            return 0
        self._complete += last
        if self._complete == len(self.peers):
            for ticket in self._tickets:
                ticket.wait()
        self._check()
        bad = next((ticket for ticket in self._tickets if ticket.ending not in (None, "landed")), None)
        if bad is not None:
            self._fail(bad.reason or str(bad.ending))
        return 0

    def _check(self) -> None:
        if self._superseded():
            raise Superseded(self.room)

    def _superseded(self) -> bool:
        return lane_of(self.room) is not self and not over(self.room)

    def _fail(self, reason: str) -> None:
        self.cancel()
        if self.manager.request_status.get(self.room, KVPoll.Failed) != KVPoll.Failed:
            self.manager.conclude_failure(bootstrap_room=self.room, failure_reason=f"KV stream: {reason}")

    def _work(self) -> None:
        _this_thread.lane = self
        try:
            engines.work(self.manager, self, _Inline())
        except Superseded:
            self.cancel()
        except Exception as error:
            logger.exception("PDD: room %d", self.room)
            if not self._superseded():
                self._fail(str(error))


class Streams:
    """All rooms of one prefill rank that go by stream."""

    def __init__(self, sender: Sender, manager: Any) -> None:
        self.sender = sender
        self.manager = manager
        self._landings: dict[str, Landing] = {}  # by engine session
        self._lanes: dict[int, Lane] = {}
        self._rooms: dict[int, int] = {}  # a room's name at a peer -> the room
        self._over: dict[int, None] = {}  # the last rooms that have ended

    def know(self, sessions: Sequence[str], landings: Sequence[Landing]) -> None:
        """KV for these sessions can go there; with no landings: they are gone."""
        for session in sessions:
            self._landings.pop(session, None)
        self._landings.update(zip(sessions, landings, strict=False))
        self._drop_unused(sessions)

    def open(self, room: int, size: int, leaders: Iterable[int] = (), together: int = 0) -> float | None:
        """A room whose metadata has come, and of which about ``size`` bytes will follow.

        Args:
            leaders: rooms that it waits for: they go as early as it would.
            together: bytes of others that are prefilled in the same pass, about.

        Returns the milliseconds from the end of its prefill until it will have landed; None: it goes by engine.
        """
        self.close(room)
        self._over.pop(room, None)
        infos = {s: info for s, info in self.manager.transfer_infos.get(room, {}).items() if not info.is_dummy}
        if not infos or not infos.keys() <= self._landings.keys() & self.manager.decode_kv_args_table.keys():
            return None
        engines.forgive(self.manager, infos)  # an engine's error, from before P knew this main decode, is none of ours
        peers = {}
        for session, info in infos.items():
            name = room_id(room, info.dst_kv_indices.tobytes(), info.dst_aux_index)
            peers[session] = self._peer(session), name
            self._rooms[name] = room
        share = self._share(size, len(infos))
        together = self._share(together, len(infos))
        landing_ms = max(peer.landing_ms(share, together=together) for peer, _ in peers.values())
        for lane in [self._lanes[leader] for leader in leaders if leader in self._lanes]:
            for peer, name in lane.peers.values():
                peer.urge(name, share)
                landing_ms = max(landing_ms, peer.landing_ms(room=name))
        beside: list[Room] = []
        for peer, name in peers.values():
            peer.open(name, share, beside)
        self._lanes[room] = Lane(self.manager, room, peers)
        return landing_ms

    def landing_ms(self, room: int, size: int) -> float | None:
        """Milliseconds, as in `open`, until ``size`` bytes more would land where this room goes; None: by engine."""
        peers = self._lanes[room].peers.values() if room in self._lanes else ()
        return max((peer.landing_ms(self._share(size, len(peers))) for peer, _ in peers), default=None)

    def lane(self, room: int) -> Lane | None:
        """None: it goes by engine."""
        return self._lanes.get(room)

    def room(self, name: int) -> int | None:
        """The room that has this name at a peer."""
        return self._rooms.get(name)

    def over(self, room: int) -> bool:
        """Has this room ended? MD counts on it that nothing more comes, by engine either."""
        return room in self._over

    def cancel(self, room: int) -> None:
        """From any thread."""
        if (lane := self._lanes.get(room)) is not None:
            lane.cancel()

    def urge(self, room: int, size: int) -> None:
        """Somebody waits for it who has ``size`` bytes of his own to come."""
        if (lane := self._lanes.get(room)) is not None:
            for peer, name in lane.peers.values():
                peer.urge(name, self._share(size, len(lane.peers)))

    def demote(self, room: int, demoted: bool) -> bool:
        """Nobody waits for it, or somebody does again. False: it does not go by stream, and keeps its place."""
        lane = self._lanes.get(room)
        for peer, name in lane.peers.values() if lane is not None else ():
            peer.demote(name, demoted)
        return lane is not None

    def close(self, room: int) -> None:
        """It is over, well or badly."""
        lane = self._lanes.pop(room, None)
        if lane is None:
            return
        lane.cancel()
        lane.put(None)  # if the last chunk has not come
        self._over[room] = None
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]
        for _, name in lane.peers.values():
            self._rooms.pop(name, None)
        self._drop_unused(lane.peers)

    def _share(self, size: int, ranks: int) -> int:
        """What one of so many ranks gets of ``size`` bytes."""
        return size if self.manager.is_mla_backend else size // ranks

    def _drop_unused(self, sessions: Iterable[str]) -> None:
        """Of main decodes that are gone, those with nothing on its way; the transport gives the others up by itself."""
        for session in sessions:
            if session not in self._landings and not any(session in lane.peers for lane in self._lanes.values()):
                self.sender.drop(session, wait=False)

    def _peer(self, session: str) -> Peer:
        landing, info = self._landings[session], self.manager.decode_kv_args_table[session]
        bases = [*info.dst_kv_ptrs, *info.dst_aux_ptrs]
        return self.sender.peer(session, (landing.host, landing.port), landing.token, bases)


streams: Streams | None = None  # of this process


class _Inline(Executor):
    """Runs what it is given at once: a lane must hear of a chunk's blocks in its own thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def lane_of(room: int) -> Lane | None:
    """The lane of a room that goes by stream."""
    return None if streams is None else streams.lane(room)


def over(room: int) -> bool:
    """Has this room gone by stream, and ended?"""
    return streams is not None and streams.over(room)


def lane_here() -> Lane | None:
    """The lane whose worker this thread is."""
    return getattr(_this_thread, "lane", None)


# --- hooks ------------------------------------------------------------------------------------------------------


def send_pages(original: Callable[..., int], manager: Any, mooncake_session_id: str, *args: Any, **kwargs: Any) -> int:
    """Around ``MooncakeKVManager.send_kvcache`` and ``send_kvcache_slice``."""
    status, lane = original(manager, mooncake_session_id, *args, **kwargs), lane_here()
    return status if lane is None or status != 0 else lane.submit(mooncake_session_id, last=False)


def send_metadata(original: Callable[..., int], manager: Any, req: Any, *args: Any) -> int:
    """Around ``MooncakeKVManager.send_aux``: the last of a room to one rank."""
    status, lane = original(manager, req, *args), lane_here()
    return status if lane is None or status != 0 else lane.submit(req.mooncake_session_id, last=True)


def status_changed(original: Callable[..., None], manager: Any, bootstrap_room: int, status: Any) -> None:
    """Around ``CommonKVManager.update_status``, from whichever thread: a room that fails frees the link now.

    First: as soon as the scheduler sees that it has failed it may put something else into its pages.
    """
    if status == KVPoll.Failed and streams is not None:
        streams.cancel(bootstrap_room)
    original(manager, bootstrap_room, status)
    idle.ring()
