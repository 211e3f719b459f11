"""What happens to the network: it is slow, it is cut, or it swallows everything and says nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from broker import EmbeddedBroker
from faults.processes import Participant
from faults.proxy import Proxy
from faults.scenario import AtBroker, Scenario
from faults.stage import LEASE_SECONDS, SESSION_SECONDS, FaultError, Stage
from proof.causes import EVERYBODY

#: Messages before, between and after faults.
SOME = 300
#: In each direction. A request and its answer take twice as long.
DELAY_SECONDS = 0.25
#: Longer than leases and sessions.
GONE_SECONDS = SESSION_SECONDS + 2 * LEASE_SECONDS
#: Most attempts of one process without a broker, in any second.
MAX_ATTEMPTS = 5
#: A little less than a second: the limit holds when attempts begin, and they are counted when they arrive.
SECOND = 0.9
#: Most log lines of one process, on average.
MAX_LINES_PER_SECOND = 2.0
#: Time limit from the broker's start until all clients have found it: two pauses, on a busy machine.
RETURN_SECONDS = 10.0


@dataclass(frozen=True)
class BehindProxies(AtBroker):
    """A broker that some reach through a proxy, and all others without one."""

    proxy: Proxy


@contextmanager
def behind_proxies() -> Iterator[BehindProxies]:
    with Proxy() as proxy, EmbeddedBroker(proxied={"PROXIED": proxy.port}) as broker:
        proxy.forward_to(broker.listener("PROXIED"))
        yield BehindProxies(broker, proxy)


async def consumer_behind(stage: Stage, here: BehindProxies) -> str:
    """Begin, and return the name of the consumer that the proxy stands before; another one has none."""
    await stage.worker()
    stage.load()
    await stage.consumer()
    victim = await stage.consumer(MARQ_BOOTSTRAP_SERVERS=here.proxy.address)
    await stage.delivered_more(SOME)
    return victim.name


async def worker_behind(stage: Stage, here: BehindProxies) -> str:
    """Begin, and return the name of the worker that the proxy stands before; it is the only one."""
    victim = await stage.worker(MARQ_BOOTSTRAP_SERVERS=here.proxy.address)
    stage.load()
    await stage.consumer()
    await stage.consumer()
    await stage.delivered_more(SOME)
    return victim.name


Begin = Callable[[Stage, BehindProxies], Awaitable[str]]


def disturbed(begin: Begin, disturb: Callable[[Proxy], None]) -> Callable[[Stage, BehindProxies], Awaitable[None]]:
    """Disturb the connections of somebody for a while; what the proxy holds then arrives at last."""

    async def play(stage: Stage, here: BehindProxies) -> None:
        victim = await begin(stage, here)
        with stage.fault("cut", victim):
            disturb(here.proxy)
            await stage.play(GONE_SECONDS)
            here.proxy.restore()
        await stage.delivered_more(SOME)

    return play


def slow_down(proxy: Proxy) -> None:
    proxy.delay(DELAY_SECONDS)


def half_open(begin: Begin) -> Callable[[Stage, BehindProxies], Awaitable[None]]:
    """First nothing is answered, then nothing gets there; each time old connections turn out to be dead."""

    async def play(stage: Stage, here: BehindProxies) -> None:
        victim = await begin(stage, here)
        for direction in ("to client", "to broker"):
            with stage.fault("cut", victim):
                here.proxy.freeze(direction)
                await stage.play(GONE_SECONDS)
                here.proxy.cut()
                here.proxy.restore()
            await stage.delivered_more(SOME)

    return play


@dataclass(frozen=True)
class BehindOneProxyEach(AtBroker):
    """A broker that each of several clients reaches through a proxy of its own."""

    proxies: Mapping[str, Proxy]


CLIENTS = ("PRODUCER", "CONSUMER", "WORKER")


@contextmanager
def behind_one_proxy_each() -> Iterator[BehindOneProxyEach]:
    with ExitStack() as stack:
        proxies = {client: stack.enter_context(Proxy()) for client in CLIENTS}
        ports = {client: proxy.port for client, proxy in proxies.items()}
        broker = stack.enter_context(EmbeddedBroker(proxied=ports))
        for client, proxy in proxies.items():
            proxy.forward_to(broker.listener(client))
        yield BehindOneProxyEach(broker, proxies)


async def counted(stage: Stage, here: BehindOneProxyEach) -> None:
    """A proxy accepts each connection, and closes it if the broker is down, so it counts all attempts."""
    proxies = here.proxies
    worker = await stage.worker(MARQ_BOOTSTRAP_SERVERS=proxies["WORKER"].address)
    stage.load(servers=proxies["PRODUCER"].address)
    consumer = await stage.consumer(MARQ_BOOTSTRAP_SERVERS=proxies["CONSUMER"].address)
    await stage.delivered_more(SOME)
    with stage.fault("cut", EVERYBODY):
        here.broker.kill()
        began_s = time.monotonic()
        before = {child: len(_lines(child)) for child in (worker, consumer)}
        await stage.play(GONE_SECONDS)
        ended_s = time.monotonic()
        lines = {child: _lines(child)[count:] for child, count in before.items()}
        await asyncio.to_thread(here.broker.start)
    await stage.until(
        lambda: all("broker reachable again" in "\n".join(_lines(child)) for child in lines),
        "all clients have found the broker",
        RETURN_SECONDS,
    )
    await stage.delivered_more(SOME)
    for client, proxy in proxies.items():
        attempts = [at_s for at_s in proxy.accepted_at if began_s <= at_s <= ended_s]
        _require(bool(attempts), f"{client} made no attempt")
        _require(_most(attempts) <= MAX_ATTEMPTS, f"{client} made {_most(attempts)} attempts in a second")
    for child, written in lines.items():
        limit = MAX_LINES_PER_SECOND * GONE_SECONDS
        _require(len(written) <= limit, f"{child.name} wrote {len(written)} lines, such as {written[-1:]}")
        text = "\n".join(_lines(child))
        for sentence in ("broker unreachable", "broker reachable again"):
            _require(text.count(sentence) == 1, f"{child.name} wrote {text.count(sentence)} times {sentence!r}")


def _lines(child: Participant) -> Sequence[str]:
    return child.log_file.read_text(encoding="utf-8", errors="replace").splitlines()


def _most(times: Sequence[float]) -> int:
    return max(sum(began <= other < began + SECOND for other in times) for began in times)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FaultError(otherwise)


_SLOW = f"{DELAY_SECONDS * 1000:.0f} ms in each direction between {{}} and broker, for {GONE_SECONDS:.0f} s"
_CUT = f"connections between {{}} and broker are cut and refused, for {GONE_SECONDS:.0f} s"
_HALF_OPEN = (
    f"half-open connections between {{}} and broker: for {GONE_SECONDS:.0f} s no answer comes, then for as long no"
    " request arrives; each time the connections are dead afterwards"
)
_THAWED = f"the network between {{}} and broker holds everything for {GONE_SECONDS:.0f} s and then delivers it"
_CONSUMER_SEEN = "its messages go to other consumers when their leases end; its late acks still count"
_WORKER_SEEN = "redelivery stands still meanwhile"

SCENARIOS = [
    Scenario(
        "reconnects-are-few",
        f"kill -9 of the only broker, which stays away for {GONE_SECONDS:.0f} s; each attempt to reach it is counted",
        f"each process makes at most {MAX_ATTEMPTS} attempts a second and logs two lines; all continue when it is back",
        counted,
        behind_one_proxy_each,
        quick=True,
    ),
    Scenario(
        "consumer-slow-network",
        _SLOW.format("consumer"),
        "lower throughput",
        disturbed(consumer_behind, slow_down),
        behind_proxies,
    ),
    Scenario(
        "consumer-cut-off",
        _CUT.format("consumer"),
        _CONSUMER_SEEN,
        disturbed(consumer_behind, Proxy.cut),
        behind_proxies,
    ),
    Scenario(
        "consumer-half-open", _HALF_OPEN.format("consumer"), _CONSUMER_SEEN, half_open(consumer_behind), behind_proxies
    ),
    Scenario(
        "consumer-held-up",
        _THAWED.format("consumer"),
        _CONSUMER_SEEN,
        disturbed(consumer_behind, Proxy.freeze),
        behind_proxies,
    ),
    Scenario(
        "worker-slow-network",
        _SLOW.format("worker"),
        "later redelivery",
        disturbed(worker_behind, slow_down),
        behind_proxies,
    ),
    Scenario(
        "worker-cut-off", _CUT.format("worker"), _WORKER_SEEN, disturbed(worker_behind, Proxy.cut), behind_proxies
    ),
    Scenario("worker-half-open", _HALF_OPEN.format("worker"), _WORKER_SEEN, half_open(worker_behind), behind_proxies),
    Scenario(
        "worker-held-up", _THAWED.format("worker"), _WORKER_SEEN, disturbed(worker_behind, Proxy.freeze), behind_proxies
    ),
]
