"""Handlers of the service."""

import logging

import marq

log = logging.getLogger(__name__)


@marq.handler("greetings")
async def greet(name: str) -> None:
    log.info("Hello, %s!", name)
