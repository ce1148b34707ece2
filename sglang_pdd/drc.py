"""The decode-side cache, without I/O: prefixes whose KV is still on its way, and who waits for them.

A prompt is in MD's radix tree from the moment its transfer begins. A request that matches it there shares the pages
and fetches its own suffix only: it is a *follower* and runs when everything on its path has landed. Pages are marked,
not nodes of the tree, because nodes split and merge. When a transfer fails its followers fetch what they miss of it
again, into the same pages, under a room of its own (a *refetch*); what nobody follows leaves the tree.

Nothing is written or given away before the old writer has ended: `failed` says that nothing more will land, `released`
that nobody writes any more.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_pdd.protocol import ROOM_LIMIT

Pages = npt.NDArray[np.int64]

_FREE = -1  # nobody is to write this page
_DEAD = -2  # nobody is to write it, and it holds nothing: in the tree only as long as its last users hold it
_STRIDE = 0xD1342543DE82EF95  # odd, so that rooms map to rooms of refetches one to one
_OFFSET = 0x2545F4914F6CDD1D

BINS = ("0-90", "90-95", "95-97", "97-98", "98-99", "99-100", "full")
_EDGES = (90, 95, 97, 98, 99)
_REFETCH = re.compile(r"pdd-refetch-[0-9]{19}-([0-9]{1,9})")


def hit_bin(hit: int, most: int) -> str:
    """The name of the bin of a hit of ``hit`` tokens, of ``most`` that could have been hit."""
    return BINS[-1] if hit >= most else BINS[bisect_right(_EDGES, 100 * hit / most)]


def refetch_rid(room: int, tokens: int) -> str:
    """The rid of a refetch under this room; who waits for it and has least to fetch himself fetches ``tokens``."""
    return f"pdd-refetch-{room:019d}-{tokens}"  # none may begin another one: SGLang aborts by the beginning of a rid


def waiting_tokens(rid: str) -> int | None:
    """What `refetch_rid` was given; None: it is no refetch."""
    found = _REFETCH.fullmatch(rid)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Refetch:
    """Fetch the pages ``row[start:end]`` of ``follower``'s prompt again."""

    room: int
    follower: int
    start: int
    end: int


@dataclass(slots=True, eq=False)
class _Transfer:
    room: int
    row: Pages  # of its prompt, in order
    start: int  # the first page that it fetches itself
    landed: int = 0  # how many of those have landed, in order
    failed: bool = False
    waits: dict[int, int] = field(default_factory=dict)  # room -> how many of that room's own pages must have landed
    last: int = -1  # room of the last refetch for it

    @property
    def own(self) -> Pages:
        return self.row[self.start :]


class Pending:
    """Transfers by room, in the order of their beginning, and who is to write which page.

    Args:
        pages: of the pool; page numbers are below it.
    """

    def __init__(self, pages: int) -> None:
        self._writer: Pages = np.full(pages, _FREE, dtype=np.int64)
        self._transfers: dict[int, _Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, room: int) -> bool:
        return room in self._transfers

    def clear(self) -> None:
        """The pool is empty."""
        self._writer.fill(_FREE)
        self._transfers.clear()

    def begin(self, room: int, row: Pages, start: int) -> tuple[int, tuple[Refetch, ...]]:
        """A transfer of ``row[start:]`` begins; ``row[:start]`` was found in the tree.

        Returns how many of the latter are still on their way, and what must be fetched again for them.

        Raises:
            ValueError: the room is taken, or somebody else writes one of its pages.
        """
        if room in self._transfers:
            raise ValueError(f"room {room} is taken")
        own = row[start:]
        if len(self._transfers) and (self._writer[own] != _FREE).any():
            raise ValueError(f"room {room} would write pages that others write")
        transfer = _Transfer(room, row, start)
        shared = self._count_pending(row[:start])
        self._writer[own] = room
        self._transfers[room] = transfer
        refetches: tuple[Refetch, ...] = ()
        if shared:
            refetches = tuple(self._refetch([transfer]))
            transfer.waits = self._waits(transfer)
        return shared, refetches

    def progress(self, room: int, landed: int | None = None) -> None:
        """So many of the transfer's own pages have landed, in the order of the prompt; None: all of them."""
        transfer = self._transfers[room]
        now = len(transfer.own) if landed is None else min(landed, len(transfer.own))
        if now <= transfer.landed:
            return
        self._writer[transfer.own[transfer.landed : now]] = _FREE
        transfer.landed = now
        for other in self._transfers.values():
            if other.waits.get(room, now + 1) <= now:
                del other.waits[room]

    def ready(self, room: int) -> bool:
        """Has everything on this prompt's path landed?"""
        transfer = self._transfers[room]
        return not transfer.waits and transfer.landed == len(transfer.own)

    def followed(self, room: int) -> bool:
        """Does anybody wait for it?"""
        return bool(self._followers(room))

    def followers(self, room: int) -> dict[int, int]:
        """Who waits for it: their rooms, and how many pages each fetches itself."""
        return {t.room: len(t.own) for t in self._followers(room)}

    def leaders(self, room: int) -> dict[int, int]:
        """For whom it waits: their rooms, and how many pages of each must have landed, from its first on."""
        return dict(self._transfers[room].waits)

    def end(self, room: int) -> None:
        """The request runs, or its refetch is complete."""
        assert self._transfers[room].landed == len(self._transfers[room].own)
        del self._transfers[room]

    def failed(self, room: int) -> None:
        """Nothing more of it will land; somebody may still write."""
        self._transfers[room].failed = True

    def released(self, room: int) -> tuple[Refetch, ...]:
        """A failed transfer's writer has ended, and the request has let go of its pages.

        Returns what must be fetched again for its followers. Afterwards cut the tree: see `cut`.
        """
        transfer = self._transfers.pop(room)
        self._writer[transfer.own[transfer.landed :]] = _DEAD
        heirs = self._followers(room)
        refetches = tuple(self._refetch(heirs))
        for heir in heirs:
            heir.waits = self._waits(heir)
        return refetches

    def cut(self, row: Pages, kept: int) -> None:
        """The pages ``row[kept:]`` are no longer in the tree, nor anywhere else.

        To be called when a prompt is let go of that is not `readable` to its end: what is behind its first page that
        holds nothing must leave the tree, up to where somebody else holds it. So there is never anything behind such
        a page in the tree but what is held, and the last one who lets go takes it out.
        """
        gone = row[kept:]
        self._writer[gone[self._writer[gone] == _DEAD]] = _FREE

    def readable(self, pages: Pages) -> int:
        """How many of these pages, from the first on, hold their KV."""
        pending = np.flatnonzero(self._writer[pages] != _FREE)
        return int(pending[0]) if len(pending) else len(pages)

    def row(self, room: int) -> Pages:
        """The pages of a transfer's prompt."""
        return self._transfers[room].row

    def start(self, room: int) -> int:
        """The first of them that it brings itself."""
        return self._transfers[room].start

    def _count_pending(self, pages: Pages) -> int:
        if not self._transfers:
            return 0
        return int(np.count_nonzero(self._writer[pages] != _FREE))

    def _followers(self, room: int) -> list[_Transfer]:
        return [t for t in self._transfers.values() if room in t.waits and not t.failed]

    def _refetch(self, heirs: list[_Transfer]) -> Iterator[Refetch]:
        """Begin transfers that fill the dead pages on the ways of ``heirs``; the longest first, it serves others."""
        needs = [(np.flatnonzero(self._writer[t.row[: t.start]] == _DEAD), t) for t in heirs]
        for needed, heir in sorted(needs, key=lambda need: -len(need[0])):
            needed = needed[self._writer[heir.row[needed]] == _DEAD]
            for run in np.split(needed, np.flatnonzero(np.diff(needed) > 1) + 1):
                if len(run):
                    start, end = int(run[0]), int(run[-1]) + 1
                    heir.last = room = self._room_after(heir)
                    self._transfers[room] = _Transfer(room, heir.row[:end], start)
                    self._writer[heir.row[start:end]] = room
                    yield Refetch(room, heir.room, start, end)

    def _room_after(self, heir: _Transfer) -> int:
        """All ranks name it alike, and no room is used twice."""
        room = heir.room if heir.last < 0 else heir.last
        while True:
            room = (room * _STRIDE + _OFFSET) % ROOM_LIMIT
            if room not in self._transfers:
                return room

    def _waits(self, transfer: _Transfer) -> dict[int, int]:
        writers = self._writer[transfer.row[: transfer.start]]
        ends = np.flatnonzero(np.diff(writers, append=_FREE - 100))  # the last position of each run
        waits: dict[int, int] = {}
        for position, room in zip(ends.tolist(), writers[ends].tolist(), strict=True):
            if room != _FREE:
                waits[room] = position + 1 - self._transfers[room].start
        return waits
