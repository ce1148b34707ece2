import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pdd.pacing import SLICE_S, TokenBucket, parse_rate, segments


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def bucket(rate: float, burst: float, clock: Clock) -> TokenBucket:
    return TokenBucket(rate, burst, clock, clock.sleep)


@pytest.mark.parametrize(
    "text, bytes_per_s",
    [
        ("1gbit", 125e6),
        ("1Gbit", 125e6),
        ("200mbit", 25e6),
        ("1.5kbit", 187.5),
        ("2tbit", 250e9),
        ("8bit", 1),
        ("1000000", 125_000),
        ("25MB", 25e6),
        ("25 MB", 25e6),
        (" 3GB ", 3e9),
        ("512B", 512),
        ("1mibit", 2**20 / 8),
        ("1MiB", 2**20),
        ("1GiB", 2**30),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gbit",
        "-1gbit",
        "0",
        "0mbit",
        "1mbps",
        "1mb",
        "1Mb",
        "1k",
        "1ibit",
        "1e9",
        "nan",
        "inf",
        "1gbit/s",
        "1 2bit",
        "9" * 400,
    ],
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="bad rate") as caught:
        parse_rate(text)
    assert "\n" not in str(caught.value)


def test_a_burst_is_free_and_the_rest_takes_its_time() -> None:
    clock = Clock(1000.0)
    tokens = bucket(1000, 500, clock)
    assert tokens.take(500) and clock.now == 1000.0
    assert tokens.take(250)
    assert clock.now - 1000 == pytest.approx(0.25, abs=2e-4)
    clock.now += 100  # a pause earns one burst, no more
    began = clock.now
    assert tokens.take(500) and clock.now == began
    assert tokens.take(100)
    assert clock.now - began == pytest.approx(0.1, abs=2e-4)


def test_more_than_a_burst_is_paid_afterwards() -> None:
    clock = Clock()
    tokens = bucket(1000, 100, clock)
    assert tokens.take(1000) and clock.now == 0
    assert tokens.take(100)
    assert clock.now == pytest.approx(1.0, abs=2e-4)


def test_cancelled_takes_nothing_and_is_noticed_within_a_slice() -> None:
    clock = Clock()
    tokens = bucket(1000, 1000, clock)
    assert tokens.take(1000)
    assert not tokens.take(1000, lambda: clock.now > 0.2)
    assert 0.2 < clock.now <= 0.2 + SLICE_S + 1e-3
    began = clock.now
    assert tokens.take(200) and clock.now == began  # earned meanwhile, and still there
    assert not tokens.take(0, lambda: True)
    assert max(clock.naps) <= SLICE_S


@pytest.mark.parametrize("rate, burst", [(0, 1), (1, 0), (-1, 1), (float("inf"), 1), (1, float("nan"))])
def test_bad_buckets(rate: float, burst: float) -> None:
    with pytest.raises(ValueError):
        TokenBucket(rate, burst)


def test_negative_takes() -> None:
    with pytest.raises(ValueError):
        TokenBucket(1, 1).take(-1)


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(1e2, 1e9),
    burst_s=st.floats(0.01, 0.5),
    start=st.floats(0, 1e7),
    takes=st.lists(st.tuples(st.floats(0, 1.0), st.floats(0, 0.3)), min_size=1, max_size=8),
)
def test_no_window_carries_more_than_its_share(
    rate: float, burst_s: float, start: float, takes: list[tuple[float, float]]
) -> None:
    clock, burst = Clock(start), rate * burst_s
    tokens = bucket(rate, burst, clock)
    sent: list[tuple[float, int]] = []
    for size_s, pause in takes:
        clock.now += pause
        n = int(size_s * rate)
        assert tokens.take(n)
        sent.append((clock.now, n))
    for i in range(len(sent)):
        for j in range(i, len(sent)):
            window = sum(n for _, n in sent[i : j + 1])
            # The last piece may exceed the burst: it is paid for afterwards.
            excess = max(0.0, sent[j][1] - burst)
            assert window - excess <= burst + rate * (sent[j][0] - sent[i][0]) + 1e-6 * rate + 1
    waited = sum(clock.naps)
    paid = sum(n for _, n in sent[:-1]) + min(sent[-1][1], burst)
    assert waited <= paid / rate + 2e-4 * len(sent) + 1e-6  # never slower than the rate


def test_threads_are_served_in_their_order() -> None:
    tokens = TokenBucket(1e6, 1000)
    tokens.take(300_000)  # 0.3 s of debt, in which the others line up
    order: list[int] = []

    def take(i: int) -> None:
        assert tokens.take(5_000)
        order.append(i)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(4)]
    began = time.monotonic()
    for i, thread in enumerate(threads):
        thread.start()
        while len(tokens._queue) <= i and time.monotonic() < began + 0.25:
            time.sleep(0.0005)
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2, 3]


def test_one_who_gives_up_does_not_hold_up_the_next() -> None:
    tokens = TokenBucket(1e6, 1000)
    tokens.take(1000)
    gave_up = threading.Event()
    stop = threading.Event()

    def impatient() -> None:
        assert not tokens.take(1 << 40, stop.is_set)
        gave_up.set()

    tokens._tokens = -1e12  # the first in line would wait for days
    first = threading.Thread(target=impatient, daemon=True)
    first.start()
    while not tokens._queue:
        time.sleep(0.001)
    stop.set()
    assert gave_up.wait(2)
    tokens._tokens = 1000
    assert tokens.take(1000)
    assert not tokens._queue


@settings(max_examples=200)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 30))
def test_segments(lengths: list[int], limit: int) -> None:
    cut = list(segments(lengths, limit))
    assert all(segment and sum(length for *_, length in segment) <= limit for segment in cut)
    pieces = [piece for segment in cut for piece in segment]
    assert all(length > 0 for *_, length in pieces)
    covered = [(block, offset + i) for block, offset, length in pieces for i in range(length)]
    assert covered == [(block, i) for block, length in enumerate(lengths) for i in range(length)]
    split = {block for block, *_ in pieces if sum(b == block for b, *_ in pieces) > 1}
    assert all(lengths[block] > limit for block in split)
    for one, two in itertools.pairwise(cut):  # no segment could have taken the next piece whole
        block, offset, _ = two[0]
        rest = lengths[block] - offset
        assert sum(length for *_, length in one) + min(rest, limit) > limit


def test_segments_by_hand() -> None:
    assert list(segments([3, 3, 10, 1], 4)) == [
        [(0, 0, 3)],
        [(1, 0, 3)],
        [(2, 0, 4)],
        [(2, 4, 4)],
        [(2, 8, 2), (3, 0, 1)],
    ]
    assert list(segments([], 4)) == [] and list(segments([0, 0], 4)) == []
    assert [len(part) for part in segments([1] * 7, 100, most=3)] == [3, 3, 1]


@pytest.mark.parametrize("lengths, limit", [([1], 0), ([-1], 4)])
def test_bad_segments(lengths: list[int], limit: int) -> None:
    with pytest.raises(ValueError):
        list(segments(lengths, limit))
