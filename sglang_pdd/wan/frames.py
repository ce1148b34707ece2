"""What travels on a stream: a prefix of 8 bytes, a body, and behind the body of `Data` its payload and a byte.

That byte is `SOUND` if the sender's room was still alive when the last of the payload had been read from its memory;
else that memory may have been something else's by then, and the payload must count for nothing.

Everything is little-endian. Control frames between strangers (`Hello`, `Welcome`, `Reject`) are msgpack, those between
friends are packed structs. A frame is checked completely before any byte of its payload is read; what does not fit
raises `FrameError`, after which the stream cannot be trusted to be in step and must be closed.

Places are (region, offset): a peer never names an address of this process.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgpack

VERSION = 2
MAGIC = b"PW"
SOUND, SPOILT = b"\1", b"\0"

MAX_BLOCKS = 1000  # Linux takes 1024 buffers in one sendmsg
MAX_PAYLOAD = 4 << 20  # bytes of one frame
MAX_TRANSFER = 1 << 44  # bytes
MAX_PARTS = 1 << 20
MAX_REGIONS = 1 << 16
MAX_CONTROL = 1 << 20  # bytes of a Welcome; nothing else comes near
MAX_HELLO = 1024  # bytes that a stranger may make us read
MAX_TEXT = 256  # characters

_PREFIX = struct.Struct("<2sBxI")  # magic, kind, bytes of the body
_DATA = struct.Struct("<QIIIQQII")  # room, part, parts, pages, position, total, payload, blocks
_ACK = struct.Struct("<QIQIB")  # room, part, position, payload, outcome
_ROOM = struct.Struct("<Q")

PREFIX = _PREFIX.size
_PER_BLOCK = 14  # offset, length, region
_MAX_DATA = _DATA.size + MAX_BLOCKS * _PER_BLOCK

Outcome = Literal["landed", "discarded"]
_OUTCOMES: tuple[Outcome, ...] = ("landed", "discarded")


class FrameError(ValueError):
    """A frame that must be refused, and its stream closed; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The sender's first frame: who I am, and what proves that I was told of this receiver."""

    kind: ClassVar[int] = 1
    node: str
    token: bytes  # the receiver's, of its present life
    session: int  # this sender's life, drawn at random
    stream: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver's answer: its regions, as (bytes, bytes of a page in it)."""

    kind: ClassVar[int] = 2
    regions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Reject:
    kind: ClassVar[int] = 3
    reason: str


@dataclass(frozen=True, slots=True)
class Data:
    """Some blocks of one part of a room: bytes ``[position, position + payload)`` of ``total`` in the part's order.

    A room is sent in parts (one for each chunk of its prompt); ``parts`` is their number, 0 while that is not known.
    ``pages``: the part's order is that of so many equal pages, each with all of its layers together; 0: it is another.
    """

    kind: ClassVar[int] = 4
    room: int
    part: int
    parts: int
    position: int
    total: int
    payload: int
    regions: Sequence[int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """``landed``: these bytes are where they belong. ``discarded``: the room is closed here, send no more of it."""

    kind: ClassVar[int] = 5
    room: int
    part: int
    position: int
    payload: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nothing more of this room comes from me."""

    kind: ClassVar[int] = 6
    room: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nothing of this room that came from you is being written or ever will be."""

    kind: ClassVar[int] = 7
    room: int


@dataclass(frozen=True, slots=True)
class Ping:
    kind: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Pong:
    kind: ClassVar[int] = 9


Frame = Hello | Welcome | Reject | Data | Ack | Cancel | Cancelled | Ping | Pong


def room_id(bootstrap_room: int, pages: bytes, aux_index: int) -> int:
    """The name of a room on the streams, from what the main decode has told the prefill about where to write.

    Clients choose bootstrap rooms, and may use one again: a frame of its former life must not be taken for one of the
    present, whose pages are others.
    """
    key = struct.pack("<Qq", bootstrap_room, aux_index) + pages
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


# --- encoding ---------------------------------------------------------------------------------------------------


def encode(frame: Frame) -> bytes:
    """Prefix and body. The payload of `Data` is the caller's."""
    body = _body(frame)
    return _PREFIX.pack(MAGIC, frame.kind, len(body)) + body


def _body(frame: Frame) -> bytes:
    if isinstance(frame, Data):
        count = len(frame.lengths)
        order = (frame.room, frame.part, frame.parts, frame.pages, frame.position, frame.total)
        return _DATA.pack(*order, frame.payload, count) + _table(count).pack(
            *frame.offsets, *frame.lengths, *frame.regions
        )
    if isinstance(frame, Ack):
        return _ACK.pack(frame.room, frame.part, frame.position, frame.payload, _OUTCOMES.index(frame.outcome))
    if isinstance(frame, Cancel | Cancelled):
        return _ROOM.pack(frame.room)
    if isinstance(frame, Hello):
        return _pack([VERSION, frame.node, frame.token, frame.session, frame.stream])
    if isinstance(frame, Welcome):
        return _pack([VERSION, [size for size, _ in frame.regions], [unit for _, unit in frame.regions]])
    if isinstance(frame, Reject):
        return _pack([frame.reason[:MAX_TEXT]])
    return b""


# --- decoding ---------------------------------------------------------------------------------------------------


def parse_prefix(data: bytes, allowed: tuple[type[Frame], ...]) -> tuple[int, int]:
    """The kind of the frame, and how many bytes its body has.

    Raises:
        FrameError: no frame, of a kind that must not come now, or longer than its kind can be.
    """
    magic, kind, size = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise FrameError("not a frame: wrong magic")
    if kind not in [each.kind for each in allowed]:
        raise FrameError(f"a frame of kind {kind} must not come now")
    if size > _LIMITS[kind]:
        raise FrameError(f"a body of {size} bytes for a frame of kind {kind}, limit {_LIMITS[kind]}")
    return kind, size


def parse(kind: int, body: bytes) -> Frame:
    """The frame.

    Raises:
        FrameError: malformed, or a field out of its range. Whether blocks lie within their regions is not known here.
    """
    try:
        frame: Frame = _PARSERS[kind](body)
        return frame
    except FrameError:
        raise
    except Exception as error:  # msgpack raises many kinds
        raise FrameError(f"bad frame of kind {kind}: {type(error).__name__}: {error}") from None


def _parse_data(body: bytes) -> Data:
    room, part, parts, pages, position, total, payload, count = _DATA.unpack_from(body)
    if not 1 <= count <= MAX_BLOCKS or len(body) != _DATA.size + count * _PER_BLOCK:
        raise FrameError(f"{count} blocks in a body of {len(body)} bytes")
    table = _table(count).unpack_from(body, _DATA.size)
    lengths = table[count : 2 * count]
    if not 0 < payload <= MAX_PAYLOAD or sum(lengths) != payload or 0 in lengths:
        raise FrameError(f"a payload of {payload} bytes does not match its blocks, or is over the limit")
    if total > MAX_TRANSFER or position + payload > total:
        raise FrameError(f"bytes {position} + {payload} of {total}")
    if parts > MAX_PARTS or part >= (parts or MAX_PARTS):
        raise FrameError(f"part {part} of {parts}")
    if pages and total % pages:
        raise FrameError(f"{total} bytes are not {pages} equal pages")
    return Data(room, part, parts, position, total, payload, table[2 * count :], table[:count], lengths, pages)


def _parse_ack(body: bytes) -> Ack:
    room, part, position, payload, outcome = _ACK.unpack(body)
    return Ack(room, part, position, payload, _OUTCOMES[outcome])


def _parse_hello(body: bytes) -> Hello:
    version, *rest = _unpack(body)
    if type(version) is not int or version != VERSION:
        raise FrameError(f"stream version {version!r:.20}, expected {VERSION}: run the same sglang-pdd on all roles")
    node, token, session, stream = rest
    if not isinstance(token, bytes) or len(token) > 64:
        raise FrameError("bad token")
    return Hello(_text(node), token, _int(session, 1 << 64), _int(stream, 1 << 10))


def _parse_welcome(body: bytes) -> Welcome:
    version, sizes, units = _unpack(body)
    if version != VERSION or not isinstance(sizes, list) or not isinstance(units, list):
        raise FrameError("bad Welcome")
    return Welcome(tuple((_int(n, 1 << 63), _int(u, 1 << 32)) for n, u in zip(sizes, units, strict=True)))


def _parse_reject(body: bytes) -> Reject:
    (reason,) = _unpack(body)
    return Reject(_text(reason))


_PARSERS: dict[int, Any] = {
    Hello.kind: _parse_hello,
    Welcome.kind: _parse_welcome,
    Reject.kind: _parse_reject,
    Data.kind: _parse_data,
    Ack.kind: _parse_ack,
    Cancel.kind: lambda body: Cancel(*_ROOM.unpack(body)),
    Cancelled.kind: lambda body: Cancelled(*_ROOM.unpack(body)),
    Ping.kind: lambda body: Ping(),
    Pong.kind: lambda body: Pong(),
}
_LIMITS = {
    Hello.kind: MAX_HELLO,
    Welcome.kind: MAX_CONTROL,
    Reject.kind: MAX_HELLO * 2,
    Data.kind: _MAX_DATA,
    Ack.kind: _ACK.size,
    Cancel.kind: _ROOM.size,
    Cancelled.kind: _ROOM.size,
    Ping.kind: 0,
    Pong.kind: 0,
}


# --- fields -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=MAX_BLOCKS)
def _table(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q{count}I{count}H")


def _pack(values: list[Any]) -> bytes:
    data: bytes = msgpack.packb(values, use_bin_type=True)
    return data


def _unpack(body: bytes) -> list[Any]:
    raw = msgpack.unpackb(body, raw=False, max_array_len=MAX_REGIONS, max_map_len=0)
    if not isinstance(raw, list):
        raise FrameError("not a list")
    return raw


def _int(raw: Any, limit: int) -> int:
    if type(raw) is not int or not 0 <= raw < limit:
        raise FrameError(f"{raw!r:.40} is not an integer in [0, {limit})")
    return raw


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or len(raw) > MAX_TEXT:
        raise FrameError(f"bad or oversized text (limit {MAX_TEXT})")
    return raw
