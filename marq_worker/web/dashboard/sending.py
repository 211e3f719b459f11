"""Messages that operators send from pages: test messages, and edited copies of dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marq.client.dead_letter import DeadLetter
from marq.dead_letters.dead_letters import DeadLetters
from marq.producer.producer import Producer
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError, MarqError
from marq.wire.record_headers import ordering_key
from marq_worker.readable import read_duration
from marq_worker.redaction import Redaction

#: Largest payload that can be edited on a page.
MAX_EDITED_BYTES = 65_536


class OperatorSender:
    """Sends messages, each with a producer of its own, because that is rare. All methods raise MarqError."""

    def __init__(self, client: ClientSettings, dead_letters: DeadLetters, redaction: Redaction) -> None:
        self._client = client
        self._dead_letters = dead_letters
        self._redaction = redaction

    async def send(self, queue: str, form: Mapping[str, str]) -> dict[str, Any]:
        """Send a message to a queue; return its id and size for the audit log, without its content."""
        options: dict[str, Any] = {"headers": read_headers(form.get("headers", ""))}
        if delay := form.get("delay", "").strip():
            if (delay_s := read_duration(delay)) is None:
                raise ConfigError(f"delay={delay}: expected a duration such as 90s, 15m, 2h or 7d")
            options["delay"] = delay_s
        if message_type := form.get("type", "").strip():
            options["type"] = message_type
        if key := form.get("ordering_key", ""):
            options["ordering_key"] = key
        return await self._send(queue, lines(form.get("value", "")), options)

    async def editable(self, queue: str, message_id: str) -> str:
        """Return the payload of a dead letter for a text field."""
        letter = await self._letter(queue, message_id)
        return self._text(letter)

    async def resend(self, queue: str, message_id: str, form: Mapping[str, str]) -> dict[str, Any]:
        """Send a dead letter with another payload as a new message, with the same headers and ordering key.

        Afterwards the dead letter is deleted, unless the form has ``keep``: an error in between leaves both.
        """
        letter = await self._letter(queue, message_id)
        # Refuse it here, too: the text may have lost something on its way through the page.
        self._text(letter)
        if "value" not in form:
            raise ConfigError(f"dead letter {message_id}: the form has no value, so nothing was sent")
        options: dict[str, Any] = {"headers": letter.headers, "type": letter.type}
        if (key := ordering_key(letter._record.headers)) is not None:
            options["ordering_key"] = key
        sent = await self._send(form.get("to") or queue, lines(form["value"]), options)
        if form.get("keep"):
            return sent
        try:
            deleted = await self._dead_letters.delete(queue, id=[message_id])
        except MarqError as error:
            raise MarqError(
                f"the message was sent as {sent['sent']}, but it is unknown whether dead letter {message_id} was"
                f" deleted: {error}"
            ) from error
        return {**sent, "deleted": deleted.done}

    async def _send(self, queue: str, text: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send_value(queue, text.encode("utf-8", "surrogateescape"), options)

    async def send_value(self, queue: str, value: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
        """Send bytes with the options of :meth:`marq.Producer.send`; return their id for the audit log."""
        async with Producer.of(self._client) as producer:
            receipt = await producer.send(queue, value, **options)
        return {"sent": receipt.id, "to": queue, "bytes": len(value)}

    async def _letter(self, queue: str, message_id: str) -> DeadLetter:
        await self._dead_letters.start()
        async for letter in self._dead_letters.peek(queue, limit=1, id=message_id):
            return letter
        raise ConfigError(
            f"message {message_id} is not a dead letter of queue {queue} any more: it was redriven, deleted or removed"
            " by retention, so nothing was sent"
        )

    def _text(self, letter: DeadLetter) -> str:
        """Return a payload as text. Raises ConfigError if a page could not send it back as it is."""
        body = letter.body
        what = f"the payload of dead letter {letter.id} can't be edited on a page, because"
        if len(body) > MAX_EDITED_BYTES:
            raise ConfigError(f"{what} it has {len(body):,} bytes (at most {MAX_EDITED_BYTES:,}); redrive it unchanged")
        if self._redaction.hides(body):
            raise ConfigError(f"{what} MARQ_REDACT hides parts of it; redrive it unchanged, or use marq send")
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{what} it is not UTF-8; redrive it unchanged, or use marq send") from None
        if "\r" in text or "\0" in text:
            # Browsers change them in text fields.
            raise ConfigError(f"{what} it has carriage returns or NULs; redrive it unchanged, or use marq send")
        return text


def lines(text: str) -> str:
    """Return the content of a text field, whose line ends browsers send as CRLF."""
    return text.replace("\r\n", "\n")


def read_headers(text: str) -> dict[str, str]:
    """Parse headers, one per line as ``name: value``."""
    headers: dict[str, str] = {}
    for line in filter(None, map(str.strip, lines(text).split("\n"))):
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or name.strip() in headers:
            raise ConfigError(f"header {line!r}: expected `name: value`, each name once on a line of its own")
        headers[name.strip()] = value.strip()
    return headers
