"""Handlers of the service."""

import logging

import marq

log = logging.getLogger(__name__)


@marq.handler("greetings")
async def greet(message: marq.Message) -> None:
    log.info("Hello, %s!", message.value.decode())
