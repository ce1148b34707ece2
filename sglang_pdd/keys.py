"""Folders of keys: who a node is, and whom it talks to.

A node's folder holds ``secret.key`` (its own CURVE key pair) and ``peers/*.key`` (public keys: the allow-list), for
messages, in ZMQ's certificate format; and ``tls.key``, ``tls.crt`` and ``peers/*.crt``, for KV streams, in PEM.
Removing a node's two files from ``peers`` revokes it at the next start.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class KeysError(ValueError):
    """A keys folder that cannot be used; the text says why and what to do, in one line."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One node's keys, all in z85 (40 characters)."""

    public: str
    secret: str = field(repr=False)
    peers: frozenset[str]  # public keys that may connect, and that may be connected to

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Keys:
        """Read a node's folder.

        Raises:
            KeysError: missing or malformed files, a secret that others can read, or no peers.
        """
        path = Path(folder)
        secret_file = path / "secret.key"
        if not secret_file.is_file():
            inner = next((f.parent.name for f in sorted(path.glob("*/secret.key"))), None)
            hint = f"did you mean {path / inner}?" if inner else "make it with `sglang-pdd keys DIR --names ...`"
            raise KeysError(f"{secret_file} is missing: {hint}")
        mode = secret_file.stat().st_mode & 0o777
        if mode & 0o027:  # the group may read: that is how orchestrators mount secrets
            raise KeysError(f"{secret_file} has mode {mode:04o}, others can use it: chmod 600 {secret_file}")
        public, secret = _read(secret_file)
        if secret is None:
            raise KeysError(f"{secret_file} holds no secret key")
        if zmq.curve_public(secret.encode()).decode() != public:
            raise KeysError(f"{secret_file}: the public key does not belong to the secret key")
        peers = frozenset(_read(file)[0] for file in sorted((path / "peers").glob("*.key")))
        if not peers:
            raise KeysError(f"{path / 'peers'} holds no *.key: put the public keys of the other nodes there")
        return Keys(public, secret, peers)


def make(folder: str | os.PathLike[str], names: Sequence[str], *, force: bool = False) -> list[str]:
    """Make ``folder/<name>`` for each name, each with the public keys of all names. Returns the names newly made.

    Nodes that the folder has already are kept and learn the new keys, so that a node can be added, or with ``force`` be
    given a new key, by naming it alone; copy all folders to their machines again then. A folder without a TLS
    certificate (made by an older version) gets one.

    Raises:
        KeysError: a bad name, an existing secret that cannot be read, or no ``cryptography`` to make certificates with.
    """
    if not names or len(set(names)) != len(names):
        raise KeysError("give at least one name, and each only once")
    for name in names:
        if not _NAME.fullmatch(name):
            raise KeysError(f"bad name {name!r}: at most 64 letters, digits, '.', '_' and '-', not '.' or '-' first")
    others = sorted({file.parent.name for file in Path(folder).glob("*/secret.key")} - set(names))
    publics: dict[str, str] = {}
    certificates: dict[str, str] = {}
    made: list[str] = []
    for name in (*names, *others):
        secret_file = Path(folder) / name / "secret.key"
        renew = force and name in names
        if secret_file.exists() and not renew:
            publics[name] = _read(secret_file)[0]
            certificates[name] = _certify(secret_file.parent, name, renew)
            continue
        public, secret = (key.decode() for key in zmq.curve_keypair())
        secret_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        certificates[name] = _certify(secret_file.parent, name, renew)
        _write(secret_file, _certificate(name, public, secret), 0o600)
        publics[name] = public
        made.append(name)
    for name in publics:
        peers = Path(folder) / name / "peers"
        peers.mkdir(exist_ok=True)
        for other, public in publics.items():
            _write(peers / f"{other}.key", _certificate(other, public, None), 0o644)
            _write(peers / f"{other}.crt", certificates[other], 0o644)
    return made


def _certify(folder: Path, name: str, renew: bool) -> str:
    """The node's TLS certificate, in PEM; made with its key if it is not there."""
    key_file, certificate_file = folder / "tls.key", folder / "tls.crt"
    if key_file.exists() and certificate_file.exists() and not renew:
        return certificate_file.read_text()
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise KeysError("TLS certificates need the package cryptography: pip install cryptography") from None
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1))  # clocks differ, and keys end by revocation, not by date
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain).decode()
    text = certificate.public_bytes(pem).decode()
    _write(key_file, secret, 0o600)
    _write(certificate_file, text, 0o644)
    return text


def _certificate(name: str, public: str, secret: str | None) -> str:
    lines = [f"# sglang-pdd: {'SECRET' if secret else 'public'} key of {name}", "metadata", "curve"]
    lines.append(f'    public-key = "{public}"')
    if secret:
        lines.append(f'    secret-key = "{secret}"')
    return "\n".join(lines) + "\n"


def _write(file: Path, text: str, mode: int) -> None:
    # Through a new file of the right mode, so that a secret is neither readable nor half-written for an instant.
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "w") as out:
        out.write(text)
    os.replace(draft, file)


def _read(file: Path) -> tuple[str, str | None]:
    try:
        public, secret = zmq.auth.load_certificate(file)
        for key in (public, secret):
            if key is not None and (len(key) != 40 or len(z85.decode(key)) != 32):
                raise ValueError("not a z85 key of 40 characters")
        return public.decode(), None if secret is None else secret.decode()
    except (OSError, ValueError, KeyError) as error:
        raise KeysError(f"{file}: {error}") from None
