"""Connections to brokers: aiokafka's own, without two of its defects.

* A broker refuses a token with a document, and sends an error after the reply of one control-A (RFC 7628). aiokafka
  0.14 does not reply, and takes the document for a success: the next request fails without a reason.
* If a connection has just broken, uvloop answers a write with a RuntimeError. aiokafka 0.14 expects an OSError; the
  RuntimeError ends the task that sends its client's metadata requests, and the client never learns that the broker is
  back (aiokafka issue 1038). Web frameworks often run on uvloop, and so do some of Marq's own processes.
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
