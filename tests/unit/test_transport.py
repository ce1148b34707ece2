import logging
import socket
import time
from collections.abc import Callable, Iterator

import msgpack
import pytest
import zmq

from sglang_pdd import transport
from sglang_pdd.keys import Keys, make
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import (
    MAX_MESSAGE,
    PROTOCOL,
    Abort,
    Message,
    Ping,
    Pong,
    RelayOpen,
    Request,
    Stop,
    Tokens,
    encode,
)
from sglang_pdd.transport import Endpoint, TransportError

LOCAL = "tcp://127.0.0.1:0"
Open = Callable[..., Endpoint]


@pytest.fixture
def open_() -> Iterator[Open]:
    opened: list[Endpoint] = []

    def open_one(node: str, keys: Keys | None = None) -> Endpoint:
        opened.append(Endpoint(node, keys, Counters()))
        return opened[-1]

    yield open_one
    for endpoint in opened:
        endpoint.close()


@pytest.fixture
def dealer() -> Iterator[Callable[..., zmq.Socket]]:
    """Raw clients, for what an Endpoint would never send."""
    with zmq.Context() as context:
        made = []

        def connect(endpoint: str, identity: bytes = b"raw") -> zmq.Socket:
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            if identity:
                socket.identity = identity
            socket.connect(endpoint)
            made.append(socket)
            return socket

        yield connect
        for socket in made:
            socket.close(0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Keys]:
    folder = tmp_path_factory.mktemp("keys")
    make(folder, ["p", "md"])
    make(folder / "others", ["mallory"])
    loaded = {name: Keys.load(folder / name) for name in ("p", "md")}
    mallory = Keys.load(folder / "others" / "mallory")
    # Knows and trusts p, but p does not know him.
    return {**loaded, "mallory": Keys(mallory.public, mallory.secret, frozenset({loaded["p"].public}))}


def gather(endpoint: Endpoint, n: int = 1, timeout_s: float = 5.0) -> list[tuple[str, Message]]:
    got: list[tuple[str, Message]] = []
    end = time.monotonic() + timeout_s
    while len(got) < n and time.monotonic() < end:
        endpoint.poll(20)
        got += endpoint.receive()
    return got


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def dropped(endpoint: Endpoint, cause: str) -> int | float:
    return endpoint._counters.get("messages.dropped", cause=cause)


def test_both_directions(open_: Open) -> None:
    server, client = open_("p"), open_("md")
    where = server.bind(LOCAL)
    assert where.startswith("tcp://127.0.0.1:") and not where.endswith(":0")
    assert server.receive() == []
    client.dial(where, "")
    assert client.send(where, Ping((1, 2)))
    assert gather(server) == [("md", Ping((1, 2)))]
    assert server.send("md", Pong((2,)))
    assert gather(client) == [(where, Pong((2,)))]
    assert client._counters.snapshot() == {"messages.sent{kind=Ping}": 1, "messages.received{kind=Pong}": 1}


def test_order_is_kept_and_a_dial_before_the_bind_loses_nothing(open_: Open) -> None:
    server, client = open_("p"), open_("md")
    where = server.bind(LOCAL)
    server.close()
    client.dial(where, "")
    for i in range(50):
        assert client.send(where, Stop(i, 0, ""))
    again = open_("p")
    again.bind(where)
    assert [m.room for _, m in gather(again, 50)] == list(range(50))


def test_dial_is_idempotent_and_hangup_forgets(open_: Open) -> None:
    server, client = open_("p"), open_("md")
    where = server.bind(LOCAL)
    seen: list[str] = []
    client.on_socket = lambda socket: seen.append("opened")
    client.on_socket_closed = lambda socket: seen.append("closed" if not socket.closed else "too late")
    client.dial(where, "")
    client.dial(where, "ignored without keys")
    assert len(client.sockets) == 1
    assert client.send(where, Ping())
    client.hangup(where)
    client.hangup(where)
    assert gather(server) == [("md", Ping())]  # sent before the hangup
    assert seen == ["opened", "closed"] and client.sockets == []
    assert not client.send(where, Ping()) and dropped(client, "no_route") == 1


def test_an_unknown_peer_is_false_and_counted(open_: Open) -> None:
    server, client = open_("p"), open_("md")
    assert not client.send("tcp://127.0.0.1:1", Ping())
    where = server.bind(LOCAL)
    assert not server.send("nobody", Ping())
    client.dial(where, "")
    client.send(where, Ping())
    assert gather(server)
    client.close()
    assert until(lambda: not server.send("md", Ping()))
    assert dropped(server, "no_route") == 2 and dropped(client, "no_route") == 1


def test_a_full_queue_is_false_and_never_blocks(open_: Open) -> None:
    client = open_("md")
    client.dial("tcp://127.0.0.1:9", "")  # discard: nobody listens
    began = time.monotonic()
    results = [client.send("tcp://127.0.0.1:9", Ping()) for _ in range(transport.QUEUE + 10)]
    assert time.monotonic() - began < 5
    assert results == [True] * transport.QUEUE + [False] * 10
    assert dropped(client, "full") == 10


def test_what_cannot_be_encoded_or_is_too_large_is_not_sent(open_: Open) -> None:
    client = open_("md")
    client.dial("tcp://127.0.0.1:9", "")
    relay = RelayOpen(1, 2, "", "", Request((), {"bad": object()}))
    assert not client.send("tcp://127.0.0.1:9", relay)
    assert dropped(client, "malformed") == 1
    assert not client.send("tcp://127.0.0.1:9", Abort(1, "x" * (MAX_MESSAGE + 1)))
    assert dropped(client, "oversized") == 1


def test_a_restarted_server_is_found_again(open_: Open) -> None:
    server, client = open_("p"), open_("md")
    where = server.bind(LOCAL)
    client.dial(where, "")
    client.send(where, Ping((1,)))
    assert gather(server)
    server.close()
    again = open_("p")
    assert again.bind(where) == where
    assert until(lambda: client.send(where, Ping((2,))) and again.poll(50))
    assert gather(again)[0] == ("md", Ping((2,)))
    assert again.send("md", Pong())
    assert gather(client) == [(where, Pong())]


def test_an_identity_is_handed_over_to_its_newest_connection(open_: Open) -> None:
    server, old, new = open_("p"), open_("md"), open_("md")
    where = server.bind(LOCAL)
    for client in (old, new):
        client.dial(where, "")
        client.send(where, Ping())
        assert gather(server) == [("md", Ping())]
    assert server.send("md", Pong((7,)))
    assert gather(new) == [(where, Pong((7,)))]
    assert old.receive() == []


def test_receiving_is_fair_and_bounded(open_: Open) -> None:
    client = open_("md")
    servers = [open_(name) for name in ("p1", "p2")]
    wheres = [server.bind(LOCAL) for server in servers]
    for server, where in zip(servers, wheres, strict=True):
        client.dial(where, "")
        client.send(where, Ping())
        assert gather(server)
    for i in range(100):
        servers[0].send("md", Pong((i,)))
    for i in range(5):
        servers[1].send("md", Pong((i,)))
    ready = [s for s, _ in client._sources]
    assert until(lambda: all(s.getsockopt(zmq.EVENTS) & zmq.POLLIN for s in ready))
    time.sleep(0.05)
    for _ in range(3):
        assert sorted(peer for peer, _ in client.receive(limit=2)) == sorted(wheres)
    assert {peer for _ in range(2) for peer, _ in client.receive(limit=1)} == set(wheres)
    assert [peer for peer, _ in client.receive(limit=10)].count(wheres[1]) == 1
    assert len(gather(client, 87)) == 87


@pytest.mark.parametrize(
    "frames, cause",
    [
        ([b""], "malformed"),
        ([b"", encode(Ping())], "malformed"),
        ([encode(Ping()), encode(Ping())], "malformed"),
        ([b"x"] * 20, "malformed"),
        ([b"\xc1garbage"], "malformed"),
        ([msgpack.packb([PROTOCOL + 1, 8, []])], "version"),
        ([bytes(MAX_MESSAGE + 1)], "oversized"),
    ],
    ids=["empty", "req-style", "two", "twenty", "garbage", "version", "oversized"],
)
def test_garbage_is_dropped_counted_and_harmless(open_: Open, dealer, frames: list[bytes], cause: str) -> None:
    server = open_("p")
    raw = dealer(server.bind(LOCAL))
    raw.send_multipart(frames)
    raw.send(encode(Ping((5,))))
    assert gather(server) == [("raw", Ping((5,)))]
    assert server._counters.snapshot() == {f"messages.dropped{{cause={cause}}}": 1, "messages.received{kind=Ping}": 1}


def test_what_libzmq_refuses_to_buffer(open_: Open, dealer) -> None:
    server = open_("p")
    raw = dealer(server.bind(LOCAL))
    raw.send(bytes(MAX_MESSAGE + (1 << 20)))
    assert until(lambda: raw.send(encode(Ping((5,)))) is None and server.poll(50))
    assert gather(server)[0] == ("raw", Ping((5,)))
    assert dropped(server, "oversized") == 0  # it never reached us


@pytest.mark.parametrize("identity", [b"", b"a b", b"\xff", b"x" * 65], ids=["none", "blank", "binary", "long"])
def test_senders_need_a_node_id(open_: Open, dealer, identity: bytes) -> None:
    server = open_("p")
    dealer(server.bind(LOCAL), identity).send(encode(Ping()))
    assert until(lambda: server.receive() == [] and dropped(server, "malformed") == 1)


def test_a_flood_of_garbage_is_logged_once(open_: Open, dealer, caplog: pytest.LogCaptureFixture) -> None:
    server = open_("p")
    now = [0.0]
    server._limit._clock = lambda: now[0]
    raw = dealer(server.bind(LOCAL))
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            raw.send(b"garbage")
        assert until(lambda: server.receive() == [] and dropped(server, "malformed") == 20)
        assert len(caplog.messages) == 1 and "dropped (malformed): message from raw:" in caplog.messages[0]
        now[0] = 11.0
        raw.send(b"garbage")
        assert until(lambda: server.receive() == [] and dropped(server, "malformed") == 21)
        assert len(caplog.messages) == 2 and "(19 more of this kind suppressed)" in caplog.messages[1]


def test_ten_thousand_messages(open_: Open) -> None:
    server, client = open_("p"), open_("md")
    where = server.bind(LOCAL)
    client.dial(where, "")
    rooms: list[int] = []
    sent = 0
    end = time.monotonic() + 10
    while len(rooms) < 10_000 and time.monotonic() < end:
        while sent < min(10_000, len(rooms) + 1000):
            assert client.send(where, Stop(sent, 0, ""))
            sent += 1
        rooms += [m.room for _, m in server.receive()]
    assert rooms == list(range(10_000))


# --- keys ---------------------------------------------------------------------------------------------------------


def test_listed_keys_talk(open_: Open, keys: dict[str, Keys]) -> None:
    server, client = open_("p", keys["p"]), open_("md", keys["md"])
    where = server.bind(LOCAL)
    client.dial(where, keys["p"].public)
    assert client.send(where, Tokens(()))
    assert gather(server) == [("md", Tokens(()))]
    assert server.send("md", Pong())
    assert gather(client) == [(where, Pong())]
    assert "connections.refused" not in server._counters.snapshot()


def test_a_valid_key_that_is_not_listed_delivers_nothing(
    open_: Open, keys: dict[str, Keys], caplog: pytest.LogCaptureFixture
) -> None:
    server, stranger, client = open_("p", keys["p"]), open_("mallory", keys["mallory"]), open_("md", keys["md"])
    where = server.bind(LOCAL)
    stranger.dial(where, keys["p"].public)
    assert stranger.send(where, Ping())
    assert until(lambda: server._counters.get("connections.refused") >= 1)
    client.dial(where, keys["p"].public)
    client.send(where, Ping((1,)))
    assert gather(server) == [("md", Ping((1,)))]
    assert gather(server, timeout_s=0.2) == []
    assert not server.send("mallory", Ping())
    assert any(keys["mallory"].public in line for line in caplog.messages)


def test_a_client_without_keys_delivers_nothing(open_: Open, keys: dict[str, Keys]) -> None:
    server, plain = open_("p", keys["p"]), open_("md")
    where = server.bind(LOCAL)
    plain.dial(where, "")
    plain.send(where, Ping())
    assert gather(server, timeout_s=0.3) == []


def test_a_server_without_the_dialled_key_gets_nothing(open_: Open, keys: dict[str, Keys]) -> None:
    impostor, client = open_("p", keys["mallory"]), open_("md", keys["md"])
    where = impostor.bind(LOCAL)
    client.dial(where, keys["p"].public)
    client.send(where, Ping())
    assert gather(impostor, timeout_s=0.3) == []


@pytest.mark.parametrize("key", ["", "nonsense", "mallory"])
def test_dialling_a_server_that_is_not_listed_is_refused(open_: Open, keys: dict[str, Keys], key: str) -> None:
    client = open_("md", keys["md"])
    with pytest.raises(TransportError, match="not among this node's peers"):
        client.dial("tcp://127.0.0.1:9", keys[key].public if key in keys else key)
    assert client.sockets == []


def test_dialling_with_another_key_replaces_the_connection(open_: Open, keys: dict[str, Keys]) -> None:
    server, client = open_("p", keys["p"]), open_("md", keys["md"])
    where = server.bind(LOCAL)
    client.dial(where, keys["md"].public)
    client.dial(where, keys["p"].public)
    assert len(client.sockets) == 1
    client.send(where, Ping())
    assert gather(server) == [("md", Ping())]


def test_without_its_zap_handler_a_server_admits_nobody(open_: Open, keys: dict[str, Keys], monkeypatch) -> None:
    monkeypatch.setattr(Endpoint, "_guard", lambda self, allowed: None)
    server, client = open_("p", keys["p"]), open_("md", keys["md"])
    where = server.bind(LOCAL)
    client.dial(where, keys["p"].public)
    client.send(where, Ping())
    assert gather(server, timeout_s=0.3) == []


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    ["ipc:///tmp/x", "inproc://x", "tcp://", "tcp://h", "h:1", "tcp://h:1;h2:2", "tcp://h:99999", "", "tcp://a b:1"],
)
def test_only_tcp_endpoints(open_: Open, bad: str) -> None:
    endpoint = open_("md")
    for call in (endpoint.bind, lambda where: endpoint.dial(where, "")):
        with pytest.raises(TransportError, match="expected tcp://host:port"):
            call(bad)
    assert endpoint.sockets == []


@pytest.mark.parametrize("bad", ["tcp://*:1", "tcp://h:0", "tcp://h:*"])
def test_what_cannot_be_dialled(open_: Open, bad: str) -> None:
    endpoint = open_("md")
    with pytest.raises(TransportError, match="cannot dial"):
        endpoint.dial(bad, "")
    assert endpoint.sockets == []


def test_a_taken_port_and_a_second_bind_are_refused(open_: Open) -> None:
    one, two = open_("a"), open_("b")
    where = one.bind(LOCAL)
    with pytest.raises(TransportError, match="in use"):
        two.bind(where)
    assert two.bind(LOCAL) != where
    with pytest.raises(TransportError, match="listens already"):
        two.bind(LOCAL)


def test_bad_node_ids() -> None:
    for node in ("", "a b", "ä", "x" * 65):
        with pytest.raises(TransportError, match="bad node id"):
            Endpoint(node, None, Counters())


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_ipv6(open_: Open) -> None:
    server, client = open_("p"), open_("md")
    if not has_ipv6():  # then a node must say so
        with pytest.raises(TransportError, match="cannot listen"):
            server.bind("tcp://[::1]:*")
        return
    where = server.bind("tcp://[::1]:*")
    client.dial(where, "")
    client.send(where, Ping())
    assert gather(server) == [("md", Ping())]


def test_close_is_quick_and_idempotent(open_: Open, keys: dict[str, Keys]) -> None:
    client = open_("md", keys["md"])
    client.bind(LOCAL)
    client.dial("tcp://127.0.0.1:9", keys["p"].public)
    client.send("tcp://127.0.0.1:9", Ping())
    began = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began < 2
    assert client.receive() == [] and not client.send("x", Ping())
