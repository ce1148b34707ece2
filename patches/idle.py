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

NAP_MS = 1  # after which SGLang looks at what nobody wakes it for

bell: Bell | None = None  # of this process; only a rank that sleeps has one


class Bell:
    """Ends the sleep of an idle scheduler.

    Args:
        poller: of SGLang's ``IdleSleeper``: what it waits for besides.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
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
        """Sleep until it rings, or for ``NAP_MS``."""
        if (self._event, zmq.POLLIN) in self._poller.poll(NAP_MS):
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
