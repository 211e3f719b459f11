"""A web service that sends messages: ``uvicorn examples.fastapi_service:app --port 8000``.

``curl -i 127.0.0.1:8000/emails --json '{"to": "ann@example.org", "subject": "Hello"}'``
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, status
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import marq


class Email(BaseModel):
    to: str
    subject: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # One producer for all requests of the process; a request waits at most request_timeout for it.
    async with marq.Producer(codec=marq.JSON, request_timeout=5) as producer:
        app.state.producer = producer
        yield


app = FastAPI(title="Emails", lifespan=lifespan)


@app.post("/emails", status_code=status.HTTP_202_ACCEPTED)
async def accept(email: Email, request: Request) -> dict[str, str]:
    """The message is durable, so a handler will send the email."""
    receipt = await request.app.state.producer.send("emails", email)
    return {"id": receipt.id}


@app.exception_handler(marq.BrokerUnavailable)
async def unavailable(request: Request, error: marq.BrokerUnavailable) -> JSONResponse:
    # Unknown whether it was sent. The client retries, so an email may be sent twice, but is never lost.
    return JSONResponse(
        {"detail": "not known to be accepted, try again"},
        status_code=status.HTTP_503_SERVICE_UNAVAILABLE,
        headers={"Retry-After": "5"},
    )


@app.get("/healthz")
async def health() -> dict[str, str]:
    """The process reconnects to the broker by itself, so a restart would not help."""
    return {"status": "ok"}
