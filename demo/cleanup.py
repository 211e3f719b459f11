"""Takes the topics of a run away from a broker that goes on: an embedded one goes as a whole."""

from __future__ import annotations

import asyncio

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.connection import client_options
from marq.settings import ClientSettings

LIMIT_SECONDS = 10.0


async def delete_topics(settings: ClientSettings) -> str | None:
    """Delete all topics of an installation; return why that was not possible, or None."""
    admin = AIOKafkaAdminClient(**client_options(settings))
    prefix = settings.names.prefix
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            await admin.start()
            found = [name for name in await admin.list_topics() if name.startswith((f"{prefix}.", f"{prefix}-"))]
            if found:
                await admin.delete_topics(found)
    except (KafkaError, OSError, TimeoutError) as error:
        return f"topics {prefix}.* could not be deleted: {error!r}"
    finally:
        await admin.close()
    return None
