"""The credentials of Faust's own clients."""

from __future__ import annotations

from faust.auth import OAuthCredentials, SASLCredentials, SSLCredentials

from marq.kafka.token_logins import tokens_of
from marq.settings.client import ClientSettings


def credentials(client: ClientSettings) -> OAuthCredentials | SASLCredentials | SSLCredentials | None:
    """Return the credentials of Faust's own clients."""
    encrypted = client.security_protocol.endswith("SSL")
    if (tokens := tokens_of(client)) is not None:
        return OAuthCredentials(oauth_cb=tokens, ssl_context=client.ssl_context if encrypted else None)
    if client.security_protocol.startswith("SASL"):
        return SASLCredentials(
            username=client.sasl_username,
            password=client.sasl_password,
            mechanism=client.sasl_mechanism,
            ssl_context=client.ssl_context if encrypted else None,
        )
    return SSLCredentials(client.ssl_context) if encrypted else None
