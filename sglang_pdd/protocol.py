"""The messages that P, RLD and MD exchange, and their encoding.

A message is a msgpack array ``[PROTOCOL, code, *fields]``. Token ids travel as packed little-endian int32,
logprobs as float32. Every field is checked against a limit before anything is built from it; whatever does not
fit raises `ProtocolError`, whose text is fit for one log line.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import msgpack

PROTOCOL = 4

MAX_MESSAGE = 16 << 20  # bytes; RelayOpen carries a prompt, nothing else is large
MAX_PROMPT = 4_000_000  # tokens
MAX_STEP_TOKENS = 8192  # tokens of one request in one message
MAX_ROOMS = 4096  # requests named in one message
MAX_ENTRIES = 1024  # of a map, such as a logit bias
MAX_TEXT = 1024  # characters of a name, an address or a reason
MAX_TOP_LOGPROBS = 256
MAX_NAMED_IDS = 1024  # token ids of which a request wants the logprob at each position
MAX_TOKEN = 64  # bytes that admit to a receiver
MAX_PROCESSOR = 1 << 20  # characters of a serialised custom logit processor
UNKNOWN = math.nan
ROOM_LIMIT = 1 << 63  # SGLang's bootstrap rooms are positive int64


class ProtocolError(ValueError):
    """A message that must be dropped; the text says why."""


class VersionMismatch(ProtocolError):
    """A well-formed message of another protocol version."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"protocol version {theirs}, expected {PROTOCOL}: run the same sglang-pdd on all roles")
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of consecutive tokens: ``values[i]``; for ``top_k`` > 0 of ``top_k`` candidates a token; and of the
    ids that the request has named, in its order."""

    values: tuple[float, ...]
    top_k: int = 0
    top_values: tuple[float, ...] = ()  # len(values) * top_k, row after row
    top_ids: tuple[int, ...] = ()
    named: tuple[float, ...] = ()  # len(values) * number of named ids, row after row; `UNKNOWN` for a row without

    def slice(self, start: int, stop: int) -> Logprobs:
        k, m = self.top_k, self._named_width
        row, end = start * k, stop * k
        named = self.named[start * m : stop * m]
        return Logprobs(self.values[start:stop], k, self.top_values[row:end], self.top_ids[row:end], named)

    def top_row(self, i: int) -> tuple[list[float], list[int]]:
        """The candidates of token ``i``: values and ids, each of length ``top_k``."""
        k = self.top_k
        return list(self.top_values[i * k : (i + 1) * k]), list(self.top_ids[i * k : (i + 1) * k])

    def named_row(self, i: int) -> list[float]:
        """The named ids' logprobs at token ``i``; empty if the sender does not know them (`UNKNOWN`)."""
        m = self._named_width
        row = self.named[i * m : (i + 1) * m]
        return [] if any(map(math.isnan, row)) else list(row)

    @property
    def _named_width(self) -> int:
        return len(self.named) // len(self.values) if self.values else 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive output tokens of one request, from position ``start``."""

    room: int
    start: int
    ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    finished: str | None = None  # the sender will send nothing more, and why
    cached: tuple[int, ...] | None = None  # P only: prompt tokens it found cached (total, device, host, storage)


@dataclass(frozen=True, slots=True)
class Request:
    """What a relay must know of a request to sample what MD would."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    return_logprob: bool = False
    top_logprobs: int = 0
    named_ids: tuple[int, ...] = ()  # token ids of which the logprob is wanted at each position
    logit_processor: str = ""  # serialised, as SGLang takes it
    reasoning: bool = False  # grammars begin after the reasoning
    extra_key: str = ""  # the two name whose cached prefixes it may share
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where one rank of a main decode takes KV streams, and what shows that one was told so."""

    host: str
    port: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    code: ClassVar[int] = 1
    role: str
    address: str  # where this node's ROUTER listens, "" if it has none
    sessions: tuple[str, ...]  # transfer-engine session ids of all ranks
    fingerprint: Mapping[str, str]
    public_key: str  # CURVE, "" without keys
    capacity: int  # relays this node takes at once
    load: int  # relays it has now
    landings: tuple[Landing, ...] = ()  # of all ranks, as ``sessions``; none: KV comes through the engine


@dataclass(frozen=True, slots=True)
class Welcome:
    code: ClassVar[int] = 2
    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RelayOpen:
    code: ClassVar[int] = 3
    relay_room: int  # room of the LAN copy
    room: int  # room of the request, as MD knows it
    main: str  # MD's PDD endpoint
    main_key: str  # and its CURVE public key
    request: Request


@dataclass(frozen=True, slots=True)
class RelayReply:
    code: ClassVar[int] = 4
    relay_room: int
    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    code: ClassVar[int] = 5
    chunks: tuple[Chunk, ...]
    load: int = 0  # percent of the sender's relays that are in use


@dataclass(frozen=True, slots=True)
class Stop:
    code: ClassVar[int] = 6
    room: int
    kept: int  # output tokens MD has accepted
    why: str


@dataclass(frozen=True, slots=True)
class Abort:
    code: ClassVar[int] = 7
    room: int
    why: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there, and are these requests still yours?"""

    code: ClassVar[int] = 8
    rooms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pong:
    code: ClassVar[int] = 9
    closed: tuple[int, ...] = ()  # rooms of the Ping that are over, want no more, or were never known


@dataclass(frozen=True, slots=True)
class Awaited:
    """MD to P: does anybody wait for this room's KV? Somebody does, until the contrary is said."""

    code: ClassVar[int] = 10
    room: int
    awaited: bool


@dataclass(frozen=True, slots=True)
class Follows:
    """MD to P: a request waits for KV that others bring, and maybe other prefills. It says so to all of them."""

    code: ClassVar[int] = 11
    room: int
    own: int  # tokens of its prompt that it brings itself
    leaders: tuple[tuple[int, int], ...]  # for whose rooms it waits, and for how many tokens of each


Message = Hello | Welcome | RelayOpen | RelayReply | Tokens | Stop | Abort | Ping | Pong | Awaited | Follows


def encode(message: Message) -> bytes:
    """Encode one message."""
    data: bytes = msgpack.packb([PROTOCOL, message.code, *_pack(message)], use_bin_type=True)
    return data


def decode(data: bytes) -> Message:
    """Decode and check one message.

    Raises:
        VersionMismatch: the sender speaks another protocol version.
        ProtocolError: malformed, oversized, or out of a field's range.
    """
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(data)} bytes, limit {MAX_MESSAGE}")
    try:
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True, max_array_len=MAX_ROOMS, max_map_len=MAX_ENTRIES)
    except Exception as error:  # msgpack raises many kinds
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(raw, list) or len(raw) < 2 or type(raw[0]) is not int or type(raw[1]) is not int:
        raise ProtocolError("not a PDD message")
    if raw[0] != PROTOCOL:
        raise VersionMismatch(raw[0])
    unpack = _UNPACK.get(raw[1])
    if unpack is None:
        raise ProtocolError(f"unknown message code {raw[1]}")
    try:
        return unpack(raw[2:])
    except ProtocolError:
        raise
    except (TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"bad field in message code {raw[1]}: {error}") from None


# --- encoding, type by type -------------------------------------------------------------------------------------


def _pack(message: Message) -> list[Any]:
    if isinstance(message, Tokens):
        return [message.load, [_pack_chunk(c) for c in message.chunks]]
    values = [getattr(message, f.name) for f in fields(message)]
    if isinstance(message, Hello):
        values[-1] = [[landing.host, landing.port, landing.token] for landing in message.landings]
    if isinstance(message, RelayOpen):
        values[-1] = _pack_request(message.request)
    return [dict(v) if isinstance(v, Mapping) else list(v) if isinstance(v, tuple) else v for v in values]


def _pack_request(request: Request) -> list[Any]:
    values = [getattr(request, f.name) for f in fields(request)]
    values[0], values[1], values[4] = _int32(request.prompt), dict(request.sampling), _int32(request.named_ids)
    return values


def _pack_chunk(chunk: Chunk) -> list[Any]:
    packed: list[Any] = [chunk.room, chunk.start, _int32(chunk.ids)]
    tail: list[Any] = [
        None if chunk.logprobs is None else _pack_logprobs(chunk.logprobs),
        chunk.finished,
        None if chunk.cached is None else list(chunk.cached),
    ]
    while tail and tail[-1] is None:  # the common chunk has none of them
        tail.pop()
    return packed + tail


def _pack_logprobs(lp: Logprobs) -> list[Any]:
    packed = [_float32(lp.values), lp.top_k, _float32(lp.top_values), _int32(lp.top_ids)]
    return [*packed, _float32(lp.named)] if lp.named else packed


def _unpack_chunk(raw: Any) -> Chunk:
    if not isinstance(raw, list) or not 3 <= len(raw) <= 6:
        raise ProtocolError("bad chunk")
    room, start, ids, lp, finished, cached = raw + [None] * (6 - len(raw))
    tokens = _ids(ids, MAX_STEP_TOKENS)
    return Chunk(
        room=_room(room),
        start=_int(start, 0, 1 << 31),
        ids=tokens,
        logprobs=None if lp is None else _unpack_logprobs(lp, len(tokens)),
        finished=None if finished is None else _text(finished),
        cached=None if cached is None else _ints(cached, 16, 0, 1 << 40),
    )


def _unpack_logprobs(raw: Any, n: int) -> Logprobs:
    if not isinstance(raw, list) or len(raw) not in (4, 5):
        raise ProtocolError("bad logprobs")
    top_k = _int(raw[1], 0, MAX_TOP_LOGPROBS)
    lp = Logprobs(
        _floats(raw[0], MAX_STEP_TOKENS),
        top_k,
        _floats(raw[2], MAX_STEP_TOKENS * MAX_TOP_LOGPROBS),
        _ids(raw[3], MAX_STEP_TOKENS * MAX_TOP_LOGPROBS),
        _floats(raw[4], MAX_STEP_TOKENS * MAX_NAMED_IDS) if len(raw) == 5 else (),
    )
    named = len(lp.named) % n if n else len(lp.named)
    if named or len(lp.values) != n or len(lp.top_values) != n * top_k or len(lp.top_ids) != n * top_k:
        raise ProtocolError(f"logprobs do not match {n} tokens")
    return lp


def _unpack_tokens(raw: list[Any]) -> Tokens:
    load, chunks = raw
    if not isinstance(chunks, list):
        raise ProtocolError("chunks is not a list")
    return Tokens(tuple(_unpack_chunk(c) for c in chunks), _int(load, 0, 100))


def _unpack_hello(raw: list[Any]) -> Hello:
    role, address, sessions, fingerprint, public_key, capacity, load, landings = raw
    if not isinstance(sessions, list) or not isinstance(fingerprint, dict) or not isinstance(landings, list):
        raise ProtocolError("bad Hello")
    if landings and len(landings) != len(sessions):
        raise ProtocolError(f"{len(landings)} landings for {len(sessions)} sessions")
    return Hello(
        _text(role),
        _text(address),
        tuple(_text(s) for s in sessions),
        {_text(k): _text(v) for k, v in fingerprint.items()},
        _text(public_key),
        _int(capacity, 0, 1 << 31),
        _int(load, 0, 1 << 31),
        tuple(_unpack_landing(landing) for landing in landings),
    )


def _unpack_landing(raw: Any) -> Landing:
    host, port, token = raw
    if not isinstance(token, bytes) or len(token) > MAX_TOKEN:
        raise ProtocolError(f"bad or oversized token (limit {MAX_TOKEN})")
    return Landing(_text(host), _int(port, 1, 65535), token)


def _unpack_open(raw: list[Any]) -> RelayOpen:
    relay_room, room, main, main_key, request = raw
    return RelayOpen(_room(relay_room), _room(room), _text(main), _text(main_key), _unpack_request(request))


def _unpack_request(raw: Any) -> Request:
    prompt, sampling, return_logprob, top, named, processor, reasoning, extra_key, cache_salt = raw
    if not isinstance(sampling, dict) or not all(isinstance(k, str) for k in sampling):
        raise ProtocolError("bad sampling parameters")
    return Request(
        _ids(prompt, MAX_PROMPT),
        sampling,
        _bool(return_logprob),
        _int(top, 0, MAX_TOP_LOGPROBS),
        _ids(named, MAX_NAMED_IDS),
        _text(processor, MAX_PROCESSOR),
        _bool(reasoning),
        _text(extra_key),
        _text(cache_salt),
    )


def _unpack_reply(raw: list[Any]) -> RelayReply:
    relay_room, accepted, reason = raw
    return RelayReply(_room(relay_room), _bool(accepted), _text(reason))


def _unpack_welcome(raw: list[Any]) -> Welcome:
    accepted, reason = raw
    return Welcome(_bool(accepted), _text(reason))


def _unpack_stop(raw: list[Any]) -> Stop:
    room, kept, why = raw
    return Stop(_room(room), _int(kept, 0, 1 << 31), _text(why))


def _unpack_abort(raw: list[Any]) -> Abort:
    room, why = raw
    return Abort(_room(room), _text(why))


def _unpack_ping(raw: list[Any]) -> Ping:
    (rooms,) = raw
    return Ping(_ints(rooms, MAX_ROOMS, 0, ROOM_LIMIT - 1))


def _unpack_pong(raw: list[Any]) -> Pong:
    (closed,) = raw
    return Pong(_ints(closed, MAX_ROOMS, 0, ROOM_LIMIT - 1))


def _unpack_awaited(raw: list[Any]) -> Awaited:
    room, awaited = raw
    return Awaited(_room(room), _bool(awaited))


def _unpack_follows(raw: list[Any]) -> Follows:
    room, own, leaders = raw
    if not isinstance(leaders, list):
        raise ProtocolError("leaders is not a list")
    pairs = [(_room(leader), _int(tokens, 0, MAX_PROMPT)) for leader, tokens in leaders]
    return Follows(_room(room), _int(own, 0, MAX_PROMPT), tuple(pairs))


_UNPACK: dict[int, Callable[[list[Any]], Message]] = {
    Hello.code: _unpack_hello,
    Welcome.code: _unpack_welcome,
    RelayOpen.code: _unpack_open,
    RelayReply.code: _unpack_reply,
    Tokens.code: _unpack_tokens,
    Stop.code: _unpack_stop,
    Abort.code: _unpack_abort,
    Ping.code: _unpack_ping,
    Pong.code: _unpack_pong,
    Awaited.code: _unpack_awaited,
    Follows.code: _unpack_follows,
}


# --- fields -----------------------------------------------------------------------------------------------------


def _int32(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def _float32(values: tuple[float, ...]) -> bytes:
    return array("f", values).tobytes()


def _blob(kind: str, raw: Any, limit: int) -> array[Any]:
    packed: array[Any] = array(kind)
    if not isinstance(raw, bytes) or len(raw) % packed.itemsize or len(raw) > limit * packed.itemsize:
        raise ProtocolError(f"bad or oversized array (limit {limit})")
    packed.frombytes(raw)
    return packed


def _ids(raw: Any, limit: int) -> tuple[int, ...]:
    ids = tuple(_blob("i", raw, limit))
    if ids and min(ids) < 0:
        raise ProtocolError("negative token id")
    return ids


def _floats(raw: Any, limit: int) -> tuple[float, ...]:
    return tuple(_blob("f", raw, limit))


def _int(raw: Any, low: int, high: int) -> int:
    if type(raw) is not int or not low <= raw <= high:
        raise ProtocolError(f"{raw!r:.40} is not an integer in [{low}, {high}]")
    return raw


def _ints(raw: Any, limit: int, low: int, high: int) -> tuple[int, ...]:
    if not isinstance(raw, list) or len(raw) > limit:
        raise ProtocolError(f"bad or oversized list (limit {limit})")
    return tuple(_int(v, low, high) for v in raw)


def _room(raw: Any) -> int:
    return _int(raw, 0, ROOM_LIMIT - 1)


def _text(raw: Any, limit: int = MAX_TEXT) -> str:
    if not isinstance(raw, str) or len(raw) > limit:
        raise ProtocolError(f"bad or oversized text (limit {limit})")
    return raw


def _bool(raw: Any) -> bool:
    if type(raw) is not bool:
        raise ProtocolError("not a boolean")
    return raw
