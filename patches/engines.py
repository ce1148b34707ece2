"""What those who drive SGLang's transfer engines would else have to know of each: Mooncake's and NIXL's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.nixl.conn import NixlKVManager


def name_of(manager: Any) -> str:
    """What roles must have in common: their messages differ."""
    return "nixl" if isinstance(manager, NixlKVManager) else "mooncake"


def session_of(manager: Any) -> str:
    """The name under which other engines know this rank's."""
    return str(manager.agent.name if isinstance(manager, NixlKVManager) else manager.get_session_id())


def work(manager: Any, queue: FastQueue, executor: Executor) -> None:
    """SGLang's worker: send what is in the queue until None is. Mooncake's reads layers in the ``executor``."""
    if not isinstance(manager, NixlKVManager):
        manager.transfer_worker(queue, executor, None, 0)
        return
    with contextlib.suppress(_Ended):
        manager.transfer_worker(_Source(queue), None, 0)


def wait_for(manager: Any, queue: FastQueue, event: Any) -> None:
    """What is put into the queue next must not be read before ``event``. Mooncake's worker sees to that itself."""
    if isinstance(manager, NixlKVManager):
        queue.put(_Event(event))


def forgive(manager: Any, sessions: Iterable[str]) -> None:
    """Let SGLang send to these again, whatever it has seen of them. Only with Mooncake does it remember."""
    if isinstance(manager, NixlKVManager):
        return
    with manager.session_lock:
        for session in sessions:
            manager._unblacklist_session(session)


class _Ended(BaseException):
    """SGLang's worker must not catch it."""


@dataclass(frozen=True, slots=True)
class _Event:
    event: Any


class _Source:
    """A queue as NIXL's worker wants it: without events, and with an end."""

    def __init__(self, queue: FastQueue) -> None:
        self._queue = queue

    def get(self) -> Any:
        while isinstance(item := self._queue.get(), _Event):
            item.event.synchronize()
        if item is None:
            raise _Ended
        return item
