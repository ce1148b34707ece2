"""What happened when, as JSON lines that can be read while they are written."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


class Timeline:
    """Appends events to a file; with ``path`` None it does nothing. Thread-safe; several processes may share a file.

    A file that cannot be opened or written is logged once and never raises: ``errors`` counts the events lost, and
    ``lost`` is called for each.
    """

    def __init__(self, path: str | None, role: str, node: str, lost: Callable[[], None] | None = None) -> None:
        self.errors = 0
        self._tell = lost
        self._own = {"role": role, "node": node}
        self._fd = -1
        if path is not None:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            except OSError as error:
                self._lost(error)

    def event(self, name: str, /, room: int | None = None, **fields: Any) -> None:
        """Append one event at the present time. Fields that JSON cannot express are written as text."""
        if self._fd < 0:
            return
        record: dict[str, Any] = {"t": time.time(), **self._own, "event": name}
        if room is not None:
            record["room"] = room
        record = {**record, **fields, **record}  # a field never replaces one of ours
        try:
            line = json.dumps(record, default=str, separators=(",", ":")).encode() + b"\n"
            if os.write(self._fd, line) != len(line):  # one write: events of several processes do not interleave
                raise OSError("disk full")
        except (OSError, TypeError, ValueError) as error:
            self._lost(error)

    def close(self) -> None:
        """Close the file; later events are ignored."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lost(self, error: Exception) -> None:
        self.errors += 1
        if self._tell is not None:
            self._tell()
        if self.errors == 1:
            _log.warning("cannot write the PDD timeline: %s", error)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a file. A last line that is still being written is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: another line is not an event.
    """
    with open(path, "rb") as file:
        *lines, _cut = file.read().split(b"\n")
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if not isinstance(event, dict):
            raise ValueError(f"{path}:{number}: not an object")
        events.append(event)
    return events
