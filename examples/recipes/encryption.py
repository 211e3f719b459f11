"""A codec that encrypts values: Kafka, its backups and Marq's pages see only ciphertext.

MESSAGE_KEYS has the keys, separated by commas, the newest first. Create one with
``python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'``.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

import marq


class Encrypted:
    """Encrypts the bytes of another codec with the first key, and decrypts with any of the keys."""

    def __init__(self, codec: marq.Codec, keys: Sequence[str]) -> None:
        self._codec = codec
        self._keys = MultiFernet([Fernet(key) for key in keys])

    def encode(self, value: Any) -> bytes:
        return self._keys.encrypt(self._codec.encode(value))

    def decode(self, data: bytes) -> Any:
        try:
            plain = self._keys.decrypt(data)
        except InvalidToken:
            # The message becomes a dead letter. A redrive delivers it after the missing key has been added.
            raise marq.DecodeError(f"the value ({len(data)} bytes) can't be decrypted with any key") from None
        return self._codec.decode(plain)

    def __repr__(self) -> str:
        """Errors show it, so it must not contain keys."""
        return f"Encrypted({self._codec!r})"


@dataclass
class Patient:
    name: str
    diagnosis: str


patients = Encrypted(marq.Model(Patient), os.environ["MESSAGE_KEYS"].split(","))


@marq.handler("patients", codec=patients)
async def admit(patient: Patient) -> None:
    """Error texts are stored in plain text, so they must not quote the value."""
    if not patient.name:
        raise marq.Reject("no name")
