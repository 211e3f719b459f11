"""Examines a namespace: collects facts from this machine and from the cluster, and judges them.

It joins no group, creates no topic and uses no transactional id. It writes one record without a value to the queues
topic; readers ignore this record, and compaction removes it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout, ConnectionTimeoutError

from marq.client.threads import in_thread
from marq.dead_letters.selection import CountKey
from marq.kafka.connection import plain_admin
from marq.kafka.connection_diagnosis import find_obstacle
from marq.kafka.inspector import Inspector
from marq.kafka.topics import Look, planned
from marq.settings.client import MEMORY_SCHEME, ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import MarqError
from marq_worker.check import machine
from marq_worker.check.brokers import judge_apis, judge_clock
from marq_worker.check.cluster import ClusterView, GroupFacts, Published
from marq_worker.check.consumers import (
    ReadingGroup,
    counted,
    ended_processes,
    judge_backlogs,
    judge_large_messages,
    judge_partitions,
    judge_reading,
    judge_retention,
    queues_of,
    unhandled,
    with_large_messages,
)
from marq_worker.check.permissions import WORKER, Allowed, Operations, Use, judge_permissions
from marq_worker.check.queues import (
    groups_of,
    judge_defined,
    judge_handlers,
    judge_keys,
    judge_limits,
    judge_own_topics,
    judge_priorities,
    judge_unreadable,
    look_at_file,
    with_file,
    with_keys,
)
from marq_worker.check.topics import judge_missing, judge_topics, topics_of
from marq_worker.check.trackers import judge_members
from marq_worker.config.queues import QueuesFile, load_queues
from marq_worker.config.settings import AppSettings, Role
from marq_worker.findings import CheckFinding, fine, problem, warning
from marq_worker.web.addresses import port_error, reachable_name
from marq_worker.web.conditions import Backlog, backlogs, judge_workers, stuck_processes
from marq_worker.web.peers import authorization
from marq_worker.web.statistics import namespace_statistics, worker_statistics

#: Time limit of the whole examination.
LIMIT_S = 13.0
#: Time limits for reaching a broker, for each query, for a worker's page, and for imports.
REACH_LIMIT_S = 4.0
QUESTION_LIMIT_S = 5.0
PAGE_LIMIT_S = 1.5
#: The part of the limit of a page in which its worker must accept the connection.
CONNECT_LIMIT_S = 1.0
IMPORT_LIMIT_S = 5.0
#: If no worker counts: maximum numbers of records to read, and of queues without consumers to count.
MAX_WAITING, MAX_COUNTED = 100_000, 500
#: Maximum number of groups to examine.
MAX_GROUPS = 50

T = TypeVar("T")


class Examination:
    """One examination; ``roles``: whose permissions are needed."""

    def __init__(self, settings: AppSettings, client: ClientSettings, roles: Collection[str]) -> None:
        limit_ms = int(QUESTION_LIMIT_S * 1000)
        self._settings = settings
        self._client = replace(
            client,
            connect_timeout_ms=min(client.connect_timeout_ms, limit_ms),
            request_timeout_ms=min(client.request_timeout_ms, limit_ms),
        )
        self._roles = list(roles)
        self._worker = WORKER in roles
        self._tracker = self._worker and Role.TRACKER in settings.roles
        self._web = self._worker and Role.WEB in settings.roles
        #: The name by which others reach the pages of a worker on this machine.
        self._host = settings.web_host or reachable_name(settings.web_bind)
        self._findings: list[CheckFinding] = []
        self._step = ""

    async def run(self) -> list[CheckFinding]:
        """Return all findings, within :data:`LIMIT_S`."""
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._examine()
        except TimeoutError:
            self._add(
                problem(
                    "check",
                    f"not finished within {LIMIT_S:g} s; the last step was {self._step}",
                    advice="the broker is slow or became unreachable: run the check again",
                )
            )
        return self._findings

    async def _examine(self) -> None:
        file = self._file()
        if self._tracker:
            self._add(machine.judge_data_directory(self._settings.data_dir))
        if self._worker:
            self._add(*machine.judge_packages({name: _installed(name) for name in machine.VERSIONS}, machine.VERSIONS))
        if not await self._reached():
            # The rest needs no broker.
            await self._handlers(Definitions(), file)
            await self._port(None)
            return
        async with AsyncExitStack() as stack:
            connect = partial(stack.enter_async_context, plain_admin(self._client))
            admin = await self._ask("the connection to the brokers", connect, failed=None)
            if admin is not None:
                await self._cluster(ClusterView(admin, self._client), file)

    def _file(self) -> QueuesFile | None:
        try:
            # Whether a group has all of its handlers is checked later, when the handlers in code are known.
            return load_queues(self._settings.queues_file, None, self._settings.project)
        except (MarqError, OSError) as error:
            self._add(problem("queues", str(error), advice="correct the file"))
            return None

    async def _reached(self) -> bool:
        servers = self._client.bootstrap_servers
        if servers.startswith(MEMORY_SCHEME):
            self._add(problem("broker", f"{servers} is an in-memory broker", advice="set MARQ_BOOTSTRAP_SERVERS"))
            return False
        obstacle = await find_obstacle(self._client, REACH_LIMIT_S)
        if obstacle is not None:
            self._add(problem("broker", obstacle.what, advice=obstacle.advice))
            return False
        self._add(fine("broker", f"{servers} is reachable with {self._client.security_protocol}"))
        return True

    async def _cluster(self, view: ClusterView, file: QueuesFile | None) -> None:
        apis = await self._ask("the broker's version", view.apis, failed=None)
        if apis is not None:
            self._add(*judge_apis(apis, static_member=self._settings.instance_id is not None))
        brokers = await self._ask("the brokers", view.brokers, failed=1)
        names = topics_of(self._client.names, changelog=self._tracker)
        look = await self._ask("the topics", lambda: view.look_up(names), failed=Look())
        await self._topics(view, look, names, brokers)
        allowed = await self._ask(
            "the permissions on topics", lambda: view.allowed_on_topics(names), failed=Operations()
        )
        published = await self._published(view, look, allowed)
        definitions = published.definitions
        owners = definitions.owners_of_topics()
        own = await self._ask("the queues' own topics", lambda: view.look_up(owners), failed=Look())
        unseen = {permission.name for permission in own.forbidden}
        self._add(*judge_own_topics(self._client, definitions, {**look.found, **own.found}, unseen))
        self._add(*judge_limits(self._client, definitions, {**look.found, **own.found}))
        self._add(*judge_priorities(definitions))
        self._add(*judge_partitions(self._client, definitions, look.found))
        self._add(*judge_retention(self._client, definitions, look.found))
        readers = await self._readers(view, look, allowed, definitions)
        trackers = await self._group(view, self._client.names.app_id)
        statistics = await self._trackers(trackers, look)
        if self._worker and file is not None:
            self._add(*await look_at_file(self._client, definitions, file, published_by=len(trackers.members)))
        await self._handlers(definitions, file)
        allowed |= await self._ask(
            "the permissions on own topics", lambda: view.allowed_on_topics(list(owners)), failed=Operations()
        )
        await self._keys(view, definitions, {*look.found, *own.found}, allowed)
        await self._permissions(view, [definitions, with_file(definitions, file)], allowed, trackers)
        await self._clock(view, look, allowed)
        await self._large_messages(view, statistics, allowed)
        if readers is not None:
            absent = {queue for topic, queues in owners.items() if topic not in own.found for queue in queues}
            await self._reading(view, definitions, *readers, statistics, allowed, absent)

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _topics(self, view: ClusterView, look: Look, names: list[str], brokers: int) -> None:
        forbidden = {permission.name for permission in look.forbidden}
        missing = [name for name in names if name not in look.found and name not in forbidden]
        if missing:
            plans = planned(self._client, look.found)
            refusals = await self._ask(
                "permission to create topics", lambda: view.refusals(plans[name] for name in missing), failed=None
            )
            if refusals is not None:
                reasons, replicas = refusals.reasons, refusals.replicas
                self._add(*judge_missing(self._client, look.found, reasons, brokers, too_many_replicas=replicas))
        if look.found:
            self._add(*judge_topics(self._client, look.found, brokers, changelog=self._tracker))

    async def _published(self, view: ClusterView, look: Look, allowed: Operations) -> Published:
        topic = self._client.names.queues
        nothing = Published(Definitions())
        if topic not in look.found or not _may(allowed, topic, "Read"):
            return nothing
        published = await self._ask("the definitions of queues", view.published, failed=nothing)
        if published is not nothing:
            self._add(judge_defined(published.definitions), *judge_unreadable(topic, published.unreadable))
        return published

    async def _readers(
        self, view: ClusterView, look: Look, allowed: Operations, definitions: Definitions
    ) -> tuple[list[ReadingGroup], int] | None:
        """Return the positions of groups that read queues, and how many were left out; None if we may not see them."""
        names = self._client.names
        if not self._worker or names.messages not in look.found or not _may(allowed, names.messages, "Describe"):
            return None
        handled = [queue for queue in definitions.names() if definitions.settings(queue).handler is not None]
        seen = await self._ask("the groups", view.group_names, failed=list[str]())
        ours = sorted({names.named_group(definitions.group(queue) or "") for queue in handled})
        groups = [group for group in dict.fromkeys([*ours, *seen]) if queues_of(group, names, definitions)]
        readers = await self._ask("how far groups are", lambda: view.readers(groups[:MAX_GROUPS]), failed=None)
        return ([], len(groups)) if readers is None else (readers, len(groups[MAX_GROUPS:]))

    async def _reading(
        self,
        view: ClusterView,
        definitions: Definitions,
        readers: list[ReadingGroup],
        left_out: int,
        statistics: Mapping[str, Any],
        allowed: Operations,
        absent: Collection[str],
    ) -> None:
        told = statistics["backlog"]["counted"]
        listed = backlogs(statistics["queues"], statistics["removed_handlers"]) if told else None
        if listed is None and _may(allowed, self._client.names.messages, "Read"):
            listed = await self._count(view, definitions, readers, absent)
        waiting = None if listed is None else {backlog.queue: backlog.waiting for backlog in listed}
        names, workers = self._client.names, statistics["workers"]
        ended = ended_processes(workers, names)
        frozen = {names.named_group(process["group"]) for _, process in stuck_processes(workers)}
        self._add(*judge_reading(self._client, definitions, readers, waiting, left_out, ended, frozen))
        if listed is not None:
            self._add(*judge_backlogs(definitions, listed, unhandled(self._client, definitions, readers)))

    async def _keys(
        self, view: ClusterView, definitions: Definitions, found: Collection[str], allowed: Operations
    ) -> None:
        shared = self._client.names.messages
        topics = {queue: definitions.settings(queue).topic or shared for queue in with_keys(definitions)}
        topics = {queue: topic for queue, topic in topics.items() if topic in found and _may(allowed, topic, "Read")}
        if topics:
            ask = partial(view.sample_keys, definitions, topics)
            self._add(*judge_keys(definitions, await self._ask("the keys of messages", ask, failed={})))

    async def _large_messages(self, view: ClusterView, statistics: Mapping[str, Any], allowed: Operations) -> None:
        """Name the records that were too large. Reads all dead letters, so only if workers have found any."""
        queues = with_large_messages(statistics["queues"])
        if queues and _may(allowed, self._client.names.dead_letters, "Read"):
            dead: Mapping[CountKey, int] = await self._ask(
                "the dead letters", lambda: view.large_messages(queues), failed={}
            )
            self._add(*judge_large_messages(dead))

    async def _count(
        self, view: ClusterView, definitions: Definitions, readers: Sequence[ReadingGroup], absent: Collection[str]
    ) -> list[Backlog] | None:
        """Count the waiting messages of queues without consumers, because no worker does.

        The topics of the queues in ``absent`` can't be read; a client would wait for them.
        """
        names = self._client.names
        queues = {
            *definitions.names(),
            *(queue for reader in readers for queue in queues_of(reader.group, names, definitions)),
        }
        inspector = Inspector(self._client, definitions)
        lonely = await self._ask("the consumers of queues", lambda: view.unattended(definitions, queues), failed=None)
        if lonely is None:
            return None
        some = sorted(lonely.difference(absent))[:MAX_COUNTED]
        waiting = await self._ask("waiting messages", lambda: inspector.waiting(some, MAX_WAITING), failed=None)
        if waiting is None:
            return None
        # Keys of unknown queues, and of queues that were left out because they have consumers.
        others = {key.decode("utf-8", "replace") for key in waiting.unknown_keys} - queues
        lonely |= await self._ask(
            "the consumers of other queues", lambda: view.unattended(definitions, others), failed=set[str]()
        )
        return counted(waiting, lonely, time.time() * 1000)

    async def _group(self, view: ClusterView, name: str) -> GroupFacts:
        return await self._ask(f"the group {name}", lambda: view.group(name), failed=GroupFacts())

    async def _trackers(self, facts: GroupFacts, look: Look) -> Mapping[str, Any]:
        """Judge the workers; return their statistics."""
        if facts.allowed is not None and "Describe" not in facts.allowed:
            await self._port(None)
            return namespace_statistics([], settled=True)
        names = self._client.names
        headers = authorization(self._settings)
        # A worker without the role web has no page.
        urls = sorted({member.url for member in facts.members if member.url.startswith("http")})
        silent = None if facts.members else await self._silent_here(headers)
        self._add(*judge_members(names, facts.members, begun=bool(look.found), silent=silent))
        workers = await asyncio.gather(*(_worker(url, headers) for url in urls))
        statistics = namespace_statistics(workers, settled=True)
        # Workers without pages own partitions too.
        all_seen = len(urls) == len(facts.members) and names.markers in look.found
        partitions = look.found[names.markers].partitions if all_seen else 0
        self._add(*judge_workers(statistics, partitions))
        await self._port(urls)
        return statistics

    async def _silent_here(self, headers: Mapping[str, str]) -> str | None:
        """Return the address of this machine's web port if a process listens there and does not answer."""
        if not self._web:
            return None
        worker = await _worker(f"http://{self._host}:{self._settings.web_port}", headers)
        return str(worker["url"]) if worker.get("silent") else None

    async def _port(self, urls: list[str] | None) -> None:
        if self._web:
            self._add(*machine.judge_exposure(self._settings))
            bind, number = self._settings.web_bind, self._settings.web_port
            self._add(machine.judge_port(bind, number, port_error(bind, number), self._host, urls))

    async def _handlers(self, definitions: Definitions, file: QueuesFile | None) -> None:
        if not self._worker or Role.HANDLERS not in self._settings.roles or file is None:
            return
        modules = self._settings.handlers
        self._step = "the import of handlers"
        try:
            # Output of modules during their import must not mix with the answer.
            with redirect_stdout(sys.stderr):
                async with asyncio.timeout(IMPORT_LIMIT_S):
                    self._add(*await in_thread(lambda: judge_handlers(definitions, file, modules)))
        except TimeoutError:
            self._add(
                warning(
                    "handlers",
                    f"their modules were not imported within {IMPORT_LIMIT_S:g} s",
                    advice="a module must not block while it is imported",
                )
            )
        except Exception as error:
            self._add(problem("handlers", f"their modules can't be imported: {error}"))

    async def _permissions(
        self,
        view: ClusterView,
        definitions: Sequence[Definitions],
        topics: Operations,
        trackers: GroupFacts,
    ) -> None:
        names = self._client.names
        seen = await self._ask("the groups", view.group_names, failed=list[str]())
        defined = [group for settings in definitions for group in groups_of(settings, names)]
        # An unused group stands for future ones.
        wanted = sorted({*seen, *defined, names.group("check"), names.named_group("check")})[:MAX_GROUPS]
        groups = dict(zip(wanted, await asyncio.gather(*(self._group(view, name) for name in wanted)), strict=True))
        groups[names.app_id] = trackers
        groups[names.backlog] = await self._group(view, names.backlog)
        ids = {
            names.transactional_ids: names.transactional_id(0),
            names.start_ids: names.start_id(names.group("check"), "check"),
        }
        transact = {
            prefix: await self._ask("the transactional ids", partial(view.may_transact, settings), failed=None)
            for prefix, settings in ids.items()
        }
        allowed = Allowed(topics, {name: facts.allowed for name, facts in groups.items()}, transact)
        use = Use.of(definitions[-1], names, self._settings)
        self._add(*judge_permissions(self._client, self._roles, use, allowed))

    async def _clock(self, view: ClusterView, look: Look, allowed: Operations) -> None:
        topic = self._client.names.queues
        if topic not in look.found or not _may(allowed, topic, "Write"):
            return
        if (appended := await self._ask("the clock", view.append, failed=None)) is not None:
            self._add(judge_clock(appended))

    # --- queries and findings -----------------------------------------------------------------------------------------

    async def _ask(self, step: str, question: Callable[[], Awaitable[T]], *, failed: T) -> T:
        """Run a query; report a failure and return ``failed``."""
        self._step = step
        try:
            async with asyncio.timeout(QUESTION_LIMIT_S):
                return await question()
        except TimeoutError:
            self._add(problem(step, f"no answer within {QUESTION_LIMIT_S:g} s", advice="see the broker's log"))
        except Exception as error:
            self._add(problem(step, f"unknown: {str(error) or type(error).__name__}"))
        return failed

    def _add(self, *findings: CheckFinding) -> None:
        self._findings += findings


def _may(allowed: Operations, topic: str, operation: str) -> bool:
    """Return whether an operation on a topic is allowed, as far as that is known."""
    known = allowed.get(topic)
    return known is None or operation in known


async def _worker(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the statistics of a worker.

    It is ``silent`` if it accepted a connection, as the kernel does for a stopped process, and did not answer in time.
    """
    try:
        async with (
            ClientSession(
                timeout=ClientTimeout(total=PAGE_LIMIT_S, sock_connect=CONNECT_LIMIT_S), headers=headers
            ) as session,
            session.get(f"{url.rstrip('/')}/api/queues?scope=worker", allow_redirects=False) as response,
        ):
            answer = await response.json()
            return worker_statistics(url, answer if "partitions" in answer else None)
    except TimeoutError as error:
        silent = not isinstance(error, ConnectionTimeoutError)
        return worker_statistics(url, None) | {"silent": silent}
    except (ClientError, ValueError, TypeError):
        return worker_statistics(url, None)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
