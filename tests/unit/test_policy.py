import threading

import pytest

from sglang_pdd.policy import DEFAULT_BANDWIDTH, MEMORY_S, Hysteresis, LinkEstimate, choose_relay, relay_wanted


def test_before_any_measurement() -> None:
    assert LinkEstimate().bandwidth == DEFAULT_BANDWIDTH == 125e6
    assert LinkEstimate().landing_ms(125_000_000) == pytest.approx(1000)
    assert LinkEstimate(25e6).landing_ms(25_000_000) == pytest.approx(1000)


def test_the_backlog_comes_first() -> None:
    link = LinkEstimate(1e6)
    link.queued(300_000)
    assert link.landing_ms(200_000) == pytest.approx(500)
    link.sent(100_000, 0.1)
    assert link.backlog == 200_000
    link.dropped(150_000)
    assert link.landing_ms(0) == pytest.approx(50)
    link.sent(1 << 30, 1.0)
    link.dropped(1)
    assert link.backlog == 0


def test_half_a_round_trip_is_added() -> None:
    assert LinkEstimate(1e6, rtt_s=0.04).landing_ms(0) == pytest.approx(20)


def test_the_measurement_replaces_the_default_and_stays_below_the_limit() -> None:
    link, limited = LinkEstimate(), LinkEstimate(1e6)
    for each in (link, limited):
        each.sent(50_000_000, 1.0)
    assert link.bandwidth == pytest.approx(50e6)
    assert limited.bandwidth == 1e6


def test_a_limited_link_that_is_slower_than_its_limit() -> None:
    link = LinkEstimate(1e6)
    link.sent(500_000, 1.0)
    assert link.bandwidth == pytest.approx(500_000)


def test_a_change_is_followed_within_seconds_of_sending() -> None:
    link = LinkEstimate()
    for _ in range(1000):
        link.sent(10_000_000, 0.1)
    assert link.bandwidth == pytest.approx(100e6)
    for _ in range(round(MEMORY_S / 0.1)):
        link.sent(1_000_000, 0.1)
    assert link.bandwidth == pytest.approx(55e6, rel=0.01)


def test_a_short_send_weighs_little() -> None:
    link = LinkEstimate()
    link.sent(100_000_000, 1.0)
    link.sent(1000, 0.000001)  # into a socket buffer: no bandwidth at all
    assert link.bandwidth == pytest.approx(100e6, rel=0.001)
    link.sent(0, 1.0)
    link.sent(1000, 0.0)
    assert link.bandwidth == pytest.approx(100e6, rel=0.001)


def test_threads() -> None:
    link = LinkEstimate()

    def work() -> None:
        for _ in range(2000):
            link.queued(3)
            link.sent(2, 1e-6)
            link.dropped(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert link.backlog == 0


def test_relay_wanted() -> None:
    assert relay_wanted("auto", True) and not relay_wanted("auto", False)
    assert relay_wanted("always", False) and not relay_wanted("never", True)
    with pytest.raises(ValueError, match="sometimes"):
        relay_wanted("sometimes", True)  # type: ignore[arg-type]


def test_choose_relay() -> None:
    assert choose_relay({}) is None
    assert choose_relay({"a": (4, 4), "b": (0, 0), "c": (5, 4)}) is None
    assert choose_relay({"a": (2, 4), "b": (3, 100)}) == "b"
    assert choose_relay({"b": (0, 4), "a": (0, 8)}) == "a"
    assert choose_relay({"a": (2, 4), "b": (1, 2)}) == "b"


def test_a_decision_that_does_not_flap() -> None:
    gate = Hysteresis(200.0)
    assert [gate.above(value) for value in (201, 199, 161, 160, 201, 240, 241, 200)] == [
        *(True, True, True),
        *(False, False, False),
        *(True, True),
    ]
    assert not Hysteresis(200.0).above(200.0)
    for threshold, band in ((-1.0, 0.1), (1.0, 1.0), (1.0, -0.1)):
        with pytest.raises(ValueError, match="band"):
            Hysteresis(threshold, band)
