"""A scheduler that has nothing to run sleeps until something comes, if SGLang was told to (``--sleep-on-idle``).

SGLang itself sleeps only while it holds no request at all, and spins while one waits for a transfer. Across a WAN that
is most of the time, on all three roles: cores are taken from whoever computes.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import zmq

from sglang_pdd.transport import Endpoint

LONGEST_MS = 8  # a nap, after which SGLang looks at what nobody rings for

bell: Bell | None = None  # of this process; only a rank that sleeps has one


class Bell:
    """Ends the sleep of an idle scheduler.

    Args:
        poller: of SGLang's ``IdleSleeper``: what it waits for besides.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ms = 1
        poller.register(self._event, zmq.POLLIN)

    def watch(self, endpoint: Endpoint) -> None:
        """An endpoint's sockets, also those to come, ring it."""

        def add(socket: Any) -> None:
            self._poller.register(socket, zmq.POLLIN)

        for socket in endpoint.sockets:
            add(socket)
        endpoint.on_socket = add
        endpoint.on_socket_closed = self._poller.unregister

    def ring(self) -> None:
        """From any thread."""
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.eventfd_write(self._event, 1)

    def nap(self) -> None:
        """Sleep until something comes: for a millisecond, and each time that nothing has come for twice as long.

        So what nobody rings for, another rank's copy say, is seen when it has been waited for about twice as long as
        was needed, and at most ``LONGEST_MS`` late.
        """
        came = self._poller.poll(self._ms)
        self._ms = 1 if came else min(2 * self._ms, LONGEST_MS)
        if (self._event, zmq.POLLIN) in came:
            os.eventfd_read(self._event)


def ring() -> None:
    """Something has changed that this process's scheduler may wait for. From any thread."""
    if bell is not None:
        bell.ring()


# --- hooks ------------------------------------------------------------------------------------------------------


def after_idle(result: None, scheduler: Any) -> None:
    """After ``Scheduler.on_idle``: this step had no batch, nor had the one before."""
    if bell is not None:
        bell.nap()
