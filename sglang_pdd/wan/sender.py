"""`Sender`: all peers of one process, and what they share: the schedule, the pace, the lock."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

from sglang_pdd.metrics import Counters, LogLimit
from sglang_pdd.wan.peer import Peer
from sglang_pdd.wan.regions import Memory
from sglang_pdd.wan.schedule import Pace, Schedule
from sglang_pdd.wan.sockets import Tuning
from sglang_pdd.wan.tls import Identity

_log = logging.getLogger(__name__)


class Sender:
    """All peers of one process. Methods may be called by any thread.

    Args:
        node: this node's id.
        memory: what may be read.
        rate: bytes/s of payload to all peers together; None: no limit.
        landed: called from a stream's thread with (room, bytes, seconds since they were sent) for every frame that the
            peer has; must be quick.
    """

    def __init__(
        self,
        node: str,
        memory: Memory,
        counters: Counters,
        *,
        identity: Identity | None = None,
        tuning: Tuning | None = None,
        rate: float | None = None,
        landed: Callable[[int, int, float], None] = lambda room, size, seconds: None,
    ) -> None:
        self.node = node
        self.memory = memory
        self.counters = counters
        self.identity = identity
        self.tuning = tuning or Tuning()
        self.landed = landed
        self.pace = None
        if rate is not None:
            self.pace = Pace(rate)
            self.tuning = self.tuning.paced(rate).fewer(rate)
        self.session = random.SystemRandom().getrandbits(64)
        self.limit = LogLimit(_log)
        self.schedule = Schedule()
        self.change = threading.Condition()  # guards the schedule and all peers
        self._peers: dict[str, Peer] = {}

    def peer(self, name: str, address: tuple[str, int], token: bytes, bases: Sequence[int]) -> Peer:
        """The peer rank that listens at this address. Streams to it are made at once, and kept.

        Naming it again changes nothing, unless it has been started anew: then what was on its way has failed.

        Args:
            token: the receiver's.
            bases: where its regions are, in its own numbering, as its engine has registered them.
        """
        with self.change:
            known = self._peers.get(name)
            if known is not None and (known.address, known.token) == (address, token):
                return known
            fresh = self._peers[name] = Peer(self, name, address, token, bases)
        if known is not None:
            known.close(wait=False)
        fresh.start()
        return fresh

    def drop(self, name: str, *, wait: bool = True) -> None:
        """Forget a peer; what was on its way has failed. ``wait``: for its threads to end."""
        with self.change:
            known = self._peers.pop(name, None)
        if known is not None:
            known.close(wait=wait)

    def shutdown(self) -> None:
        """Close all peers. Idempotent."""
        for name in list(self._peers):
            self.drop(name)
