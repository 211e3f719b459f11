"""Reads the bodies of requests within limits of size, time and memory.

A signature covers the body, so it can be verified only once the whole body has arrived. Until then, a client is
unknown.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11
from aiohttp.web import BaseRequest

from marq_worker.sqs.errors import SqsError, invalid

#: Enough for a batch of 1 MiB, even if JSON escapes each character with six bytes.
MAX_BODY_BYTES = 8 << 20
#: Limit of all bodies that are being read, together.
MAX_ALL_BYTES = 256 << 20
#: How long a client may take to send a body.
BODY_S = 60.0


class Bodies:
    """The bodies that clients are sending.

    Args:
        limit_s: the time limit of a body, in seconds (default 60).
        all_bytes: the limit of all bodies together (default 256 MiB).
    """

    def __init__(self, limit_s: float = BODY_S, all_bytes: int = MAX_ALL_BYTES) -> None:
        self._limit_s = limit_s
        self._all_bytes = all_bytes
        self._bytes = 0

    async def read(self, request: BaseRequest) -> bytes:
        """Return the body of a request. Raises SqsError if it exceeds a limit."""
        parts: list[bytes] = []
        size = 0
        _check_size(request.content_length or 0)
        if request.content.is_eof():
            # It arrived with the headers, as most do; a time limit would cost more than everything else here.
            _check_size(len(body := await request.content.read()))
            return body
        try:
            async with asyncio.timeout(self._limit_s):
                await _continue(request)
                async for part in request.content.iter_any():
                    size += len(part)
                    self._bytes += len(part)
                    _check_size(size)
                    if self._bytes > self._all_bytes:
                        raise SqsError("ServiceUnavailable", "too many large requests at the same time; try again")
                    parts.append(part)
            return b"".join(parts)
        except TimeoutError:
            raise SqsError("RequestTimeout", f"the body did not arrive within {self._limit_s:g} s") from None
        finally:
            self._bytes -= size


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise invalid(f"the request has more than {MAX_BODY_BYTES} bytes")


async def _continue(request: BaseRequest) -> None:
    """Answer ``Expect: 100-continue``; otherwise the client would send the body only after a second or longer."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The bytes of the answer are counted from here.
        request.writer.output_size = 0
