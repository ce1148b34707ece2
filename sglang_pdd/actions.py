"""What a state machine can ask for.

`Send` is done by rank 0 alone. Everything else is a *command*: it enters the scheduler with the ordinary requests,
is broadcast with them, and is carried out by all tensor-parallel ranks in the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pdd.protocol import Landing, Logprobs, Message, Request


@dataclass(frozen=True, slots=True)
class Send:
    peer: str  # a node id, or the endpoint of a node that this one dials
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection to a node's ROUTER."""

    endpoint: str
    public_key: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close a connection that this node has dialled."""

    endpoint: str


# --- commands: P ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerEarly:
    """MD is one of ours: P's client need not wait for the copy of ``room`` to leave."""

    room: int


@dataclass(frozen=True, slots=True)
class OpenRelay:
    """Make a second copy of ``room``'s KV for the node that will receive it as ``relay_room``."""

    room: int
    relay_room: int


@dataclass(frozen=True, slots=True)
class DropRelay:
    """Give the second copy up."""

    room: int
    relay_room: int
    why: str


@dataclass(frozen=True, slots=True)
class KnowLandings:
    """KV for these engine sessions can go there by stream; with no landings: no more."""

    sessions: tuple[str, ...]
    landings: tuple[Landing, ...]


@dataclass(frozen=True, slots=True)
class Demote:
    """Nobody waits for the KV of ``room``: it goes when nothing else does. Or somebody does again.

    ``sessions``: who says so; the room must be theirs.
    """

    room: int
    sessions: tuple[str, ...]
    demoted: bool


@dataclass(frozen=True, slots=True)
class Follow:
    """Before ``room`` can run, so many tokens of each of its ``leaders`` must have landed, too: (room, tokens).

    Any of these rooms may be another prefill's. ``sessions``: who says so. ``own``: tokens that ``room`` brings itself.
    """

    room: int
    sessions: tuple[str, ...]
    own: int
    leaders: tuple[tuple[int, int], ...]


# --- commands: RLD ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartDecode:
    relay_room: int
    bootstrap: str  # host:port
    request: Request


@dataclass(frozen=True, slots=True)
class StopDecode:
    relay_room: int
    why: str


# --- commands: MD -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Emit:
    """Append these tokens to the request's output, from position ``start``, as its own."""

    room: int
    start: int
    ids: tuple[int, ...]
    logprobs: Logprobs | None
    source: str  # "P" or "RLD"
    cached: tuple[int, ...] | None
    load: int | None = None  # percent of RLD's relays that are in use


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End a request that can never go on."""

    room: int


Command = (
    AnswerEarly | OpenRelay | DropRelay | KnowLandings | Demote | Follow | StartDecode | StopDecode | Emit | GiveUp
)
Action = Send | Dial | HangUp | Command
