"""What a worker looks at before it starts: whether it may do all that it will have to do.

Without it, a missing right shows as a partition that nobody takes over, or as an error of Faust's with a traceback.
"""

from __future__ import annotations

import asyncio
import logging

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from app.checkup.cluster import ClusterView
from app.checkup.rights import WORKER, Allowed, Use, missing
from app.checkup.topics import topics_of
from marq.connection import client_options, close_admin, started
from marq.rights import missing_rights
from marq.settings import ClientSettings

log = logging.getLogger("marq.worker")


async def ensure_rights(client: ClientSettings, use: Use) -> None:
    """Look whether the principal of the settings has all rights of a worker, as far as brokers tell.

    Raises:
        Forbidden: some are missing; the text has the commands that grant them.
        BrokerUnavailable: no broker could be used in time.
    """
    admin = await started(lambda: AIOKafkaAdminClient(**client_options(client)), client, close_admin)
    try:
        async with asyncio.timeout(client.connect_timeout_ms / 1000):
            allowed = await _allowed(ClusterView(admin, client), client, use)
    except (KafkaError, TimeoutError) as error:
        # Then the start itself will say more.
        log.debug("rights could not be looked at: %r", error)
        return
    finally:
        await close_admin(admin)
    lacking = missing(client, WORKER, use, allowed)
    if lacking:
        raise missing_rights(client, lacking)


async def _allowed(view: ClusterView, client: ClientSettings, use: Use) -> Allowed:
    names = client.names
    groups = [*([names.app_id] if use.tracker else []), *([names.census] if use.tracker and use.census else [])]
    groups += use.handled_groups
    return Allowed(
        await view.allowed_on_topics([*topics_of(names, changelog=use.tracker), *use.own_topics]),
        {group: (await view.group(group)).allowed for group in groups},
        {names.transactional_ids: await view.may_transact(names.transactional_id(0))} if use.tracker else {},
    )
