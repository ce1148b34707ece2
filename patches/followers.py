"""Which of P's requests can't run on MD before others have landed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_pdd.actions import Follow

REMEMBERED = 1024  # words about requests that have not come


class Followers:
    """Followers that are here, and what MD has said of those that are yet to come, here or to another prefill.

    Args:
        requests: by room, from MD's metadata to the end of MD's copy; read only.
        sessions_of: engine sessions of a request's MD, sorted.
    """

    def __init__(
        self, scheduler: Any, requests: Mapping[int, Any], sessions_of: Callable[[int], tuple[str, ...]]
    ) -> None:
        self._scheduler, self._requests, self._sessions_of = scheduler, requests, sessions_of
        self._waiting: set[int] = set()
        self._said: dict[int, Follow] = {}

    def come(self, room: int, leaders: Mapping[int, int]) -> int:
        """This request is here, and so are these leaders of it. Tokens it waits for that come from elsewhere."""
        said = self._said.pop(room, None)
        elsewhere = self.elsewhere(said) if said is not None and self.is_theirs(room, said.sessions) else 0
        if leaders or elsewhere:
            self._waiting.add(room)
        return elsewhere

    def hear(self, word: Follow) -> bool:
        """Is it about a request that is here, and of that main decode?"""
        if word.room in self._requests:
            theirs = self.is_theirs(word.room, word.sessions)
            if theirs:
                self._waiting.add(word.room)
            return theirs
        self._said[word.room] = word
        if len(self._said) > REMEMBERED:
            del self._said[next(iter(self._said))]
        return False

    def waits(self, req: Any) -> bool:
        return req.bootstrap_room in self._waiting

    def forget(self, room: int) -> None:
        self._waiting.discard(room)

    def elsewhere(self, word: Follow) -> int:
        """Tokens that a request waits for and this prefill does not bring, or not yet."""
        return sum(tokens for leader, tokens in word.leaders if leader not in self._requests)

    def is_theirs(self, room: int, sessions: tuple[str, ...]) -> bool:
        """Is this a request of the main decode that has these engine sessions?"""
        mine = {*self._sessions_of(room)}
        return room in self._requests and bool(mine) and mine <= {*sessions}

    def leaders(self, req: Any) -> dict[int, int]:
        """Rooms here that must land before this request can run, and how many of their tokens were not sent yet.

        What MD says it holds may still be on its way, for a request that this one shares a prefix with.
        """
        page, ids = self._scheduler.token_to_kv_pool_allocator.page_size, req.origin_input_ids
        sessions = self._sessions_of(req.bootstrap_room)
        leaders = {}
        for room, other in self._requests.items():
            known = other.disagg_decode_prefix_len + page  # at least a page of what the other one brings
            if (
                other is not req
                and known <= req.disagg_decode_prefix_len
                and other.origin_input_ids[known - page : known] == ids[known - page : known]  # nearly always enough
                and other.origin_input_ids[:known] == ids[:known]
                and (other.extra_key, other.cache_salt) == (req.extra_key, req.cache_salt)
                and self._sessions_of(room) == sessions
            ):
                leaders[room] = len(other.origin_input_ids) - max(known - page, other.start_send_idx)
        return leaders
