"""Faults of the network: it is slow, it is cut, or it holds everything back silently."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from lab.faults.proxy import Proxy
from lab.faults.scenario import AtBroker, Play, scenario
from lab.program import Program, RunError
from lab.proof.causes import EVERYBODY
from lab.stage import LEASE_SECONDS, SESSION_SECONDS, Stage
from marq_worker.broker import EmbeddedBroker

#: Delay of each direction; a request and its response take twice as long.
DELAY_SECONDS = 0.25
#: Longer than leases and sessions.
GONE_SECONDS = SESSION_SECONDS + 2 * LEASE_SECONDS
#: Maximum connection attempts of one process without a broker, in any second.
MAX_ATTEMPTS = 5
#: Less than a second, because attempts are limited when they begin and counted when the proxy accepts them: on a busy
#: machine, the first of them up to half a second later.
WINDOW_SECONDS = 0.5
#: Maximum log lines of one process, on average.
MAX_LINES_PER_SECOND = 2.0
#: Time limit from the broker's start until all clients are connected: two pauses, on a busy machine.
RETURN_SECONDS = 10.0


@dataclass(frozen=True)
class BehindProxies(AtBroker):
    """A broker that some clients reach through a proxy."""

    proxies: Mapping[str, Proxy]


@contextmanager
def behind_proxies(*clients: str) -> Iterator[BehindProxies]:
    """Start a proxy for each of these clients, and a broker that may also be reached directly."""
    with ExitStack() as stack:
        proxies = {client: stack.enter_context(Proxy()) for client in clients}
        broker = stack.enter_context(EmbeddedBroker(proxied={client: proxy.port for client, proxy in proxies.items()}))
        for client, proxy in proxies.items():
            proxy.forward_to(broker.listener(client))
        yield BehindProxies(broker, proxies)


async def begin(stage: Stage, client: str, address: str) -> str:
    """Start with a consumer among others, or the only worker, behind the proxy; return its name."""
    if client == "worker":
        return (await stage.begin(MARQ_BOOTSTRAP_SERVERS=address)).name
    await stage.begin(consumers=1)
    victim = await stage.consumer(MARQ_BOOTSTRAP_SERVERS=address)
    await stage.delivered_more()
    return victim.name


def disturbed(client: str, *disturb: Callable[[Proxy], None], dead: bool = False) -> Play:
    """Disturb the connections of a client for a while, in each of these ways.

    Then the proxy delivers the data that it held, or the old connections turn out to be ``dead``.
    """

    async def play(stage: Stage, here: BehindProxies) -> None:
        proxy = here.proxies["PROXIED"]
        victim = await begin(stage, client, proxy.address)
        for way in disturb:
            with stage.fault("cut", victim):
                way(proxy)
                await stage.play(GONE_SECONDS)
                if dead:
                    proxy.cut()
                proxy.restore()
            await stage.delivered_more()

    return play


CLIENTS = ("PRODUCER", "CONSUMER", "WORKER")


@scenario(
    "reconnects-are-few",
    f"kill -9 of the only broker, down for {GONE_SECONDS:.0f} s; the test counts connection attempts",
    f"each process makes at most {MAX_ATTEMPTS} attempts per second and logs two lines about them; all resume when the"
    " broker is back",
    partial(behind_proxies, *CLIENTS),
    quick=True,
)
async def counted(stage: Stage, here: BehindProxies) -> None:
    """A proxy counts all attempts, because it accepts connections even while the broker is down."""
    proxies = here.proxies
    worker = await stage.worker(MARQ_BOOTSTRAP_SERVERS=proxies["WORKER"].address)
    stage.load(servers=proxies["PRODUCER"].address)
    consumer = await stage.consumer(MARQ_BOOTSTRAP_SERVERS=proxies["CONSUMER"].address)
    await stage.delivered_more()
    with stage.fault("cut", EVERYBODY):
        here.broker.kill()
        began_s = time.monotonic()
        before = {child: len(_lines(child)) for child in (worker, consumer)}
        await stage.play(GONE_SECONDS)
        ended_s = time.monotonic()
        lines = {child: _lines(child)[count:] for child, count in before.items()}
        await asyncio.to_thread(here.broker.start)
    await stage.until(
        lambda: all("broker reachable again" in child.log() for child in lines),
        "all clients have found the broker",
        RETURN_SECONDS,
    )
    await stage.delivered_more()
    for client, proxy in proxies.items():
        attempts = [at_s for at_s in proxy.accepted_at if began_s <= at_s <= ended_s]
        _require(bool(attempts), f"{client} made no attempt")
        times = " ".join(f"{at_s - began_s:.2f}" for at_s in attempts)
        most = _most(attempts)
        _require(most <= MAX_ATTEMPTS, f"{client} made {most} attempts within {WINDOW_SECONDS} s: {times}")
    for child, written in lines.items():
        limit = MAX_LINES_PER_SECOND * (ended_s - began_s)
        _require(len(written) <= limit, f"{child.name} wrote {len(written)} lines, such as {written[-1:]}")
        text = child.log()
        for sentence in ("broker unreachable", "broker reachable again"):
            _require(text.count(sentence) == 1, f"{child.name} wrote {text.count(sentence)} times {sentence!r}")


def _lines(child: Program) -> Sequence[str]:
    return child.log().splitlines()


def _most(times: Sequence[float]) -> int:
    return max(sum(began <= other < began + WINDOW_SECONDS for other in times) for began in times)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RunError(otherwise)


_HALF_OPEN = (
    f"half-open connections between {{}} and broker: no responses for {GONE_SECONDS:.0f} s, then no requests for"
    f" {GONE_SECONDS:.0f} s; the connections are dead afterwards"
)
_CONSUMER_SEEN = "other consumers receive its messages when their leases expire; its late acks still count"
_WORKER_SEEN = "redelivery pauses"


def declare(client: str, slow_seen: str, seen: str) -> None:
    place = partial(behind_proxies, "PROXIED")
    latency = f"{DELAY_SECONDS * 1000:.0f} ms of latency in each direction"
    slow = f"{latency} between {client} and broker, for {GONE_SECONDS:.0f} s"
    cut = f"connections between {client} and broker are cut and refused for {GONE_SECONDS:.0f} s"
    held = f"the network between {client} and broker holds all data for {GONE_SECONDS:.0f} s, then delivers it"
    no_answer, no_request = (partial(Proxy.freeze, direction=way) for way in ("to client", "to broker"))
    scenario(f"{client}-slow-network", slow, slow_seen, place)(
        disturbed(client, partial(Proxy.delay, seconds=DELAY_SECONDS))
    )
    scenario(f"{client}-cut-off", cut, seen, place)(disturbed(client, Proxy.cut))
    scenario(f"{client}-half-open", _HALF_OPEN.format(client), seen, place)(
        disturbed(client, no_answer, no_request, dead=True)
    )
    scenario(f"{client}-held-up", held, seen, place)(disturbed(client, Proxy.freeze))


declare("consumer", "lower throughput", _CONSUMER_SEEN)
declare("worker", "redelivery is slower", _WORKER_SEEN)
