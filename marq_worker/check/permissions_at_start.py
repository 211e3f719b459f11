"""The permissions that a worker needs at its start."""

from __future__ import annotations

import asyncio
import logging

from aiokafka.errors import KafkaError

from marq.kafka.connection import admin_client
from marq.kafka.role_permissions import missing_permissions
from marq.settings.client import ClientSettings
from marq_worker.check.cluster import ClusterView
from marq_worker.check.permissions import WORKER, Allowed, Use, missing
from marq_worker.check.topics import topics_of

log = logging.getLogger("marq.worker")


async def ensure_permissions(client: ClientSettings, use: Use) -> None:
    """Check that the principal has all permissions of a worker, as far as brokers report them.

    Otherwise a missing permission would show as a partition without owner, or as a traceback of Faust. Raises Forbidden
    with the commands that grant the missing ones.
    """
    async with admin_client(client) as admin:
        try:
            async with asyncio.timeout(client.connect_timeout_ms / 1000):
                allowed = await _allowed(ClusterView(admin, client), client, use)
        except (KafkaError, TimeoutError) as error:
            # The start itself will report it.
            log.debug("cannot read the permissions: %r", error)
            return
    lacking = missing(client, WORKER, use, allowed)
    if lacking:
        raise missing_permissions(client, lacking)


async def _allowed(view: ClusterView, client: ClientSettings, use: Use) -> Allowed:
    names = client.names
    groups = [*([names.app_id] if use.tracker else []), *([names.backlog] if use.tracker and use.backlog else [])]
    groups += use.handled_groups
    ids = {names.transactional_ids: names.transactional_id(0)} if use.tracker else {}
    if use.transactional:
        ids[names.start_ids] = names.start_id(names.group("check"), "check")
    return Allowed(
        await view.allowed_on_topics([*topics_of(names, changelog=use.tracker), *use.own_topics]),
        {group: (await view.group(group)).allowed for group in groups},
        {prefix: await view.may_transact(transactional_id) for prefix, transactional_id in ids.items()},
    )
