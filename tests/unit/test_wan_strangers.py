"""A KV receiver among strangers: forged frames, wrong tokens, wrong certificates."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from wan_pair import LAYERS, LONG, PAGE, QUICK, SIZE, Pair, wait_for

from sglang_pdd import keys
from sglang_pdd.keys import KeysError
from sglang_pdd.metrics import Counters
from sglang_pdd.wan import frames
from sglang_pdd.wan.frames import SOUND, SPOILT, Ack, Cancel, Cancelled, Data, Hello, Ping, Pong, Reject, Welcome
from sglang_pdd.wan.receiver import Receiver
from sglang_pdd.wan.regions import Region, Regions
from sglang_pdd.wan.sockets import connect
from sglang_pdd.wan.stream import Stream
from sglang_pdd.wan.tls import Identity


def dial(pair: Pair, token: bytes | None = None, session: int = 9, stream: int = 0) -> Stream:
    raw = connect(pair.address, QUICK, None)
    raw.blocking(2.0)
    raw.write(frames.encode(Hello("x", pair.receiver.token if token is None else token, session, stream)))
    return raw


def answer(raw: Stream) -> frames.Frame:
    return raw.read_frame((Welcome, Reject, Ack, Cancelled, Pong))


def one_page(room: int = 1, region: int = 0, offset: int = 0, size: int = PAGE) -> bytes:
    return frames.encode(Data(room, 0, 0, 0, size, size, (region,), (offset,), (size,)))


def test_a_duplicate_is_acknowledged_and_not_written(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.receiver.open(1)
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    for payload in (b"a", b"b"):
        raw.write(one_page() + payload * PAGE + SOUND)
        assert answer(raw) == Ack(1, 0, 0, PAGE, "landed")
        assert pair.far[0][:PAGE] == b"a" * PAGE
    assert pair.receiver_counters.get("stream.skipped", cause="duplicate") == 1
    raw.write(frames.encode(Ping()))
    assert answer(raw) == Pong()
    raw.write(frames.encode(Cancel(1)) + one_page(size=8) + b"c" * 8 + SOUND)
    assert answer(raw) == Cancelled(1) and answer(raw) == Ack(1, 0, 0, 8, "discarded")
    raw.close()


def test_a_spoilt_payload_has_not_landed(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.receiver.open(1)
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    raw.write(one_page() + b"a" * PAGE + SPOILT)
    assert answer(raw) == Ack(1, 0, 0, PAGE, "discarded")
    assert not pair.landed and set(pair.receiver.pages(1).values()) <= {0}
    raw.write(one_page() + b"b" * PAGE + SOUND)
    assert answer(raw) == Ack(1, 0, 0, PAGE, "landed") and pair.far[0][:PAGE] == b"b" * PAGE
    raw.close()


def test_the_same_frame_on_another_stream_takes_over(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.receiver.open(1)
    first, second = dial(pair, stream=0), dial(pair, stream=1)
    assert isinstance(answer(first), Welcome) and isinstance(answer(second), Welcome)
    first.write(one_page() + b"a" * 100)  # and hangs
    wait_for(lambda: pair.far[0][:1] == b"a")
    second.write(one_page() + b"b" * PAGE + SOUND)
    assert answer(second) == Ack(1, 0, 0, PAGE, "landed")
    assert pair.far[0][:PAGE] == b"b" * PAGE
    with pytest.raises(OSError, match=r"closed|reset"):
        first.read(1)
    first.close()
    second.close()


def test_a_sender_that_comes_back_replaces_its_old_stream(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    first = dial(pair)
    assert isinstance(answer(first), Welcome)
    second = dial(pair)
    assert isinstance(answer(second), Welcome)
    with pytest.raises(OSError, match=r"closed|reset"):
        first.read(1)
    first.close()
    second.close()


def test_garbage_on_a_welcomed_stream(make_pair: Callable[..., Pair]) -> None:
    """A frame with some bytes changed, again and again: refused, or written where its own table says."""
    pair = make_pair()
    pair.receiver.open(1)
    rng = random.Random(3)
    for _ in range(60):
        raw = dial(pair, session=rng.getrandbits(63))
        assert isinstance(answer(raw), Welcome)
        forged = bytearray(one_page(room=9, region=1) + b"x" * PAGE + SOUND)
        for _ in range(rng.randint(1, 4)):
            forged[rng.randrange(80)] = rng.randrange(256)
        with contextlib.suppress(OSError, frames.FrameError):
            raw.write(bytes(forged))
            raw.sock.shutdown(socket.SHUT_WR)
            answer(raw)
        raw.close()
    pair.check([])
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "landed"


@pytest.mark.parametrize(
    "forged, cause",
    [
        (one_page(region=LAYERS) + b"x" * PAGE + SOUND, "malformed"),
        (one_page(offset=SIZE - 1) + b"x" * PAGE, "malformed"),
        (one_page(offset=1 << 63) + b"x" * PAGE, "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (b"PW\x04\x00\xff\xff\xff\xff", "malformed"),
        (frames.encode(Welcome(())), "malformed"),
        (frames.encode(Hello("x", b"", 0, 0)), "malformed"),
    ],
)
def test_forged_frames_change_nothing(make_pair: Callable[..., Pair], forged: bytes, cause: str) -> None:
    pair = make_pair()
    pair.receiver.open(1)
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    raw.write(forged)
    with pytest.raises(OSError):
        answer(raw)
    raw.close()
    pair.check([])
    assert pair.receiver_counters.get("stream.refused", cause=cause) == 1
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "landed"  # others are not concerned


def test_who_was_not_told_of_this_receiver(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    raw = dial(pair, token=b"t" * 16)
    assert isinstance(answer(raw), Reject)
    raw.close()
    assert pair.receiver_counters.get("stream.refused", cause="token") == 1


def test_strangers_cannot_keep_a_sender_out(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    silent = [socket.create_connection(pair.address) for _ in range(40)]
    raw = dial(pair)
    assert isinstance(answer(raw), Welcome)
    for sock in [raw.sock, *silent]:
        sock.close()


def test_only_loopback_without_keys(folders: Path) -> None:
    regions = Regions([Region.of(bytearray(10))])
    for host in ("0.0.0.0", "::", "example.com", ""):
        with pytest.raises(PermissionError, match="--pdd-keys"):
            Receiver(regions, Counters()).listen(host)
    identity = Identity(folders / "md")
    for receiver in (Receiver(regions, Counters(), insecure=True), Receiver(regions, Counters(), identity=identity)):
        receiver.listen("0.0.0.0")
        receiver.shutdown()


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client, server", [("other/p", "md"), ("p", "other/md"), (None, "md"), ("p", None)])
def test_wrong_certificates(
    make_pair: Callable[..., Pair], folders: Path, client: str | None, server: str | None
) -> None:
    identities = tuple(Identity(folders / name) if name else None for name in (client, server))
    pair = make_pair(identities=identities, tuning=replace(QUICK, give_up_s=0.4))
    pair.receiver.open(1)
    assert pair.peer.submit(1, pair.pages([(1, 1)])).wait(LONG) == "failed"
    pair.check([])


def test_a_name_belongs_to_a_certificate(folders: Path) -> None:
    identity = Identity(folders / "p")
    der = ssl.PEM_cert_to_DER_cert((folders / "md/tls.crt").read_text())
    assert identity.peer(der) == "md"
    assert identity.peer(ssl.PEM_cert_to_DER_cert((folders / "other/md/tls.crt").read_text())) is None
    assert identity.peer(None) is None


def test_identities_that_cannot_be_used(tmp_path: Path) -> None:
    keys.make(tmp_path, ["p"])
    folder = tmp_path / "p"
    os.chmod(folder / "tls.key", 0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        Identity(folder)
    os.chmod(folder / "tls.key", 0o600)
    (folder / "peers/p.crt").write_text("nothing\n")
    with pytest.raises(KeysError, match=r"p\.crt"):
        Identity(folder)
    (folder / "peers/p.crt").unlink()
    with pytest.raises(KeysError, match=r"no \*\.crt"):
        Identity(folder)
    (folder / "tls.key").unlink()
    with pytest.raises(KeysError, match="adds what older folders lack"):
        Identity(folder)
