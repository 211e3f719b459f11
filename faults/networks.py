"""What happens to the network: it is slow, it is cut, or it swallows everything and says nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from broker import EmbeddedBroker
from faults.proxy import Proxy
from faults.scenario import AtBroker, Scenario
from faults.stage import LEASE_SECONDS, SESSION_SECONDS, Stage

#: Messages before, between and after faults.
SOME = 300
#: In each direction. A request and its answer take twice as long.
DELAY_SECONDS = 0.25
#: Longer than leases and sessions.
GONE_SECONDS = SESSION_SECONDS + 2 * LEASE_SECONDS


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
