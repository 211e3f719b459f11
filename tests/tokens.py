"""Token providers for brokers that accept unsigned tokens; subprocesses use them by path, too."""

from __future__ import annotations

import base64
import json
import os
import time


def token(name: str, seconds: float = 3600.0) -> str:
    """Return an unsigned token (JWT) of a user that expires after ``seconds``."""
    # A broker may read its clock in whole milliseconds: a token from this very moment would be from the future.
    now_s = time.time() - 1
    parts = ({"alg": "none"}, {"sub": name, "iat": now_s, "exp": now_s + 1 + seconds})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def from_environment() -> str:
    """Return a token as the variables say, and note it."""
    if journal := os.environ.get("TOKEN_JOURNAL"):
        with open(journal, "a") as file:  # noqa: PTH123 - a line at a time, also from several processes
            file.write("token\n")
    return token(os.environ["TOKEN_USER"], float(os.environ.get("TOKEN_SECONDS", "3600")))
