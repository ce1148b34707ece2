import argparse

import pytest

from sglang_pdd.config import FLAGS, ConfigError, PddConfig, add_flags, is_loopback, is_wildcard, parse_address


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for flag in FLAGS:
        monkeypatch.delenv(flag.variable, raising=False)


def parse(*argv: str, host: str = "127.0.0.1") -> PddConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return PddConfig.from_namespace(parser.parse_args(argv), host)


def refused(*argv: str, host: str = "127.0.0.1") -> str:
    config = parse(*argv, host=host)
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--pdd-role", "relay", "--pdd-prefills", "127.0.0.1:1", "--pdd-wan-transport", "engine"], "belongs to"),
        (["--pdd-role", "main", "--pdd-wan-transport", "nixl"], "expected stream or engine"),
        (["--pdd-role", "prefill", "--pdd-wan-port", "9400"], "belongs to --pdd-role main"),
        (["--pdd-role", "main", "--pdd-wan-port", "0"], "expected 1..65535"),
        (["--pdd-role", "main", "--pdd-wan-port", "x"], "whole number"),
    ],
)
def test_streams_that_cannot_be(options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(*options).validate()


def test_off_by_default():
    config = parse()
    config.validate()
    assert config == PddConfig()
    assert not config.active


@pytest.mark.parametrize(
    "argv",
    [
        ["--pdd-role", "prefill"],
        ["--pdd-role", "prefill", "--pdd-wan-rate-limit", "1gbit", "--pdd-relay-policy", "never"],
        ["--pdd-role", "main", "--pdd-port", "1234", "--pdd-handoff", "one-shot", "--pdd-timeline", "t.jsonl"],
        ["--pdd-role", "main", "--pdd-prefills", "a:1", "--pdd-insecure"],
        ["--pdd-role", "relay", "--pdd-prefills", "127.0.0.1:1, [::1]:2", "--pdd-max-relays", "4"],
        ["--pdd-role", "prefill", "--pdd-host", "0.0.0.0", "--pdd-advertise", "10.0.0.1", "--pdd-insecure"],
        ["--pdd-role", "prefill", "--pdd-host", "::1"],
        ["--pdd-wan-rate-limit", "100mbit"],
    ],
)
def test_accepted_and_carried_to_child_processes(argv, monkeypatch):
    config = parse(*argv)
    config.validate()
    assert config.active
    for name, value in config.to_env().items():
        monkeypatch.setenv(name, value)
    assert PddConfig.from_env("203.0.113.1") == config


def test_values():
    config = parse("--pdd-role", "relay", "--pdd-prefills", "a:1, b:2,", "--pdd-max-relays", "4")
    assert config.prefills == ("a:1", "b:2")
    assert config.max_relays == 4
    assert parse("--pdd-wan-rate-limit", "1gbit").wan_rate_limit == 125e6


def test_host_defaults_to_the_servers_and_advertise_to_host():
    config = parse("--pdd-role", "main", host="10.0.0.7")
    assert (config.bind, config.endpoint) == ("tcp://10.0.0.7:9310", "tcp://10.0.0.7:9310")
    config = parse("--pdd-role", "main", "--pdd-host", "::", "--pdd-advertise", "2001:db8::1", host="10.0.0.7")
    assert (config.bind, config.endpoint) == ("tcp://[::]:9310", "tcp://[2001:db8::1]:9310")


def test_environment_and_command_line_wins(monkeypatch):
    monkeypatch.setenv("PDD_ROLE", "prefill")
    monkeypatch.setenv("PDD_PORT", "7000")
    monkeypatch.setenv("PDD_INSECURE", "1")
    assert PddConfig.from_env() == parse()
    assert PddConfig.from_env().port == 7000
    assert PddConfig.from_env().insecure
    config = parse("--pdd-role", "main", "--pdd-port", "7001")
    assert (config.role, config.port) == ("main", 7001)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pdd-role", "relay"], "needs --pdd-prefills"),
        (["--pdd-role", "relay", "--pdd-prefills", "nowhere"], "--pdd-prefills nowhere: expected HOST:PORT"),
        (["--pdd-role", "relay", "--pdd-prefills", "a:0"], "expected HOST:PORT"),
        (["--pdd-role", "relay", "--pdd-prefills", "a:1"], "a:1 is not loopback: give --pdd-keys DIR"),
        (["--pdd-role", "main", "--pdd-timeline", "/no/such/folder/t.jsonl"], "its folder does not exist"),
        (["--pdd-role", "prefil"], "--pdd-role prefil: expected prefill or relay or main"),
        (["--pdd-role", "prefill", "--pdd-prefills", "a:1"], "belongs to --pdd-role relay or main"),
        (["--pdd-role", "main", "--pdd-relay-policy", "never"], "belongs to --pdd-role prefill"),
        (["--pdd-role", "main", "--pdd-relay-threshold-ms", "5"], "belongs to --pdd-role prefill"),
        (["--pdd-role", "main", "--pdd-wan-rate-limit", "1gbit"], "belongs to --pdd-role prefill"),
        (["--pdd-role", "main", "--pdd-max-relays", "3"], "belongs to --pdd-role relay"),
        (["--pdd-role", "prefill", "--pdd-relay-threshold-ms", "-1"], "expected 0 or more"),
        (["--pdd-role", "prefill", "--pdd-relay-threshold-ms", "nan"], "expected 0 or more"),
        (["--pdd-role", "relay", "--pdd-prefills", "a:1", "--pdd-max-relays", "0"], "expected 1 or more"),
        (["--pdd-role", "main", "--pdd-port", "70000"], "expected 1..65535"),
        (["--pdd-role", "main", "--pdd-host", "0.0.0.0"], "0.0.0.0 is a wildcard: give --pdd-advertise"),
        (["--pdd-role", "main", "--pdd-advertise", "::"], "cannot dial a wildcard"),
        (["--pdd-role", "main", "--pdd-host", "10.0.0.1"], "not loopback: give --pdd-keys"),
        (["--pdd-role", "main", "--pdd-keys", "/", "--pdd-insecure"], "exclude one another"),
        (["--pdd-role", "main", "--pdd-keys", "/no/such/folder"], "no such folder"),
        (["--pdd-port", "1234"], "--pdd-port needs --pdd-role"),
        (["--pdd-wan-rate-limit", "1gbit", "--pdd-insecure"], "--pdd-insecure needs --pdd-role"),
    ],
)
def test_refused(argv, words):
    assert words in refused(*argv)


def test_the_servers_address_counts_too():
    assert "wildcard" in refused("--pdd-role", "prefill", host="0.0.0.0")
    assert "not loopback" in refused("--pdd-role", "prefill", host="10.0.0.1")
    parse("--pdd-role", "relay", "--pdd-prefills", "localhost:1", host="0.0.0.0").validate()  # a relay binds nothing


@pytest.mark.parametrize("argv", [["--pdd-port", "x"], ["--pdd-wan-rate-limit", "fast"], ["--pdd-max-relays", "1.5"]])
def test_unreadable(argv):
    with pytest.raises(ConfigError, match=argv[0]):
        parse(*argv)


@pytest.mark.parametrize(("name", "value"), [("PDD_ROLE", "no"), ("PDD_RELAY_POLICY", "maybe"), ("PDD_INSECURE", "2")])
def test_bad_environment(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=value):
        PddConfig.from_env().validate()


def test_help_names_every_flag():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    assert "PDD:" in text
    assert all(flag.option in text for flag in FLAGS)


def test_addresses():
    assert parse_address("a.example:8998", "x") == ("a.example", 8998)
    assert parse_address("[::1]:8998", "x") == ("::1", 8998)
    for bad in ("", ":1", "a", "a:", "a:b", "::1:8998", "a:99999", "[a]:1"):
        with pytest.raises(ConfigError):
            parse_address(bad, "x")
    assert all(map(is_wildcard, ("", "*", "0.0.0.0", "::")))
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example.org", "")))
