"""Connections to brokers: aiokafka's own, without two of its defects.

* To reject a token, a broker sends a document, and then an error when the client has replied with one control-A (RFC
  7628). aiokafka 0.14 does not reply, and treats the document as a success. The next request fails without a reason.
* If a connection has just broken, a write on uvloop raises RuntimeError. aiokafka 0.14 expects an OSError. The
  RuntimeError ends the task that sends the client's metadata requests, so the client never learns that the broker is
  back (aiokafka issue 1038). Web frameworks often run on uvloop, and so do all processes of a worker.
"""

from __future__ import annotations

from typing import Any

from aiokafka.conn import AIOKafkaConnection, CloseReason, OAuthAuthenticator


class _TokenLogin(OAuthAuthenticator):  # type: ignore[misc]
    async def step(self, payload: bytes | None) -> Any:
        return (b"\x01", True) if payload else await super().step(payload)


class _Connection(AIOKafkaConnection):  # type: ignore[misc]
    def authenticator_oauth(self) -> _TokenLogin:
        return _TokenLogin(sasl_oauth_token_provider=self._sasl_oauth_token_provider)

    def send(self, request: Any, expect_response: bool = True) -> Any:
        self._close_broken()
        return super().send(request, expect_response)

    def _send_sasl_token(self, payload: bytes, expect_response: bool = True) -> Any:
        self._close_broken()
        return super()._send_sasl_token(payload, expect_response)

    def _close_broken(self) -> None:
        """Close a broken connection: aiokafka then raises KafkaConnectionError instead of writing to it."""
        if self._writer is not None and self._writer.transport.is_closing():
            self.close(reason=CloseReason.CONNECTION_BROKEN)


async def open_connection(host: str, port: int, **options: Any) -> AIOKafkaConnection:
    """Open a connection and log in, as aiokafka's ``create_conn``."""
    connection = _Connection(host, port, **options)
    await connection.connect()
    return connection
