"""Every private or inherited name of Faust, mode and aiokafka that app, agents and tables rely on.

An upgrade that changes one of them must fail a test, not a user: test_faust_api.py checks each entry, and that no name
is missing here.

A shape is a signature without annotations, with ``async`` in front of a coroutine function and ``...`` for what does
not matter; or ``property``, ``class attribute``, or ``instance attribute``, which the class itself sets; or
``inherited``, of any kind.
"""

from __future__ import annotations

from typing import NamedTuple


class Reliance(NamedTuple):
    """One name: the class it belongs to (``module:Class``), its shape, and what would break without it."""

    owner: str
    name: str
    shape: str
    why: str


_THREAD = "faust.transport.drivers.aiokafka:AIOKafkaConsumerThread"
_CONSUMER = "faust.transport.drivers.aiokafka:Consumer"
_PRODUCER = "faust.transport.drivers.aiokafka:Producer"
_TRANSPORT = "faust.transport.drivers.aiokafka:Transport"
_APP = "faust.app.base:App"
_WORKER = "faust.worker:Worker"
_SERVICE = "mode:Service"
_COMMAND = "faust.cli.base:AppCommand"
_VIEW = "faust.web:View"
_WEB = "faust.web.drivers.aiohttp:Web"
_ASSIGNOR = "faust.assignor.partition_assignor:PartitionAssignor"
_STORE = "faust.stores.rocksdb:Store"
_MANAGER = "faust.tables.manager:TableManager"
_RECOVERY = "faust.tables.recovery:Recovery"
_KAFKA = "aiokafka:AIOKafkaConsumer"
_TRANSACTIONS = "aiokafka.producer.transaction_manager:TransactionManager"
_STATE = "aiokafka.consumer.subscription_state"

RELIANCES = (
    # marq_worker/transport/batch_transport.py: the thread that reads.
    Reliance(_THREAD, "__post_init__", "(self)", "called by Service.__init__; our fields are set in it"),
    Reliance(_THREAD, "_create_worker_consumer", "(self, transport)", "read_committed is set on what it returns"),
    Reliance(
        _THREAD,
        "_fetch_records",
        "async (self, consumer, active_partitions, timeout=None, max_records=None)",
        "its records become one Fetched for each partition",
    ),
    Reliance(_THREAD, "on_thread_stop", "async (self)", "stops aiokafka's consumer, which we do in our own way"),
    Reliance(_THREAD, "_ensure_consumer", "(self)", "the aiokafka consumer, for offsets of logs"),
    Reliance(_THREAD, "call_thread", "async (self, fun, *args, **kwargs)", "runs a coroutine function there"),
    Reliance(_THREAD, "verify_event_path", "(self, now, tp)", "logs partitions that seem stalled, replaced"),
    Reliance(_THREAD, "verify_recovery_event_path", "(self, now, tp)", "the same for changelogs, replaced"),
    # marq_worker/transport/batch_transport.py: the consumer that delivers.
    Reliance(_CONSUMER, "_new_consumer_thread", "(self)", "makes our thread"),
    Reliance(_CONSUMER, "_new_offset", "(self, tp)", "says what to commit: the end of the last acknowledged batch"),
    Reliance(_CONSUMER, "_drain_messages", "async (self, fetcher)", "the reading loop, replaced"),
    Reliance(_CONSUMER, "_wait_next_records", "async (self, timeout)", "one fetch: (records, active partitions)"),
    Reliance(_CONSUMER, "_get_active_partitions", "(self)", "empty: nothing is assigned, or all is paused"),
    Reliance(_THREAD, "getmany", "async (self, active_partitions, timeout)", "a poll, which keeps us in the group"),
    Reliance(_CONSUMER, "wait_first", "async (self, *coros, timeout=None)", "a delivery ends when the flow stops"),
    Reliance(_CONSUMER, "perform_seek", "async (self)", "back to the committed offsets"),
    Reliance(_CONSUMER, "seek_wait", "async (self, partitions)", "to the applied offset, after recovery"),
    Reliance(_CONSUMER, "pause_partitions", "(self, tps)", "a partition with an alarm is no longer read"),
    Reliance(
        _CONSUMER,
        "resume_partitions",
        "(self, tps)",
        "a partition continues after a quarantine",
    ),
    Reliance(_CONSUMER, "should_stop", "property", "ends the reading loop"),
    Reliance(_CONSUMER, "flow_active", "class attribute", "no delivery during a rebalance"),
    Reliance(_CONSUMER, "suspend_flow", "instance attribute", "an Event"),
    Reliance(_CONSUMER, "callback", "instance attribute", "takes a ConsumerMessage"),
    Reliance(_CONSUMER, "consumer_stopped_errors", "class attribute", "expected while stopping"),
    Reliance(_CONSUMER, "_thread", "instance attribute", "our BatchThread"),
    Reliance(_THREAD, "_close_thread_loop_on_stop", "instance attribute", "it closes the loop that we give it"),
    Reliance(_CONSUMER, "_acked", "instance attribute", "acknowledged offsets by partition"),
    Reliance(_CONSUMER, "_acked_index", "instance attribute", "the same, as sets"),
    Reliance(_CONSUMER, "_read_offset", "instance attribute", "the last offset delivered, by partition"),
    Reliance(_CONSUMER, "_paused_partitions", "instance attribute", "those are delivered that were fetched before"),
    Reliance(_CONSUMER, "_is_changelog_tp", "(self, tp)", "changelogs are never delivered"),
    Reliance(_TRANSPORT, "Consumer", "class attribute", "replaced by ours"),
    Reliance(_TRANSPORT, "Producer", "class attribute", "replaced by ours"),
    Reliance(_PRODUCER, "_new_producer", "(self, transactional_id=None)", "its connections are paced"),
    Reliance(
        "faust.serializers.schemas:Schema",
        "compile",
        "(self, app, *, on_key_decode_error=..., on_value_decode_error=..., default_propagate=...)",
        "returns decode(message, *, propagate=False)",
    ),
    Reliance("faust.events:Event", "__init__", "(self, app, key, value, headers, message)", "made by our schema"),
    Reliance("faust.events:Event", "ack", "(self)", "called once the changelog is durable"),
    Reliance("faust.streams:Stream", "noack", "(self)", "agents acknowledge by themselves"),
    Reliance("faust.streams:Stream", "events", "async generator (self)", "what an agent reads"),
    Reliance(
        "faust.types.tuples:ConsumerMessage",
        "__init__",
        "(self, topic, partition, offset, timestamp, timestamp_type, headers, key, value, checksum, "
        "serialized_key_size=None, serialized_value_size=None, tp=None, time_in=None, time_out=None, time_total=None, "
        "generation_id=None)",
        "one for each batch",
    ),
    # marq_worker/transport/batch_transport.py: aiokafka below it.
    Reliance(_KAFKA, "_isolation_level", "instance attribute", "read before start()"),
    Reliance(_KAFKA, "_fetch_max_wait_ms", "instance attribute", "read before start(); Faust fixes it at 1500"),
    Reliance(_THREAD, "_consumer", "class attribute", "None until the consumer starts"),
    Reliance(_KAFKA, "_subscription", "instance attribute", "the way to positions"),
    Reliance(_KAFKA, "_coordinator", "instance attribute", "the way to the member's id"),
    Reliance(
        "aiokafka.consumer.group_coordinator:GroupCoordinator",
        "member_id",
        "instance attribute",
        "a worker that is started after a kill -9 takes its former member out of the group",
    ),
    Reliance(f"{_STATE}:SubscriptionState", "subscription", "property", "None before the first assignment"),
    Reliance(f"{_STATE}:Subscription", "assignment", "property", "None during a rebalance"),
    Reliance(f"{_STATE}:Assignment", "state_value", "(self, tp)", "None for partitions that are not assigned"),
    Reliance(f"{_STATE}:TopicPartitionState", "_position", "instance attribute", "None until it is known"),
    Reliance(f"{_STATE}:TopicPartitionState", "highwater", "instance attribute", "where a partition ended"),
    Reliance(
        f"{_STATE}:TopicPartitionState",
        "consumed_to",
        "(self, position)",
        "called with each piece that is read, before records are returned; seeks do not come through it",
    ),
    # marq_worker/transport/turns.py
    Reliance("faust.channels:Channel", "queue", "property", "ours: a rebalance does not clear it"),
    Reliance("faust.channels:Channel", "get_topic_name", "(self)", "what `faust agents` shows; raises where local"),
    Reliance("faust.channels:Channel", "put", "async (self, value)", "to all streams that read the channel"),
    # marq_worker/owner/partition_writer.py
    Reliance("aiokafka:AIOKafkaProducer", "_txn_manager", "instance attribute", "the way to the producer's epoch"),
    Reliance(
        "aiokafka:AIOKafkaProducer", "_message_accumulator", "instance attribute", "has the producer's last error"
    ),
    Reliance(
        "aiokafka.producer.message_accumulator:MessageAccumulator",
        "_exception",
        "instance attribute",
        "why the producer has failed; None if it has not",
    ),
    Reliance(_TRANSACTIONS, "producer_id", "property", "the same for each producer of a transactional id"),
    Reliance(_TRANSACTIONS, "producer_epoch", "property", "rises with each producer, which reveals a second one"),
    # app/faust_app.py, app/worker_app.py, app/handlers_app.py
    Reliance(_APP, "_new_transport", "(self)", "makes our transport"),
    Reliance(_APP, "_new_web", "(self)", "makes our web server"),
    Reliance(_APP, "_create_directories", "(self)", "does nothing without tables"),
    Reliance(_APP, "on_first_start", "async (self)", "topics are looked at before the consumer starts"),
    Reliance(_APP, "on_stop", "async (self)", "owners write before connections close"),
    Reliance(_APP, "rebalancing", "class attribute", "True until Faust has sought to the committed offsets"),
    Reliance(_APP, "rebalancing_count", "class attribute", "tells a rebalance that does not end from the next one"),
    Reliance(
        "faust.app:BootStrategy",
        "__init__",
        "(self, app, *, enable_web=None, enable_kafka=None, enable_kafka_producer=None, ...)",
        "a worker without the role tracker, and a handler process, run without clients of Faust",
    ),
    Reliance(_APP, "BootStrategy", "class attribute", "what App.boot_strategy is made of"),
    Reliance(_APP, "consumer_generation_id", "class attribute", "tells a batch of before a rebalance"),
    # marq_worker/faust_worker.py
    Reliance(_WORKER, "__init__", "(self, app, *services, ...)", "called with the app first"),
    Reliance(_WORKER, "execute_from_commandline", "(self)", "ends by SystemExit with 0, which we replace"),
    Reliance(_WORKER, "on_setup_root_logger", "(self, logger, level)", "called when logging has been set up"),
    Reliance(_WORKER, "install_signal_handlers", "(self)", "called at the start; ours adds SIGTSTP and SIGCONT"),
    Reliance(_WORKER, "_on_sigint", "(self)", "starts the time limit of a stop"),
    Reliance(_WORKER, "_on_sigterm", "(self)", "starts the time limit of a stop"),
    Reliance(
        _WORKER, "on_worker_shutdown", "(self)", "called before every stop, also after an error of the event loop"
    ),
    Reliance(_WORKER, "_sentinel_task", "async (self)", "the last task of a stop, which sleeps for a second"),
    # app/worker_app.py
    Reliance(_APP, "http_client", "property", "made by the setting HttpClient, with authorization for workers"),
    # Long-lived parts of a worker.
    Reliance(_SERVICE, "on_start", "async (self)", "called by start(); a child of a running service starts at once"),
    Reliance(_SERVICE, "on_stop", "async (self)", "called by stop() before children and tasks end; only once"),
    Reliance(_SERVICE, "on_shutdown", "async (self)", "called by stop() after children and tasks have ended"),
    # marq_worker/commands/command.py
    Reliance(_COMMAND, "__call__", "inherited", "runs the command, and ends by SystemExit"),
    Reliance(_COMMAND, "as_click_command", "class attribute", "makes the command of click, whose help we change"),
    # marq_worker/web/dashboard/views.py
    Reliance(_VIEW, "from_handler", "class attribute", "makes a view of a function; ours: one that answers POSTs"),
    Reliance(_VIEW, "get_methods", "(self)", "has HEAD for every view; ours: POST alone"),
    # marq_worker/web/statistics.py
    Reliance(_WEB, "start_server", "async (self)", "sets the runner up, starts a site of it; ours: limits between"),
    Reliance(_WEB, "_create_site", "(self)", "makes the site of self._runner, which we make"),
    Reliance(_WEB, "default_blueprints", "class attribute", "emptied: /table and /router need no login"),
    Reliance(_WEB, "production_blueprints", "class attribute", "emptied: our own page is at /"),
    # marq_worker/former_member.py
    Reliance(_ASSIGNOR, "on_assignment", "(self, assignment)", "asserts that the assignment names the current address"),
    Reliance(_ASSIGNOR, "_decompress", "class attribute", "reads the user data of an assignment"),
    Reliance(_ASSIGNOR, "_compress", "class attribute", "writes it"),
    Reliance(_ASSIGNOR, "_url", "property", "is the address of this worker"),
    # marq_worker/web/peers.py
    Reliance(
        _ASSIGNOR,
        "metadata",
        "(self, topics)",
        "what a member tells its group: user_data has the JSON of ClientMetadata",
    ),
    Reliance("faust.assignor.client_assignment:ClientMetadata", "url", "class attribute", "the worker's address"),
    Reliance(
        "aiokafka.admin:AIOKafkaAdminClient",
        "describe_consumer_groups",
        "async (self, group_ids, ...)",
        "answers with raw structures",
    ),
    Reliance(
        "aiokafka.coordinator.protocol:ConsumerProtocolMemberMetadata", "SCHEMA", "class attribute", "has user_data"
    ),
    # app/check, marq_worker/web/dashboard/groups.py
    Reliance(
        "aiokafka.admin:AIOKafkaAdminClient",
        "_send_request",
        "async (self, request, node_id=None)",
        "requests without a method in the client, such as permissions",
    ),
    # tables/leases.py
    Reliance(_STORE, "_db_for_partition", "(self, partition)", "opens or returns a partition's database"),
    Reliance(_STORE, "_dbs", "instance attribute", "open databases by partition"),
    Reliance(_STORE, "partition_path", "(self, partition)", "where its files are"),
    Reliance(_STORE, "offset_key", "class attribute", "the row with the changelog offset"),
    Reliance("faust.tables.table:Table", "get", "inherited", "hidden by rows of one partition"),
    Reliance(
        "faust.tables.table:Table",
        "on_rebalance",
        "async (self, assigned, revoked, newly_assigned, generation_id=0)",
        "opens the databases of newly assigned partitions, which owners do",
    ),
    Reliance(_MANAGER, "on_start", "async (self)", "done without its wait of one second"),
    Reliance(_MANAGER, "_update_channels", "async (self)", "what lets the consumer subscribe"),
    Reliance(_MANAGER, "recovery", "property", "replaced: owners recover by themselves, after fencing"),
    Reliance(_MANAGER, "_recovery", "class attribute", "where the property keeps it"),
    Reliance(_RECOVERY, "_build_highwaters", "async (self, consumer, tps, destination, title)", "nothing to recover"),
    Reliance(_RECOVERY, "_build_offsets", "async (self, consumer, tps, destination, title)", "nothing to recover"),
    Reliance(_RECOVERY, "_seek_offsets", "async (self, consumer, tps, offsets, title)", "changelogs are not read"),
    Reliance(_RECOVERY, "need_recovery", "(self)", "never, so rebalances continue at once"),
)
