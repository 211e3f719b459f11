"""What is judged from facts, without a broker; tests/check runs the command itself."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from marq.kafka.group_members import DescribedMember
from marq.kafka.topics import planned
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.topic_configs import TopicFacts
from marq.wire.names import Names
from marq_worker.check import examination
from marq_worker.check.brokers import APIS, ClockSample, judge_apis, judge_clock
from marq_worker.check.cluster import SampledKeys
from marq_worker.check.machine import judge_packages, judge_port
from marq_worker.check.permissions import UNKNOWN, Allowed, Use, missing, operations
from marq_worker.check.queues import judge_keys, judge_limits, judge_priorities, with_keys
from marq_worker.check.topics import judge_missing, judge_topics
from marq_worker.check.trackers import judge_members
from marq_worker.client_id import Identity
from marq_worker.config.settings import AppSettings, Role
from marq_worker.findings import CheckFinding, Level, exit_code, fine, problem, report, warning
from marq_worker.web.conditions import judge_workers
from marq_worker.web.statistics import namespace_statistics, worker_statistics
from tests.unit.app.definitions import in_file

NAMES = Names("shop")
CLIENT = ClientSettings.read("kafka:9092", {"prefix": "shop"}, environment={})
ALL = dict.fromkeys(APIS, (0, 20))


def worker_settings(*roles: str, backlog: bool = True) -> AppSettings:
    return AppSettings(roles=frozenset(map(Role, roles)), count_waiting=backlog)


def levels(findings: Iterable[CheckFinding]) -> list[Level]:
    return [finding.level for finding in findings]


# --- findings ---------------------------------------------------------------------------------------------------------


def test_warnings_leave_the_exit_code_at_0_and_problems_make_it_1() -> None:
    assert exit_code([fine("a", "b"), warning("c", "d")]) == 0
    assert exit_code([fine("a", "b"), problem("c", "d")]) == 1


def test_a_finding_is_one_line_with_the_commands_below_it() -> None:
    text = str(problem("topic a", "is b", expected="c", advice="change it with", commands=["one", "two"]))

    assert text == "PROBLEM  topic a: is b (expected: c). Change it with:\n         one\n         two"


def test_a_report_is_for_programs() -> None:
    document = report([warning("clock", "is off", advice="set it")])

    assert document["ok"] is True
    assert document["findings"] == [
        {"level": "WARNING", "subject": "clock", "found": "is off", "expected": "", "advice": "set it", "commands": ()}
    ]


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "partitions", "said"),
    [
        ({"limits": {"concurrency": 3}}, 4, ["limits.concurrency is 3, and its messages are in 4 partitions"]),
        ({"limits": {"concurrency": 4, "per_key": {"concurrency": 1}}}, 4, []),
        (
            {"limits": {"per_key": {"rate": "1/s"}}, "key": "header:tenant"},
            4,
            ["limits.per_key go by 'header:tenant', so they apply to each of its 4 partitions"],
        ),
        ({"limits": {"concurrency": 1, "per_key": {"concurrency": 1}}, "key": "header:tenant"}, 1, []),
        ({"fair": True, "key": "header:tenant"}, 4, []),
    ],
)
def test_limits_that_are_not_exact_are_warnings(settings: dict[str, Any], partitions: int, said: list[str]) -> None:
    findings = list(judge_limits(CLIENT, in_file(emails=settings), {NAMES.messages: TopicFacts(partitions, {})}))

    assert levels(findings) == [Level.WARNING] * len(said)
    assert all(text in finding.found for text, finding in zip(said, findings, strict=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"fair": True, "key": "header:tenant"},
            "no header tenant, which is their key; each of them is a key of its own",
        ),
        ({"limits": {"per_key": {"rate": "1/s"}}}, "no ordering key; each of them is a key of its own"),
    ],
)
def test_a_key_that_most_messages_lack_is_a_warning(settings: dict[str, Any], said: str) -> None:
    definitions = in_file(emails=settings)

    [queue] = with_keys(definitions)
    [finding] = judge_keys(definitions, {queue: SampledKeys(messages=100, without=51)})

    assert (finding.level, finding.found) == (
        Level.WARNING,
        f"51 of its newest 100 messages have {said}",
    )
    assert not list(judge_keys(definitions, {queue: SampledKeys(messages=100, without=50)}))
    assert not list(judge_keys(definitions, {queue: SampledKeys(messages=19, without=19)}))


def test_keys_of_queues_that_only_have_limits_of_their_own_do_not_matter() -> None:
    assert with_keys(in_file(emails={"limits": {"concurrency": 3}}, reports={"ordering": "key"})) == []


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"mail": {"group": "g", "priority": 1}}, []),
        ({"mail": {"group": "g"}}, ["queue mail of the same group g has none"]),
        ({"mail": {"group": "other", "priority": 1}}, ["no other queue is in its group"]),
    ],
)
def test_a_priority_that_has_nothing_to_compare_with_is_a_warning(others: dict[str, Any], said: list[str]) -> None:
    definitions = in_file(urgent={"group": "g", "priority": 9}, **others)

    findings = [found for found in judge_priorities(definitions) if found.subject == "queue urgent"]

    assert levels(findings) == [Level.WARNING] * len(said)
    assert all(text in finding.found for text, finding in zip(said, findings, strict=True))


# --- brokers ----------------------------------------------------------------------------------------------------------


def test_a_broker_that_speaks_everything_is_fine() -> None:
    assert levels(judge_apis(ALL, static_member=True)) == [Level.OK]


def test_a_broker_that_is_too_old_is_named_with_the_version_that_is_needed() -> None:
    without_transactions = {key: spoken for key, spoken in ALL.items() if key not in (16, 22, 24, 26)}

    [found] = judge_apis({**without_transactions, 0: (0, 2)}, static_member=False)

    assert found.level is Level.PROBLEM
    assert "Produce, ListGroups, InitProducerId, AddPartitionsToTxn, EndTxn" in found.found
    assert found.expected == "Kafka 0.11 or newer"


def test_a_static_member_needs_a_newer_broker() -> None:
    old = {**ALL, 11: (0, 3)}

    assert levels(judge_apis(old, static_member=False)) == [Level.OK]
    [found] = judge_apis(old, static_member=True)
    assert found.expected == "Kafka 2.3 or newer"


def test_a_broker_that_no_longer_speaks_our_versions_is_too_new() -> None:
    [found] = judge_apis({**ALL, 26: (3, 7)}, static_member=False)

    assert "EndTxn version 0" in found.found
    assert found.advice == "upgrade marq on this machine"


# --- topics -----------------------------------------------------------------------------------------------------------


def topics(**settings: Any) -> dict[str, TopicFacts]:
    """All topics with correct settings, except for the given replicas and settings."""
    replicas = settings.pop("replicas", 1)
    defaults = {"cleanup.policy": "delete", "max.message.bytes": "1048588", "retention.bytes": "-1"}
    return {
        name: TopicFacts(plan.partitions, {**defaults, **plan.config, **settings}, replicas)
        for name, plan in planned(CLIENT, {}).items()
    }


def test_topics_as_they_should_be() -> None:
    assert levels(judge_topics(CLIENT, topics(), 1, changelog=True)) == [Level.OK]


@pytest.mark.parametrize(
    ("replicas", "confirming", "level", "said"),
    [
        (1, "1", Level.WARNING, "(expected: 3 replicas)"),
        (3, "1", Level.WARNING, "--add-config min.insync.replicas=2"),
        (2, "3", Level.PROBLEM, "nothing can be written"),
        (2, "3", Level.PROBLEM, "--add-config min.insync.replicas=1"),
    ],
)
def test_too_few_replicas_or_confirmations_are_found_at_each_topic(
    replicas: int, confirming: str, level: Level, said: str
) -> None:
    found = judge_topics(CLIENT, topics(replicas=replicas, **{"min.insync.replicas": confirming}), 3, changelog=True)

    assert levels(found) == [level] * 7
    assert all(said in str(finding) for finding in found)


def test_markers_that_go_by_size() -> None:
    found = topics()
    markers = found[NAMES.markers]
    found[NAMES.markers] = TopicFacts(markers.partitions, {**markers.config, "retention.bytes": "1000000"}, 1)

    [finding] = judge_topics(CLIENT, found, 1, changelog=True)

    assert (finding.level, finding.found) == (Level.WARNING, "retention.bytes is 1000000")
    assert finding.commands[0].endswith("--add-config retention.bytes=-1")


def test_topics_that_would_be_made_with_one_copy_on_several_brokers() -> None:
    missing_one, replicas = judge_missing(CLIENT, {}, {NAMES.messages: ""}, 5)

    assert (missing_one.level, replicas.level) == (Level.WARNING, Level.WARNING)
    assert "set MARQ_REPLICATION_FACTOR=3" in replicas.advice


def test_nothing_is_missing() -> None:
    assert not [*judge_missing(CLIENT, {}, {}, 3)]


# --- workers ----------------------------------------------------------------------------------------------------------


def member(version: str = "1.0", fingerprint: str = "abc123", project: str = "") -> DescribedMember:
    client_id = Identity(version, fingerprint, project).client_id("marq")
    return DescribedMember("", client_id, "10.0.0.1", url="http://10.0.0.1:6066")


def test_members_of_one_kind() -> None:
    [found] = judge_members(NAMES, [member(), member()], begun=True)

    assert found.level is Level.OK
    assert "2 in group shop-app: marq-1.0-qabc123 on 10.0.0.1 (http://10.0.0.1:6066)" in found.found


@pytest.mark.parametrize(
    ("other", "different"),
    [
        (member(version="1.1"), "versions"),
        (member(fingerprint="def456"), "definitions of queues"),
        (member("1.1", "def456"), "versions and definitions of queues"),
    ],
)
def test_members_that_differ_are_two_sets_of_workers_or_a_deploy(other: DescribedMember, different: str) -> None:
    _, found = judge_members(NAMES, [member(), other], begun=True)

    assert (found.level, found.found) == (Level.WARNING, f"they have different {different}")
    assert "MARQ_PREFIX=shop" in found.advice


def test_the_files_of_different_projects_are_not_compared_nor_is_a_worker_without_a_file() -> None:
    shop, billing = member(project="shop"), member(fingerprint="def456", project="billing")

    assert levels(judge_members(NAMES, [shop, billing, member(fingerprint="none")], begun=True)) == [Level.OK]
    _, found = judge_members(NAMES, [shop, billing, member(fingerprint="def456", project="shop")], begun=True)
    assert found.found == "they have different definitions of queues in project shop"


def test_members_that_tell_nothing_are_not_compared() -> None:
    assert levels(judge_members(NAMES, [member(), DescribedMember("", "old", "/h")], begun=True)) == [Level.OK]


@pytest.mark.parametrize(("begun", "level"), [(False, Level.WARNING), (True, Level.PROBLEM)])
def test_no_tracker_is_a_problem_once_there_are_topics(begun: bool, level: Level) -> None:
    assert levels(judge_members(NAMES, [], begun=begun)) == [level]


def partition(**metrics: Any) -> Mapping[str, Any]:
    return {"partition": 3, "state": "owner", "alarm": "", "clock_jump_ms": 0, "lag": 0, "applied_offset": 7, **metrics}


def worker(url: str = "http://a", *partitions: Mapping[str, Any], **statistics: Any) -> dict[str, Any]:
    return worker_statistics(url, {"partitions": list(partitions), **statistics})


def judged(*workers: dict[str, Any], partitions: int = 0) -> list[CheckFinding]:
    return judge_workers(namespace_statistics(workers, settled=True), partitions)


def test_workers_without_alarms_say_nothing() -> None:
    assert judged(worker("http://a", partition(), partition())) == []


def test_a_handler_that_no_worker_runs_is_a_warning_by_the_worker_that_has_watched_longest() -> None:
    reports = [{"emails": {"handler": "mail:send", "seconds": seconds}} for seconds in (370.0, 620.0)]
    workers = [worker(f"http://{name}", removed_handlers=report) for name, report in zip("ab", reports, strict=True)]

    [found] = judged(*workers, worker("http://of-an-older-version"))

    assert (found.level, found.subject) == (Level.WARNING, "queue emails")
    assert "no worker has run its handler mail:send for 10 min" in found.found
    assert "queue emails --forget" in found.found


@pytest.mark.parametrize(("seconds", "level"), [(4.0, Level.WARNING), (52.0, Level.PROBLEM)])
def test_a_handler_that_blocks_its_event_loop_is_a_problem_once_it_makes_its_worker_not_live(
    seconds: float, level: Level
) -> None:
    process = {"group": "mail", "queues": ["letters", "parcels"], "pid": 7, "blocked_seconds": seconds}
    blocked = process | {"blocked_by": "handler mail:send of queue letters"}
    runs, ended = process | {"blocked_seconds": 0.0}, process | {"pid": None}

    [named] = judged(worker(handlers=[blocked, runs, ended]), worker("http://b"))
    [unnamed] = judged(worker("http://of-an-older-version", handlers=[process]))

    assert (named.level, unnamed.level) == (level, level)
    assert named.subject == "group mail"
    what = "has blocked the event loop of handler process 7 of"
    assert named.found == f"handler mail:send of queue letters {what} http://a for {seconds:.0f} s"
    assert unnamed.found == f"a handler {what} http://of-an-older-version for {seconds:.0f} s"
    assert "asyncio.to_thread" in named.advice


def test_a_stopped_handler_process_is_a_problem_from_its_first_second() -> None:
    process = {"group": "mail", "queues": ["letters"], "pid": 7, "blocked_seconds": 0.0, "stopped": True}

    [found] = judged(worker(handlers=[process]))

    assert (found.level, found.subject) == (Level.PROBLEM, "group mail")
    assert found.found == (
        "handler process 7 of http://a was stopped by a signal (SIGSTOP), so no handler of its queues runs"
    )
    assert "kill -CONT 7" in found.advice


def test_a_quiet_worker_is_a_warning() -> None:
    process = {"group": "mail", "queues": ["letters"], "pid": 7, "blocked_seconds": 0.0}
    workers = [
        worker("http://a", handlers=[process | {"quiet": False}, process | {"quiet": True}]),
        worker("http://b", handlers=[process | {"quiet": False}]),
        # Of an older version.
        worker("http://c", handlers=[process]),
    ]

    [finding] = judged(*workers)

    assert (finding.level, finding.subject) == (Level.WARNING, "worker http://a")
    assert "takes no more messages" in finding.found
    assert "SIGCONT" in finding.advice


def test_an_open_circuit_breaker_is_a_warning() -> None:
    process = {"group": "mail", "pid": 7, "breakers": {"emails": {"state": "open"}, "letters": {"state": "closed"}}}

    [finding] = judged(worker(handlers=[process]))

    assert (finding.level, finding.subject) == (Level.WARNING, "queue emails")
    assert finding.found == "its circuit breaker is open, because its handler keeps failing"


def test_a_worker_that_accepts_connections_and_does_not_answer_may_be_stopped() -> None:
    [unreachable] = judged(worker_statistics("http://a", None))
    [silent] = judged(worker_statistics("http://a", None) | {"silent": True})

    assert "MARQ_WEB_BIND" in unreachable.advice
    assert (silent.level, silent.subject) == (Level.WARNING, "worker http://a")
    assert "accepts connections, but does not answer" in silent.found
    assert "resume it with kill -CONT" in silent.advice


@pytest.mark.parametrize("begun", [True, False])
def test_nobody_is_told_to_start_a_worker_while_a_stopped_one_may_be_on_this_machine(begun: bool) -> None:
    [found] = judge_members(NAMES, [], begun=begun, silent="http://here:6066")

    assert (found.level, found.commands) == (Level.PROBLEM, ())
    assert "http://here:6066 accepts connections, but does not answer" in found.advice
    assert "resume it with kill -CONT" in found.advice


async def test_a_process_that_only_listens_is_silent_and_a_free_port_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "PAGE_LIMIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        silent = await examination._worker(url, {})

    # Refused at once, but on a busy machine not within the short limit above.
    monkeypatch.setattr(examination, "PAGE_LIMIT_S", 60.0)
    monkeypatch.setattr(examination, "CONNECT_LIMIT_S", 60.0)
    assert silent == worker_statistics(url, None) | {"silent": True}
    assert await examination._worker(url, {}) == worker_statistics(url, None)


def test_a_topic_that_was_created_again_is_a_warning() -> None:
    reports = [[{"queue": "orders", "topic": "sales", "seconds": seconds}] for seconds in (370.0, 620.0)]
    workers = [worker(f"http://{name}", recreated_topics=report) for name, report in zip("ab", reports, strict=True)]

    [found] = judged(*workers, worker("http://of-an-older-version"))

    assert (found.level, found.subject) == (Level.WARNING, "queue orders")
    assert "its topic sales was deleted and created again, noticed 6 min ago" in found.found


def test_an_alarm_is_a_problem_and_a_jump_of_the_clock_a_warning() -> None:
    alarm, jump = judged(worker("http://a", partition(alarm="gone", clock_jump_ms=7_000)))

    assert (alarm.level, alarm.subject, alarm.found) == (Level.PROBLEM, "markers partition 3", "stalled: gone")
    assert (jump.level, jump.found) == (Level.WARNING, "the broker's clock jumped by 7 s, as seen by http://a")


def test_partitions_without_an_owner_are_named() -> None:
    recovering = worker("http://a", partition(state="recovering"))
    [found] = judged(recovering)
    assert (found.level, found.subject) == (Level.WARNING, "markers partition 3")
    assert found.found == "it is recovering at http://a; until it has an owner, its leases do not expire"

    [_, missing] = judged(recovering, worker("http://b"), partitions=5)
    assert (missing.level, missing.found) == (Level.WARNING, "no worker owns 0, 1, 2, 4")
    # A worker that does not answer may own them.
    [silent] = judged(worker_statistics("http://a", None), partitions=5)
    assert silent.subject == "worker http://a"


# --- clock ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "appended", "confirmed", "ahead"),
    [
        (0, 10, 20, 0),
        (60_000, 0, 60_020, 60),
        (0, 60_000, 20, -59.98),
        # A slow broker does not mean a wrong clock.
        (0, 8_000, 9_000, 0),
    ],
)
def test_what_is_sure_of_the_clocks(sent: int, appended: int, confirmed: int, ahead: float) -> None:
    assert ClockSample(sent, appended, confirmed).ahead_s == pytest.approx(ahead)


@pytest.mark.parametrize(
    ("sent", "level", "said"),
    [(0, Level.OK, "at most 5 s"), (9_000, Level.WARNING, "9 s ahead"), (-9_010, Level.WARNING, "9 s behind")],
)
def test_clocks_are_judged(sent: int, level: Level, said: str) -> None:
    found = judge_clock(ClockSample(sent, 0, sent + 10))

    assert (found.level, said in found.found) == (level, True)


# --- permissions ------------------------------------------------------------------------------------------------------


def test_operations_are_read_from_bits() -> None:
    assert operations(1 << 3 | 1 << 8 | 1 << 12) == {"Read", "Describe"}
    assert operations(0) == frozenset()
    assert operations(UNKNOWN) is None


def test_what_is_not_known_is_not_said_to_be_missing() -> None:
    assert missing(CLIENT, "worker", Use(handlers=True), Allowed()) == []


def test_a_worker_that_serves_sqs_may_do_what_its_clients_ask_for() -> None:
    topics = NAMES.messages, NAMES.markers, NAMES.queues
    allowed = Allowed(topics=dict.fromkeys(topics, frozenset({"Describe", "DescribeConfigs"})))

    lacking = missing(CLIENT, "worker", Use(tracker=False, sqs=True), allowed)

    assert {(use.name, use.operation) for use in lacking} == {
        (topic, operation) for topic in topics for operation in ("Read", "Write")
    }


def test_a_worker_needs_its_permission_on_every_group_and_a_consumer_on_one() -> None:
    groups = {NAMES.named_group("a"): frozenset({"Read", "Describe"}), NAMES.named_group("b"): frozenset[str]()}
    use = Use(handlers=True, handled_groups=list(groups))

    lacking = missing(CLIENT, "worker", use, Allowed(groups=groups))

    assert [(use.name, use.operation) for use in lacking] == [(NAMES.named_group(""), "Read")]
    assert missing(CLIENT, "consumer", use, Allowed(groups=groups)) == []


def test_a_service_needs_nothing_on_topics_of_other_queues() -> None:
    allowed = Allowed(topics={"theirs": frozenset(), "ours": frozenset({"Describe", "DescribeConfigs"})})

    lacking = missing(CLIENT, "sender", Use(own_topics=["theirs", "ours"]), allowed)

    assert [(use.name, use.operation) for use in lacking] == [("ours", "Write")]


def test_what_a_worker_uses_follows_from_the_definitions_and_its_roles() -> None:
    definitions = in_file(emails={"handler": "a:b", "topic": "mail"}, orders={"topic": "orders"})

    both = Use.of(definitions, NAMES, worker_settings("tracker", "handlers"))
    tracker = Use.of(definitions, NAMES, worker_settings("tracker"))
    sqs = Use.of(definitions, NAMES, worker_settings("sqs"))

    group = NAMES.named_group("handlers")
    assert sqs == Use(["mail", "orders"], tracker=False, sqs=True, handled_topics=[], handled_groups=[])
    assert both == Use(["mail", "orders"], handlers=True, handled_topics=["mail"], handled_groups=[group])
    assert tracker == Use(["mail", "orders"], handled_topics=[], handled_groups=[])


def test_a_tracker_has_to_read_messages_to_redeliver_them() -> None:
    definitions = Definitions()
    denied = Allowed(topics={NAMES.messages: frozenset({"Write", "Describe", "DescribeConfigs"})})

    tracker = Use.of(definitions, NAMES, worker_settings("tracker", backlog=False))
    handlers = Use.of(definitions, NAMES, worker_settings("handlers", backlog=False))

    lacking = missing(CLIENT, "worker", tracker, denied)
    assert [(use.name, use.operation) for use in lacking] == [(NAMES.messages, "Read")]
    assert missing(CLIENT, "worker", handlers, denied) == []


def test_a_tracker_that_counts_what_waits_needs_a_group() -> None:
    definitions = in_file(orders={"topic": "orders"})
    denied = Allowed({"orders": frozenset({"Write", "Describe", "DescribeConfigs"})}, {NAMES.backlog: frozenset()})

    counts = Use.of(definitions, NAMES, worker_settings("tracker"))
    counts_not = Use.of(definitions, NAMES, worker_settings("tracker", backlog=False))

    lacking = missing(CLIENT, "worker", counts, denied)
    assert [(use.name, use.operation) for use in lacking] == [
        ("orders", "Read"),
        (NAMES.backlog, "Read"),
    ]
    assert [use.name for use in missing(CLIENT, "worker", counts_not, denied)] == ["orders"]


# --- machine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "workers", "level"),
    [
        (0, None, Level.OK),
        (errno.EADDRINUSE, None, Level.OK),
        (errno.EADDRINUSE, ["http://127.0.0.1:6066/"], Level.OK),
        (errno.EADDRINUSE, [], Level.WARNING),
        (errno.EACCES, [], Level.PROBLEM),
        (errno.EADDRNOTAVAIL, [], Level.PROBLEM),
    ],
)
def test_a_port_is_judged_by_its_user(error: int, workers: list[str] | None, level: Level) -> None:
    assert judge_port("127.0.0.1", 6066, error, "127.0.0.1", workers).level is level


def test_a_port_on_all_addresses_is_that_of_the_worker_that_others_reach_by_a_name() -> None:
    port = "0.0.0.0", 6066, errno.EADDRINUSE

    assert judge_port(*port, "worker-0.example", ["http://worker-0.example:6066/"]).level is Level.OK
    assert judge_port(*port, "worker-1.example", ["http://worker-0.example:6066/"]).level is Level.WARNING


def test_packages_are_compared_with_those_that_were_tested() -> None:
    assert levels(judge_packages({"faust": "1"}, {"faust": "1"})) == [Level.OK]
    [found] = judge_packages({"faust": "2"}, {"faust": "1"})
    assert (found.level, found.found, found.expected) == (Level.WARNING, "version 2", "1, with which marq was tested")
