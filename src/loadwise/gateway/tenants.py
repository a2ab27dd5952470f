"""Whose request it is, told by its API key; the key itself is written nowhere.

A tenant's label is a hash under a secret that lies beside the journal: who reads a journal without the secret cannot
try keys on it. Where the gateway checks keys, a program belongs to the key that opened it. Where it checks none, all
clients are one trust domain: labels are then only journaled.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from loadwise.kernel.errors import JournalError

SECRET_NAME = "tenant.key"
SECRET_BYTES = 32
_KNOWN_MAX = 4096
_KNOWN_MAX_BYTES = 512


class Tenants:
    """Labels for keys, and who may see whose programs.

    Args:
        secret: under which labels are made.
        keys: API keys that let a client in; empty lets everybody in, and divides nobody.
    """

    def __init__(self, secret: bytes, keys: tuple[str, ...] = ()) -> None:
        self.keys = tuple(key.encode() for key in keys)
        self._secret = secret
        self._label_by_authorization: dict[bytes, str] = {}

    def of(self, headers: Mapping[bytes, bytes]) -> str:
        """The label of a request's key, sixteen hexadecimal digits; empty where it has none."""
        said = headers.get(b"authorization")
        if said is None:
            return ""
        label = self._label_by_authorization.get(said)
        if label is None:
            label = hashlib.blake2b(key_of(headers), key=self._secret, digest_size=8).hexdigest()
            if len(self._label_by_authorization) >= _KNOWN_MAX:
                self._label_by_authorization.clear()
            if len(said) <= _KNOWN_MAX_BYTES:
                self._label_by_authorization[said] = label
        return label

    def may_use(self, tenant: str, owner: str) -> bool:
        """Whether a tenant may use a program that `owner` opened; one that was opened without a key is anybody's."""
        return not self.keys or owner in ("", tenant)


def key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The key of a request, however its scheme is written; empty where it has none."""
    said = headers.get(b"authorization", b"")
    scheme, _, key = said.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else said


def read_secret(folder: Path | None) -> bytes:
    """The secret beside a journal, made at the first start; without a journal it lives as long as the process.

    Raises:
        JournalError: it cannot be read or made, or is not ours.
    """
    if folder is None:
        return os.urandom(SECRET_BYTES)
    path = folder / SECRET_NAME
    try:
        if not path.exists():
            _make_secret(path)
        secret = path.read_bytes()
    except OSError as error:
        raise JournalError(f"the tenants' secret {str(path)!r} cannot be read or made: {error}") from error
    if len(secret) != SECRET_BYTES:
        text = f"the tenants' secret {str(path)!r} has {len(secret)} bytes; it must have {SECRET_BYTES}"
        raise JournalError(f"{text}. Without it programs are nobody's whose key is known; remove it to begin anew")
    return secret


def _make_secret(path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, os.urandom(SECRET_BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
