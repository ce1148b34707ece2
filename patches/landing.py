"""MD's side of the KV streams: which rooms may be written, and from when on their pages can be used for anything else.

A room opens before its metadata tells P where to write, and closes when its KV is taken over or given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_pdd.config import PddConfig, is_wildcard
from sglang_pdd.metrics import Counters
from sglang_pdd.patches import ingress
from sglang_pdd.protocol import Landing
from sglang_pdd.wan.frames import room_id
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.regions import Memory
from sglang_pdd.wan.tls import Identity

logger = logging.getLogger(__name__)


class Landings:
    """The open rooms of one rank. For the scheduler's thread."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        # bootstrap room -> its rooms at the receiver -> pages that each rank of P had brought when it was closed
        self._rooms: dict[int, dict[int, list[int] | None]] = {}

    def open(self, room: int, pages: bytes, aux_index: int) -> None:
        """Before P is told to write to these pages and this metadata slot."""
        name = room_id(room, pages, aux_index)
        self._rooms.setdefault(room, {})[name] = None
        self._receiver.open(name)

    def close(self, room: int) -> None:
        """Whatever has not begun will not be written."""
        known = self._rooms.get(room, {})
        for name in [name for name, pages in known.items() if pages is None]:
            known[name] = list(self._receiver.pages(name).values())
            self._receiver.close(name)

    def quiet(self, room: int) -> bool:
        """Is nothing being written for this closed room?"""
        return all(self._receiver.quiet(name) for name in self._rooms.get(room, ()))

    def senders(self, room: int) -> int:
        """How many ranks of P had begun to send by stream: those write to this room in no other way."""
        return min((len(pages or ()) for pages in self._rooms.get(room, {}).values()), default=0)

    def so_far(self, room: int) -> int:
        """How many pages of this open room have come by stream, about: ranks that have sent nothing are not counted."""
        names = [name for name, pages in self._rooms.get(room, {}).items() if pages is None]
        return min((pages for name in names for pages in self._receiver.pages(name).values()), default=0)

    def pages(self, room: int, senders: int) -> int:
        """How many pages of this room, from its first on, are whole: each of so many ranks of P has brought its part.

        Closes the room, so that none of them is written again.
        """
        self.close(room)
        brought = list(self._rooms.get(room, {}).values())
        if len(brought) != 1 or len(brought[0] or ()) != senders:
            return 0  # by engine, or in part; or the room's number was used twice
        return min(brought[0] or (), default=0)

    def end(self, room: int) -> None:
        """Its pages are about to be used for something else: wait until nothing is being written."""
        self.close(room)
        for name in self._rooms.pop(room, {}):
            if not self._receiver.wait_quiet(name):
                logger.error("PDD: room %d is still being written to", room)


def listen(memory: Memory, config: PddConfig, rank: int, counters: Counters) -> tuple[Receiver, Landing]:
    """Take streams for this rank's memory. Ends the process if that cannot be."""
    identity = Identity(config.keys) if config.keys else None
    receiver = Receiver(memory, counters, identity=identity, insecure=config.insecure)
    host = "0.0.0.0" if config.host in ("", "*") else config.host.strip("[]")
    port = config.wan_port + rank if config.wan_port is not None else 0
    try:
        host, port = receiver.listen(host, port)
    except (OSError, OverflowError) as error:
        raise SystemExit(f"sglang-pdd: cannot take KV streams at {host}:{port}: {error}") from None
    advertised = host if is_wildcard(config.advertise) else config.advertise.strip("[]")
    return receiver, Landing(advertised, port, receiver.token)


# --- hooks ------------------------------------------------------------------------------------------------------


def _landings() -> Landings | None:
    return getattr(ingress.seam, "landings", None)


def before_metadata(manager: Any, **said: Any) -> None:
    """Before an engine's ``build_receiver_metadata_message``."""
    if (landings := _landings()) is not None and not said["is_dummy"]:
        landings.open(said["bootstrap_room"], said["kv_indices"].tobytes(), said["aux_index"])


def release_safe(original: Callable[..., bool], manager: Any, bootstrap_room: int, required_acks: int) -> bool:
    """Around ``CommonKVManager.is_abort_release_safe``: may an aborted request's pages be used for something else?

    A rank of P that writes by stream has nothing to say about that; one that may use the engine must acknowledge.
    """
    landings = _landings()
    if landings is None:
        return original(manager, bootstrap_room, required_acks)
    landings.close(bootstrap_room)
    if not landings.quiet(bootstrap_room):
        return False
    return landings.senders(bootstrap_room) >= required_acks or original(manager, bootstrap_room, required_acks)
