"""`PddConfig`: what the flags ``--pdd-*`` and the environment ``PDD_*`` say. The command line wins."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_pdd.pacing import parse_rate

Role = Literal["prefill", "relay", "main"]
RelayPolicy = Literal["auto", "always", "never"]
Handoff = Literal["auto", "one-shot", "catch-up"]
WanTransport = Literal["stream", "engine"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9310
RADIX_CACHE = "pdd"  # MD's, in SGLang's registry
MAX_PASS = 2048  # tokens of one extend pass; a decode server plans activation memory for no more


class ConfigError(ValueError):
    """A configuration that cannot work; the text is one line: what, and what to do."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: ``--pdd-NAME`` on the command line, ``PDD_NAME`` in the environment."""

    field: str
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    roles: tuple[Role, ...] | None = None  # None: any

    @property
    def option(self) -> str:
        return "--pdd-" + self.field.replace("_", "-")

    @property
    def dest(self) -> str:
        return "pdd_" + self.field

    @property
    def variable(self) -> str:
        return "PDD_" + self.field.upper()


FLAGS = (
    Flag(
        "role",
        "What this server does. prefill computes prompts; relay, next to it, decodes while a prompt's KV cache crosses "
        "the WAN; main owns the requests and decodes nearly everything. Implies the stock flags that the role needs. "
        "Default: no role, and the plugin does nothing.",
        choices=get_args(Role),
    ),
    Flag(
        "host",
        "Address that this role's PDD socket binds to (a relay binds none). Anything but loopback needs --pdd-keys or "
        "--pdd-insecure. Default: --host.",
        metavar="HOST",
    ),
    Flag("port", f"Port that this role's PDD socket binds to. Default: {DEFAULT_PORT}.", metavar="PORT"),
    Flag(
        "advertise",
        "Address under which peers reach this role's PDD socket; never a wildcard. Default: --pdd-host.",
        metavar="HOST",
    ),
    Flag(
        "prefills",
        "Bootstrap addresses of the prefill servers to work with. A relay needs at least one; a main server also "
        "learns them from its requests.",
        metavar="HOST:PORT,...",
        roles=("relay", "main"),
    ),
    Flag(
        "relay_policy",
        "When to relay a request: auto, if its KV cache is predicted to land late; always; or never. Default: auto.",
        choices=get_args(RelayPolicy),
        roles=("prefill",),
    ),
    Flag(
        "relay_threshold_ms",
        "With the policy auto: relay a request whose KV cache will land later than this many milliseconds after "
        "prefill. Default: 200.",
        metavar="MS",
        roles=("prefill",),
    ),
    Flag(
        "wan_rate_limit",
        "Most that this prefill sends to main servers, as 1gbit, 500mbit, 125MB ... per second. Without --pdd-role it "
        "paces a stock prefill server, as a baseline. Default: no limit.",
        metavar="RATE",
        roles=("prefill",),
    ),
    Flag(
        "wan_transport",
        "How KV crosses the WAN. stream: scheduled, paced, cancellable streams of our own (docs/wan.md), if both sides "
        "have it; engine: SGLang's transfer engine, as inside a datacenter. Default: stream; engine where the KV pool "
        "is not host memory.",
        choices=get_args(WanTransport),
        roles=("prefill", "main"),
    ),
    Flag(
        "wan_port",
        "Port on which a main server's first rank takes KV streams; the next ranks take the next ones. Default: any "
        "free ports.",
        metavar="PORT",
        roles=("main",),
    ),
    Flag(
        "max_relays",
        "Most requests that this relay decodes at once. Default: 64. At most --max-running-requests, and what its pool "
        "has room for.",
        metavar="N",
        roles=("relay",),
    ),
    Flag(
        "handoff",
        "How a main server takes a relayed request over. one-shot recomputes the KV of all relayed tokens in one pass: "
        "the relay is free soonest. catch-up recomputes a few tokens a step while the relay goes on: nobody feels it. "
        "auto: one-shot if the relay is busy, else catch-up. Default: auto.",
        choices=get_args(Handoff),
        roles=("main",),
    ),
    Flag(
        "handoff_threshold",
        f"Tokens that a catch-up recomputes in one step, 1..{MAX_PASS}. Default: 64.",
        metavar="TOKENS",
        roles=("main",),
    ),
    Flag(
        "keys",
        "Folder of CURVE keys and TLS certificates, made by `sglang-pdd keys`: encrypts, and admits only peers whose "
        "public keys and certificates are in it.",
        metavar="DIR",
    ),
    Flag("insecure", "Allow a PDD socket without keys on an address that is not loopback. For isolated networks only."),
    Flag("timeline", "Append this role's events to a file, one JSON object a line. Default: off.", metavar="FILE"),
)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True, slots=True)
class PddConfig:
    """One process's PDD settings. ``validate`` raises `ConfigError`; the constructors only parse."""

    role: Role | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    advertise: str = DEFAULT_HOST
    prefills: tuple[str, ...] = ()  # bootstrap addresses, "host:port"
    relay_policy: RelayPolicy = "auto"
    relay_threshold_ms: float = 200.0
    wan_rate_limit: float | None = None  # bytes per second
    wan_transport: WanTransport | None = None  # None: stream, where the pool allows it
    wan_port: int | None = None
    max_relays: int | None = None
    handoff: Handoff = "auto"
    handoff_threshold: int = 64
    keys: str | None = None
    insecure: bool = False
    timeline: str | None = None

    @property
    def active(self) -> bool:
        """Whether the plugin has anything to do."""
        return self.role is not None or self.wan_rate_limit is not None

    @property
    def bind(self) -> str:
        """ZMQ address of this role's ROUTER."""
        return _tcp("*" if self.host == "" else self.host, self.port)

    @property
    def endpoint(self) -> str:
        """ZMQ address under which peers reach this role's ROUTER."""
        return _tcp(self.advertise, self.port)

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace, server_host: str) -> PddConfig:
        """From parsed flags, whose defaults `add_flags` took from the environment; ``server_host`` is ``--host``."""
        raw = {flag.field: getattr(namespace, flag.dest, _from_environ(flag)) for flag in FLAGS}
        return cls._parse(raw, server_host)

    @classmethod
    def from_env(cls, server_host: str = DEFAULT_HOST) -> PddConfig:
        return cls._parse({flag.field: _from_environ(flag) for flag in FLAGS}, server_host)

    def to_env(self) -> dict[str, str]:
        """Every variable, so that the child processes read exactly this; "" stands for not set."""
        env = {}
        for flag in FLAGS:
            value = getattr(self, flag.field)
            if flag.field == "wan_rate_limit":
                text = "" if value is None else f"{round(value * 8)}bit"
            elif isinstance(value, tuple):
                text = ",".join(value)
            elif isinstance(value, bool):
                text = "1" if value else ""
            else:
                text = "" if value is None else str(value)
            env[flag.variable] = text
        return env

    @classmethod
    def _parse(cls, raw: Mapping[str, Any], server_host: str) -> PddConfig:
        """``raw`` holds text, or None where nothing was said; "" is nothing, too."""
        given = {name: value for name, value in raw.items() if value not in (None, "", False)}
        host = given.get("host") or server_host
        values: dict[str, Any] = {"host": host, "advertise": given.get("advertise") or host}
        for flag in FLAGS:
            if flag.field in given and flag.field not in values:
                values[flag.field] = _parse_value(flag, given[flag.field])
        return cls(**values)

    def validate(self) -> None:
        """Raise `ConfigError` for the first thing that cannot work."""
        self._check_roles()
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--pdd-port {self.port}: expected 1..65535")
        for address in self.prefills:
            parse_address(address, "--pdd-prefills")
        if self.role == "relay" and not self.prefills:
            raise ConfigError("--pdd-role relay needs --pdd-prefills HOST:PORT,..., the prefills' bootstrap addresses")
        if not 0 <= self.relay_threshold_ms < float("inf"):
            raise ConfigError(f"--pdd-relay-threshold-ms {self.relay_threshold_ms:g}: expected 0 or more")
        if self.wan_rate_limit is not None and self.wan_rate_limit <= 0:
            raise ConfigError("--pdd-wan-rate-limit: expected more than 0")
        if self.wan_port is not None and not 1 <= self.wan_port <= 65535:
            raise ConfigError(f"--pdd-wan-port {self.wan_port}: expected 1..65535")
        if self.max_relays is not None and self.max_relays < 1:
            raise ConfigError(f"--pdd-max-relays {self.max_relays}: expected 1 or more")
        if not 1 <= self.handoff_threshold <= MAX_PASS:
            raise ConfigError(f"--pdd-handoff-threshold {self.handoff_threshold}: expected 1..{MAX_PASS}")
        if self.keys is not None and self.insecure:
            raise ConfigError("--pdd-keys and --pdd-insecure exclude one another: drop one")
        if self.keys is not None and not Path(self.keys).is_dir():
            raise ConfigError(f"--pdd-keys {self.keys}: no such folder; make it with `sglang-pdd keys`")
        if self.role in ("prefill", "main"):
            self._check_socket()
        self._check_prefills()
        if self.timeline is not None and not Path(self.timeline).parent.is_dir():
            raise ConfigError(f"--pdd-timeline {self.timeline}: its folder does not exist")

    def _check_prefills(self) -> None:
        """Prompts and tokens must not cross a network in clear unless somebody said so."""
        far = [a for a in self.prefills if not is_loopback(parse_address(a, "--pdd-prefills")[0])]
        if far and self.keys is None and not self.insecure:
            raise ConfigError(
                f"--pdd-prefills {far[0]} is not loopback: give --pdd-keys DIR, or --pdd-insecure where nobody listens"
            )

    def _check_roles(self) -> None:
        defaults = PddConfig()
        for flag in FLAGS:
            value, default = getattr(self, flag.field), getattr(defaults, flag.field)
            if flag.choices is not None and value is not None and value not in flag.choices:
                raise ConfigError(f"{flag.option} {value}: expected {' or '.join(flag.choices)}")
            if value == default or flag.field in ("role", "host", "advertise"):
                continue
            if self.role is None and flag.field != "wan_rate_limit":
                raise ConfigError(f"{flag.option} needs --pdd-role")
            if self.role is not None and flag.roles is not None and self.role not in flag.roles:
                raise ConfigError(
                    f"{flag.option} belongs to --pdd-role {' or '.join(flag.roles)}, but the role is {self.role}"
                )

    def _check_socket(self) -> None:
        if is_wildcard(self.advertise):
            if is_wildcard(self.host) and self.advertise == self.host:
                raise ConfigError(f"{self.host} is a wildcard: give --pdd-advertise HOST, as peers reach this server")
            raise ConfigError(f"--pdd-advertise {self.advertise}: peers cannot dial a wildcard")
        if self.keys is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} is not loopback: give --pdd-keys DIR (or --pdd-insecure on an isolated network)"
            )


assert {flag.field for flag in FLAGS} == {field.name for field in fields(PddConfig)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "PDD"; defaults come from the environment."""
    group = parser.add_argument_group(
        "PDD", "Prefill - RelayDecode - MainDecode (sglang-pdd). Each flag also as PDD_* in the environment."
    )
    for flag in FLAGS:
        text = flag.help.replace("%", "%%")
        if flag.field == "insecure":
            group.add_argument(flag.option, action="store_true", default=_from_environ(flag), help=text)
        else:
            # Text, parsed by PddConfig: one wording of errors for flags and environment.
            default = _from_environ(flag)
            metavar = flag.metavar or "{" + ",".join(flag.choices or ()) + "}"
            group.add_argument(flag.option, default=default, metavar=metavar, help=text)


def is_wildcard(host: str) -> bool:
    return host in ("", "*", "0.0.0.0", "::", "[::]")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or ``localhost``; other names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Split "host:port" ("[::1]:8998" for IPv6); raises `ConfigError`, which names ``what``."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not port.isdecimal() or not 1 <= int(port) <= 65535 or (":" in bare) != (bare != host):
        raise ConfigError(f"{what} {text}: expected HOST:PORT, or [HOST]:PORT for IPv6")
    return bare, int(port)


def _tcp(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _from_environ(flag: Flag) -> str | bool | None:
    text = os.environ.get(flag.variable, "").strip()
    if flag.field != "insecure":
        return text or None
    if text.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"{flag.variable}={text}: expected 1 or 0")
    return text.lower() in _TRUE


def _parse_value(flag: Flag, value: Any) -> Any:
    """Text -> the field's type; raises `ConfigError`."""
    if flag.field in ("port", "wan_port", "max_relays", "relay_threshold_ms", "handoff_threshold"):
        number, kind = (float, "number") if flag.field == "relay_threshold_ms" else (int, "whole number")
        try:
            return number(value)
        except ValueError:
            raise ConfigError(f"{flag.option} {value}: expected a {kind}") from None
    if flag.field == "wan_rate_limit":
        try:
            return parse_rate(value)
        except ValueError as error:
            raise ConfigError(f"{flag.option} {value}: {error}") from None
    if flag.field == "prefills":
        return tuple(part for part in str(value).replace(" ", "").split(",") if part)
    return value
