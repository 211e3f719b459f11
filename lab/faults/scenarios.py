"""All fault scenarios: the set-up, the faults, what must hold, and where. docs/guarantees.md describes each in words.

In all of them nothing may be lost, and the checker must explain each duplicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lab.consumer import LEASE_SECONDS, Point
from lab.faults import steps
from lab.faults.conditions import BrokerCluster, Proxy, behind_proxies, movable_broker, with_small_disk
from lab.faults.scenario import Scenario, begin
from lab.faults.steps import (
    AT_MOST_ONCE,
    FEW,
    SOME,
    dies_at,
    disturbed,
    down,
    mixed,
    next_worker,
    paused,
    replaced,
    retried,
    worker_killed,
)
from lab.stage import SESSION_SECONDS
from marq.kafka.acquire_strategies import MARKED, TRANSACTIONAL
from marq_worker.broker import EmbeddedBroker

#: The points of all queues at which consumers die.
POINTS = [Point.BEFORE_ACQUIRE, Point.AFTER_ACQUIRE, Point.AFTER_COMMIT, Point.IN_HANDLER, Point.BEFORE_ACK]
#: Further points of queues with ordering: while a source is resumed, and after that.
RESUMING = [Point.BEFORE_RESUME, Point.AFTER_RESUME, Point.BEFORE_VERIFY, Point.AFTER_VERIFY]
IN_ORDER = [
    Point.BEFORE_ACQUIRE_IN_ORDER,
    Point.AFTER_ACQUIRE_IN_ORDER,
    Point.BEFORE_ACQUIRE_AGAIN,
    Point.AFTER_ACQUIRE_AGAIN,
    Point.BEFORE_LAST_RELEASE,
    Point.AFTER_LAST_RELEASE,
]
#: The points of an at-most-once queue, and after how many passes consumers die there.
SPENDING = {
    Point.AFTER_ACQUIRE: 3,
    Point.AFTER_COMMIT: 3,
    Point.BEFORE_SPEND: 3,
    Point.AFTER_SPEND: 3,
    Point.IN_HANDLER: 40,
    Point.BEFORE_ACK: 3,
}


def killed_at(
    name: str, points: Sequence[Point], start: str = MARKED, after: int = 3, manner: str = "mixed", quick: bool = False
) -> Scenario:
    """Return a row in which a consumer dies at each of these points, while another one continues."""
    options = (f"--start={start}", f"--manner={manner}")
    define = {"max_attempts": steps.FEW_ATTEMPTS} if manner == "unlucky" else None
    faults = [dies_at(point, after, *options) for point in points]
    return Scenario(name, faults, begin(consumers=[options], more=False, define=define), quick=quick)


CONSUMERS = [
    killed_at("consumer-killed-at-each-point", POINTS, quick=True),
    killed_at("transactional-consumer-killed", POINTS, TRANSACTIONAL),
    killed_at("ordered-consumer-killed-while-resuming", RESUMING, after=1),
    killed_at("ordered-consumer-killed-at-each-point", IN_ORDER, manner="unlucky"),
    killed_at("ordered-transactional-consumer-killed", [*RESUMING, *IN_ORDER], TRANSACTIONAL, 1, "unlucky"),
    Scenario(
        "consumers-join-and-leave", [steps.consumers_join_and_leave], begin(consumers=[["--manner=slow"]], more=False)
    ),
    Scenario("all-consumers-killed", [steps.all_consumers_killed] * 3),
    Scenario("consumer-paused-past-the-lease", [paused(LEASE_SECONDS + 1)], quick=True),
    Scenario("consumer-paused-past-the-session", [paused(SESSION_SECONDS + 2 * LEASE_SECONDS)]),
    Scenario("handlers-start-without-broker", [steps.handlers_start_without_broker], None, EmbeddedBroker),
    Scenario(
        "static-worker-restarted-elsewhere", [steps.static_worker_elsewhere] * 2, begin(consumers=[()], **steps.STATIC)
    ),
    Scenario(
        "one-instance-id-twice",
        [steps.same_consumer_twice, steps.same_worker_twice],
        begin(consumers=[[f"--instance-id={steps.INSTANCE}"]], **steps.STATIC),
    ),
]

WORKERS = [
    Scenario("worker-killed", [worker_killed()] * 2, quick=True),
    Scenario("worker-killed-data-lost", [worker_killed(data=False)]),
    Scenario("worker-killed-changelog-lost", [worker_killed(data=False, changelog=False)], place=EmbeddedBroker),
    Scenario(
        "worker-killed-in-the-transaction",
        [next_worker("--die-in-transaction=20"), next_worker("--die-in-transaction=20"), next_worker()],
        begin(["--die-in-transaction=20"], [()], more=False),
        quick=True,
    ),
    Scenario(
        "worker-killed-in-the-answer",
        [
            next_worker(*options, consumer=True)
            for options in (["--die-after-answer=1"], ["--die-in-answer=3"], ["--die-after-answer=3"], [])
        ],
        begin(["--die-in-answer=1"], [()], more=False),
    ),
    Scenario("worker-paused-past-the-session", [steps.worker_paused_past_the_session]),
    Scenario("workers-restarted-one-by-one", [replaced("worker", 0), replaced("worker", 1)], begin(workers=2)),
    Scenario("workers-join-and-leave", [steps.workers_join_and_leave]),
    Scenario(
        "upgrade-workers-first",
        [replaced(kind, index, "--newer") for kind in ("worker", "consumer") for index in (0, 1)],
        begin(workers=2),
    ),
    Scenario(
        "upgrade-consumers-first",
        [steps.newer_consumer, steps.newer_worker, steps.old_consumer_stopped],
        begin(consumers=[()]),
    ),
]

REPLICAS = 3
REPLICATED = begin(MARQ_REPLICATION_FACTOR=str(REPLICAS))
BROKERS = [
    Scenario("broker-restarted", [down(end=EmbeddedBroker.stop)] * 2, place=EmbeddedBroker),
    Scenario("broker-killed", [down()] * 2, place=EmbeddedBroker, quick=True),
    Scenario("broker-away", [down(30)], place=EmbeddedBroker),
    Scenario(
        "leader-killed", [steps.leader_killed(0), steps.leader_killed(1)], REPLICATED, partial(BrokerCluster, REPLICAS)
    ),
    Scenario(
        "too-few-brokers",
        [steps.too_few],
        REPLICATED,
        partial(BrokerCluster, REPLICAS, properties={"min.insync.replicas": str(REPLICAS)}),
    ),
    Scenario("everything-killed", [steps.everything_killed(MARKED)], steps.few_attempts),
    Scenario(
        "transactional-everything-killed",
        [steps.everything_killed(TRANSACTIONAL)],
        steps.few_attempts,
        holds=steps.no_message_is_dead_twice,
    ),
    Scenario("worker-disk-full", [steps.disk_full], steps.on_the_small_disk, with_small_disk),
]

NO_ANSWER, NO_REQUEST = (lambda proxy: proxy.freeze("to client")), (lambda proxy: proxy.freeze("to broker"))
#: How the network of one client is disturbed: the ways, and whether the connections are dead afterwards.
DISTURBANCES: dict[str, tuple[list[Callable[[Proxy], None]], bool]] = {
    "slow-network": ([partial(Proxy.delay, seconds=steps.DELAY_SECONDS)], False),
    "cut-off": ([Proxy.cut], False),
    "half-open": ([NO_ANSWER, NO_REQUEST], True),
    "held-up": ([Proxy.freeze], False),
}
NETWORKS = [
    Scenario(
        "reconnects-are-few",
        [steps.reconnects_counted],
        steps.start_behind_proxies,
        partial(behind_proxies, "PRODUCER", "CONSUMER", "WORKER"),
        quick=True,
    ),
    *[
        Scenario(
            f"{client}-{name}",
            [disturbed(client, way, dead=dead) for way in ways],
            steps.start_behind_proxies,
            partial(behind_proxies, client.upper()),
        )
        for client in ("consumer", "worker")
        for name, (ways, dead) in DISTURBANCES.items()
    ],
]

AHEAD, BACK = steps.AHEAD_SECONDS, steps.BACK_SECONDS
CLOCKS = [
    Scenario("consumer-clock-moved", [steps.consumers_clock_moved], begin(consumers=[()], more=False)),
    Scenario("worker-clock-moved", [steps.workers_clock_moved], None),
    Scenario(
        "broker-clock-ahead",
        [steps.brokers_clock_moved(AHEAD), steps.brokers_clock_moved_without_a_worker],
        place=movable_broker,
    ),
    Scenario("broker-clock-back", [steps.brokers_clock_moved(BACK)], place=movable_broker),
]

RANDOM = steps.random_consumer_and_worker_killed
REJECTING, PATIENT = ["--manner=rejecting"], ["--manner=patient"]
#: While messages are delayed, retried, dead-lettered, redriven, or delivered at most once.
DELAYS = [
    Scenario("mixed-at-random", [RANDOM(0)], retried(FEW), holds=steps.redriven, some=FEW, quick=True),
    Scenario("delays-under-kills", [RANDOM(0), RANDOM(1)], retried(SOME), holds=steps.redriven_under_a_kill, some=SOME),
    Scenario("delayed-broker-killed", [down()] * 2, mixed(delayed=1.0), EmbeddedBroker, some=SOME),
    Scenario(
        "queue-with-delay-killed",
        # Only the queue's setting delays these records, which any producer may write.
        [steps.consumer_replaced_by_another, steps.consumer_replaced_by_another, worker_killed()],
        begin(define=steps.DELAYING, rate=100),
        some=SOME,
    ),
    Scenario(
        "at-most-once-killed",
        [dies_at(point, after, *REJECTING) for point, after in SPENDING.items()],
        mixed(consumers=[REJECTING], some=0, delayed=0.0, with_ids=0.0, **AT_MOST_ONCE),
        holds=steps.abandoned_are_counted,
        some=FEW,
    ),
    Scenario(
        "at-most-once-worker-killed",
        # The redeliveries are of messages that no handler has seen.
        [steps.spent("--die-in-transaction=1"), steps.spent()],
        mixed(["--die-in-transaction=1"], [PATIENT], some=0, delayed=0.0, **AT_MOST_ONCE),
        some=FEW,
    ),
]

SCENARIOS = [*CONSUMERS, *WORKERS, *BROKERS, *NETWORKS, *CLOCKS, *DELAYS]
