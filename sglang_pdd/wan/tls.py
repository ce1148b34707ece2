"""TLS 1.3 between nodes that have each other's certificates: self-signed, pinned, no authority, no names, no expiry."""

from __future__ import annotations

import hmac
import os
import ssl
from pathlib import Path

from sglang_pdd.keys import KeysError

CERTIFICATE, PRIVATE_KEY = "tls.crt", "tls.key"


class Identity:
    """A node's certificate and the certificates that it trusts, from its keys folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read ``tls.crt``, ``tls.key`` and ``peers/*.crt``.

        Raises:
            KeysError: missing or malformed files, a key that others can read, or no peers.
        """
        path = Path(folder)
        certificate, key = path / CERTIFICATE, path / PRIVATE_KEY
        for file in (certificate, key):
            if not file.is_file():
                raise KeysError(f"{file} is missing: run `sglang-pdd keys` again, it adds what older folders lack")
        if key.stat().st_mode & 0o027:
            raise KeysError(f"{key} can be read or changed by others: chmod 600 {key}")
        self._peers: dict[bytes, str] = {}
        for file in sorted((path / "peers").glob("*.crt")):
            try:
                self._peers[ssl.PEM_cert_to_DER_cert(file.read_text())] = file.stem
            except ValueError as error:
                raise KeysError(f"{file}: {error}") from None
        if not self._peers:
            raise KeysError(f"{path / 'peers'} holds no *.crt: put the certificates of the other nodes there")
        try:
            self.client = self._context(ssl.PROTOCOL_TLS_CLIENT, certificate, key)
            self.server = self._context(ssl.PROTOCOL_TLS_SERVER, certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise KeysError(f"{certificate} and {key} cannot be used: {error}") from None

    def peer(self, der: bytes | None) -> str | None:
        """The name under which this very certificate is trusted, or None."""
        found = None
        for known, name in self._peers.items():
            if der is not None and hmac.compare_digest(known, der):
                found = name
        return found

    def _context(self, protocol: int, certificate: Path, key: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a certificate stands for a node, wherever it is
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(cadata=b"".join(self._peers))
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # streams last, sessions are not resumed
        return context
