"""What to say when the broker refuses for want of a right: which one, and the command that grants it."""

from __future__ import annotations

from marq.core.errors import ConfigError
from marq.settings import ClientSettings


def missing_right(settings: ClientSettings, operation: str, topic: str) -> ConfigError:
    """Return the error for a right on a topic that this client's principal does not have."""
    principal = f"User:{settings.sasl_username or 'NAME'}"
    return ConfigError(
        f"topic {topic}: {principal} has no right to {operation.lower()} it. An administrator grants it with:"
        f" kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add --allow-principal {principal}"
        f" --operation {operation} --topic {topic}"
    )
