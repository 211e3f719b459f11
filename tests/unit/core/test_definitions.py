"""The fold over the queues topic."""

from __future__ import annotations

import pytest

from marq.settings.combinations import check_combinations
from marq.settings.default_group import HANDLERS_GROUP
from marq.settings.definitions import Definitions, confirmed_key, quarantine_key
from marq.settings.queue import QueueSettings
from marq.wire.errors import ConfigError
from marq.wire.quarantines import Quarantine, digest


def test_an_undefined_queue_has_the_defaults() -> None:
    definitions = Definitions()

    assert definitions("anything") == definitions.settings("anything") == QueueSettings()

    definitions.fold(b"defaults", {"lease": 7})
    assert definitions("anything").lease_ms == 7_000
    assert definitions.names() == []
    assert definitions.defaults() == {"lease": 7}


def test_the_layers_count_in_their_order_whichever_came_first() -> None:
    definitions = Definitions()

    definitions.fold(b"change:emails", {"lease": 4})
    definitions.fold(b"file:emails", {"lease": 3, "max_attempts": 3})
    definitions.fold(b"handler:emails", {"lease": 2, "max_attempts": 2, "concurrency": 2})
    definitions.fold(b"defaults", {"lease": 1, "max_attempts": 1, "concurrency": 1, "dead_letter": False})

    assert definitions("emails") == QueueSettings(4_000, 3, concurrency=2, dead_letter=False)
    assert definitions.layer("file", "emails") == {"lease": 3, "max_attempts": 3}
    assert definitions.layer("file", "other") is None
    keys = ("lease", "max_attempts", "concurrency", "dead_letter", "group")
    assert [definitions.origin("emails", key) for key in keys] == ["change", "file", "handler", "defaults", ""]
    assert definitions.origin("other", "lease") == "defaults"


def test_a_record_without_a_value_takes_its_layer_away() -> None:
    definitions = Definitions()
    definitions.fold(b"defaults", {"lease": 1})
    definitions.fold(b"file:emails", {"lease": 3})
    definitions.fold(b"change:emails", {"lease": 4})

    assert definitions.fold(b"change:emails", None) == "emails"
    assert definitions("emails").lease_ms == 3_000

    definitions.fold(b"file:emails", None)
    assert definitions("emails").lease_ms == 1_000
    assert definitions.names() == []

    assert definitions.fold(b"defaults", None) is None
    assert definitions("emails") == QueueSettings()
    assert definitions.fold(b"file:never", None) == "never"


def test_a_queue_belongs_to_its_named_group_else_to_that_of_handlers_else_to_its_own() -> None:
    definitions = Definitions()
    definitions.fold(b"file:emails", {"group": "background", "handler": "shop:send"})
    definitions.fold(b"file:images", {"group": "background"})
    definitions.fold(b"handler:orders", {"handler": "shop:order"})
    definitions.fold(b"file:plain", {"lease": 3})

    assert definitions.group("emails") == "background"
    assert definitions.group("orders") == HANDLERS_GROUP
    assert definitions.group("plain") is None
    assert definitions.group("unknown") is None
    assert definitions.queues_of("background") == ["emails", "images"]
    assert definitions.queues_of(HANDLERS_GROUP) == ["orders"]
    assert definitions.queues_of("nobody's") == []


def test_the_queues_of_a_project_have_its_defaults_and_its_group_of_handlers() -> None:
    # given: two named projects in one namespace, and one without a name
    definitions = Definitions()
    definitions.fold(b"file:bills", {"lease": 3, "project": "billing"})
    definitions.fold(b"handler:orders", {"handler": "tasks:order", "project": "shop"})
    definitions.fold(b"handler:mail", {"handler": "tasks:send"})
    definitions.fold(b"change:mail", {"max_attempts": 9})

    # when: shop publishes its defaults, and owns those of queues that no named project defines
    definitions.fold(b"defaults:shop", {"max_attempts": 2, "project": "shop"})
    definitions.fold(b"defaults", {"max_attempts": 4, "lease": 8, "project": "shop"})

    # then: each queue has the defaults of its own project
    assert [definitions(queue).max_attempts for queue in ("bills", "orders", "mail", "unknown")] == [5, 2, 9, 4]
    assert [definitions(queue).lease_ms for queue in ("bills", "orders", "mail", "unknown")] == [3e3, 30e3, 8e3, 8e3]
    assert definitions.origin("orders", "max_attempts") == "defaults"
    assert [definitions.project(queue) for queue in ("bills", "orders", "mail", "unknown")] == [
        "billing",
        "shop",
        "",
        None,
    ]
    assert (definitions.defaults_owner, definitions.projects_with_defaults()) == ("shop", ["shop"])
    assert definitions.group("orders") == "handlers.shop"
    assert definitions.group("mail") == HANDLERS_GROUP

    # when: what the project published is removed
    later = definitions.after({b"defaults:shop": None, b"handler:orders": None, b"handler:mail": None})

    # then: the copy has changed, and the original has not
    assert (later.project("orders"), later.project("mail"), later("mail").max_attempts) == (None, None, 9)
    assert (definitions.project("orders"), definitions("orders").max_attempts) == ("shop", 2)


def test_a_pause_ends_at_its_time() -> None:
    definitions = Definitions()
    definitions.fold(b"file:emails", {"paused": True})
    definitions.fold(b"change:emails", {"paused": "1970-01-01T00:00:02Z"})
    definitions.fold(b"file:sms", {"paused": "1970-01-01T00:00:01Z", "lease": 3})
    definitions.fold(b"file:push", {"paused": True})
    definitions.fold(b"defaults", {"paused": "1970-01-01T00:00:03Z"})

    assert definitions.next_pause_end_ms == 1_000
    assert not definitions.end_pauses(999)
    assert definitions.end_pauses(1_000)
    assert definitions("sms") == QueueSettings(3_000)
    assert definitions("emails").paused
    assert definitions.next_pause_end_ms == 2_000
    assert definitions.end_pauses(60_000)
    assert not definitions("emails").paused
    assert not definitions("unknown").paused
    assert definitions("push").paused
    assert definitions.next_pause_end_ms is None
    assert not definitions.end_pauses(60_000)


def test_the_last_pause_counts() -> None:
    definitions = Definitions()
    definitions.fold(b"change:emails", {"paused": "1970-01-01T00:00:02Z"})
    for document in ({"paused": True}, {"paused": False}, {"lease": 3}, None):
        later = definitions.after({b"change:emails": document})
        assert later.next_pause_end_ms is None
        assert later("emails").paused is bool(document and document.get("paused"))
    assert definitions.next_pause_end_ms == 2_000
    # Another record of the queue does not make an ended pause begin again.
    assert definitions.end_pauses(2_000)
    definitions.fold(b"file:emails", {"lease": 3})
    assert definitions.end_pauses(2_000)
    assert not definitions("emails").paused


def test_a_topic_leads_to_its_queues() -> None:
    definitions = Definitions()
    definitions.fold(b"file:orders", {"topic": "shop-orders"})
    definitions.fold(b"file:billing", {"topic": "shop-orders"})
    definitions.fold(b"file:a", {"lease": 3})

    assert definitions.queues_of_topic("shop-orders") == ["billing", "orders"]
    assert definitions.queues_of_topic("other") == []

    definitions.fold(b"change:orders", {"topic": "other"})
    assert definitions.queues_of_topic("shop-orders") == ["billing"]


def test_a_change_can_be_looked_at_before_it_is_made() -> None:
    definitions = Definitions()
    definitions.fold(b"file:emails", {"lease": 3, "max_attempts": 3})
    definitions.fold(b"change:emails", {"lease": 4})

    later = definitions.after({b"change:emails": {"max_attempts": 9}, b"file:other": {"lease": 1}})

    assert later("emails") == QueueSettings(3_000, 9)
    assert later.names() == ["emails", "other"]
    assert definitions.names() == ["emails"]
    assert definitions("emails") == QueueSettings(4_000, 3)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            {b"file:emails": {"lease": 60, "max_lease": 30}},
            r"^queue 'emails': max_lease = 30 \(marq.toml\) is shorter than lease = 60 \(marq.toml\), but",
        ),
        (
            {b"file:emails": {"lease": 7_200}, b"defaults": {"max_lease": 3_600}},
            r"max_lease = 3600 \(\[defaults\] of marq.toml\) is shorter than lease = 7200 \(marq.toml\)",
        ),
        (
            {b"defaults": {"lease": 60}, b"change:emails": {"max_lease": 30.5}},
            r"max_lease = 30.5 \(changed at run time\) is shorter than lease = 60 \(\[defaults\] of marq.toml\)",
        ),
        ({b"file:emails": {"max_lease": 29}}, r"max_lease = 29 \(marq.toml\) is shorter than lease = 30 \(default\)"),
        ({b"defaults": {"max_lease": 10}}, r"^\[defaults\]: max_lease = 10 is shorter than lease = 30: "),
    ],
)
def test_a_max_lease_below_the_lease_is_read_and_refused_by_writers(
    layers: dict[bytes, dict[str, float]], said: str
) -> None:
    definitions = Definitions().after(layers)

    assert definitions("emails").max_lease_ms < definitions("emails").lease_ms
    with pytest.raises(ConfigError, match=said):
        check_combinations(definitions)


def test_a_lease_of_hours_needs_no_max_lease() -> None:
    definitions = Definitions().after({b"file:emails": {"lease": 7_200}, b"file:sms": {"lease": 5, "max_lease": 5}})

    check_combinations(definitions)


@pytest.mark.parametrize(
    ("key", "document", "said"),
    [
        (
            None,
            {},
            "the key None of a definition: expected 'defaults' or one of defaults:NAME, handler:NAME, file:NAME",
        ),
        (b"emails", {}, "the key b'emails'"),
        (b"\xff:a", {}, "the key"),
        (b"other:emails", {}, "the key b'other:emails'"),
        (b"file:", {}, "must not be empty"),
        (b"file:emails", {"lease": 0}, "the record 'file:emails': lease: "),
        (b"file:emails", [], "the record 'file:emails': expected a table"),
        (b"defaults", {"group": "a"}, "the record 'defaults' can't name 'group'"),
    ],
)
def test_a_record_that_cant_be_understood_changes_nothing(key, document, said) -> None:
    definitions = Definitions()
    definitions.fold(b"defaults", {"lease": 1})
    definitions.fold(b"file:emails", {"lease": 3})

    with pytest.raises(ConfigError, match=said):
        definitions.fold(key, document)

    assert definitions("emails").lease_ms == 3_000
    assert definitions("other").lease_ms == 1_000
    assert definitions.names() == ["emails"]


def test_keys_of_a_newer_writer_are_passed_over() -> None:
    definitions = Definitions()

    definitions.fold(b"file:emails", {"group": "background", "colour": "blue"})

    assert definitions("emails") == QueueSettings(group="background")


def test_schedules_have_two_layers_and_count_when_they_are_whole() -> None:
    definitions = Definitions()
    definitions.fold(b"schedule:daily", {"value": "x", "of a later version": 1})
    assert definitions.schedules.current == {}

    definitions.fold(b"schedule-file:daily", {"queue": "reports", "cron": "0 9 * * *", "value": "file's"})
    [schedule] = definitions.schedules.current.values()
    assert (schedule.queue, schedule.cron, schedule.value) == ("reports", "0 9 * * *", "x")

    before = definitions.schedules.version
    with pytest.raises(ConfigError, match="the record 'schedule:daily': cron: expected a cron expression"):
        definitions.fold(b"schedule:daily", {"cron": "often"})
    assert (definitions.schedules.current["daily"], definitions.schedules.version) == (schedule, before)

    definitions.fold(b"schedule-file:daily", None)
    assert (definitions.schedules.current, definitions.schedules.names()) == ({}, ["daily"])
    assert definitions.names() == []


def test_the_digest_says_what_is_sent_and_when_and_nothing_else() -> None:
    definitions = Definitions()

    def digest(**changes: object) -> str:
        definitions.fold(b"schedule:s", {"queue": "q", "cron": "0 9 * * *", **changes})
        return definitions.schedules.current["s"].digest

    same = digest()
    assert digest(enabled=False) == digest(catch_up=True) == digest(timezone="UTC") == same
    others = [digest(queue="p"), digest(cron="1 9 * * *"), digest(value="x"), digest(headers={"a": "b"})]
    assert len({same, digest(timezone="Europe/Berlin"), *others}) == 6


def test_orders_of_quarantine_are_kept_by_place_and_count_for_one_content() -> None:
    definitions = Definitions()
    order = Quarantine(3, 17, digest(b"stops"), "ann@host", "2023-11-14T22:13:20+00:00", "not ours")

    definitions.fold(quarantine_key(order), order.document())

    assert definitions.quarantines() == [order]
    assert definitions.names() == []
    assert definitions.quarantine(3, 17, b"stops") == order
    assert definitions.quarantine(3, 17, b"another") is definitions.quarantine(3, 18, b"stops") is None
    assert str(order) == "quarantined by ann@host at 2023-11-14T22:13:20+00:00: not ours"
    definitions.fold(quarantine_key(order), None)
    assert definitions.quarantines() == []


@pytest.mark.parametrize("place", ["3", "3/17/1", "a/1", "3/", "-1/2", "3/" + "9" * 30])
@pytest.mark.parametrize("document", [None, {"sha256": "x", "by": "ann", "at": "now"}])
def test_an_order_of_quarantine_for_no_place_is_refused(place: str, document: dict[str, object] | None) -> None:
    with pytest.raises(ConfigError, match="expected PARTITION/OFFSET"):
        Definitions().fold(f"quarantine:{place}".encode(), document)


@pytest.mark.parametrize("document", [[], {}, {"sha256": "x", "by": 1}, {"by": "ann", "at": "now"}])
def test_an_order_of_quarantine_that_says_too_little_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the record 'quarantine:3/17': expected"):
        Definitions().fold(b"quarantine:3/17", document)


def test_the_last_record_of_a_layer_limits_when_a_queue_may_have_changed_its_group() -> None:
    definitions = Definitions()
    definitions.fold(b"file:emails", {"group": "background"}, 3)
    definitions.fold(b"change:reports", None, 5)
    definitions.fold(b"purge:emails", {"until_ms": 1, "ends": {}}, 6)

    assert definitions.changed_at(["emails"]) == 3
    # Compaction may have removed what this record took away.
    assert definitions.changed_at(["emails", "reports"]) == 5
    assert definitions.changed_at(["others"]) == definitions.changed_at([]) == -1


def test_each_confirmation_of_a_module_has_another_number_until_it_is_taken_back() -> None:
    definitions, key = Definitions(), confirmed_key("services.mail")
    numbers = [definitions.confirmed("services.mail")]

    for document in ({}, {}, None, {}):
        assert definitions.fold(key, document) is None
        numbers.append(definitions.confirmed("services.mail"))

    assert numbers[0] == numbers[3] == 0
    assert len({*numbers}) == 4
    assert definitions.names() == []
