#!/usr/bin/env bash
# Shows that poll() of confluent-kafka drops messages if a callback raises: they are lost, unless acks are explicit.
#
# confluent-kafka 2.16.1 and 2.12.2 (for comparison), Kafka 4.4.0 (broker from Maven; the script needs a JDK). A topic
# has 50 orders in batches of 10. A program handles what poll() returns, logs each exception, and goes on. It commits
# after every 10 orders. The callback that gets the result of a commit raises once: on_commit of a Consumer, or the
# acknowledgement callback of a ShareConsumer with max.poll.records=10. When the program has seen the last order, or
# three exceptions, it closes the consumer. Then another consumer of the group reads what is left.
# Expected: poll() raises the exception, as the tests of confluent-kafka require. The next poll() returns more orders.
# Seen: the poll() that raises has also taken the next orders, and frees them. A Consumer has stored the offset, so the
# next commit covers an order that no one has seen. In implicit mode, the next poll() of a ShareConsumer accepts ten
# such orders. In explicit mode, each later poll() requires acknowledgements for ten records that the program never got;
# the broker delivers them again after close(). The cause: since 2.13, poll() waits in slices of 200 ms to notice
# Ctrl+C, and continues after a slice whose callback raised (Consumer.c). ShareConsumer.c has the same loop, and
# librdkafka counts the records as delivered when poll() takes them. A callback that raises the error of a failed
# acknowledgement, or a stats_cb that raises, also loses a batch. The Java client logs exceptions of its acknowledgement
# callback instead (KAFKA-19840, KAFKA-19827). The guide to the ShareConsumer names what the callback must not call, but
# not that it must not raise. A callback should catch all exceptions, and the loop that polls look for what it noted.
# Output seen:
#   2.12.2, Consumer, callback raises: 50 of 50 orders seen, 1 exception; next consumer: 0 more orders
#   2.16.1, Consumer, callback raises: 49 of 50 orders seen, 1 exception; next consumer: 0 more orders
#   2.16.1, ShareConsumer, callback returns: 50 of 50 orders seen, 0 exceptions; next consumer: 0 more orders
#   2.16.1, ShareConsumer, callback raises: 40 of 50 orders seen, 1 exception; next consumer: 0 more orders
#   2.16.1, explicit ShareConsumer, callback raises: 10 of 50 orders seen, 3 exceptions; next consumer: 40 more orders
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder"
for version in 2.12.2 2.16.1; do
    python3 -m venv "venv-$version"
    "venv-$version/bin/pip" install --quiet "confluent-kafka==$version"
done
cat >pom.xml <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>broker</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.4.0</version>
  </dependency></dependencies></project>
XML
mvn -q -B dependency:copy-dependencies -DoutputDirectory=jars >/dev/null
free_port='import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
port=$(python3 -c "$free_port") controller=$(python3 -c "$free_port")
cat >broker.properties <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller
controller.listener.names=CONTROLLER
log.dirs=$folder/data
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >main.py <<'PYTHON'
import sys, time, uuid
import confluent_kafka as kafka
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

ORDERS, BATCH, WORK_S, MAX_EXCEPTIONS, LIMIT_S = 50, 10, 0.02, 3, 60
ILLEGAL_STATE = [kafka.IllegalStateException] if hasattr(kafka, "IllegalStateException") else []
client = {"bootstrap.servers": sys.argv[1], "log_level": 0}
admin = AdminClient(client)

def send(topic, orders):
    producer = kafka.Producer({**client, "linger.ms": 1000})
    for order in orders:
        producer.produce(topic, str(order))
    producer.flush()

def create(topic):
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    start = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    group = ConfigResource(ConfigResource.Type.GROUP, topic, incremental_configs=[start])
    admin.incremental_alter_configs([group])[group].result()
    for first in range(0, ORDERS, BATCH):
        send(topic, range(first, first + BATCH))

class Callback:
    """A callback that may raise when it is called for the first time."""

    def __init__(self, raises):
        self.raises = raises

    def __call__(self, *result):
        if self.raises:
            self.raises = False
            raise RuntimeError("no space left for the log of commits")

class PlainConsumer:
    """A Consumer that commits automatically, and after each 10 orders."""

    def __init__(self, topic, callback, mode):
        self.consumer = kafka.Consumer({**client, "group.id": topic, "auto.offset.reset": "earliest",
                                        "on_commit": callback})
        self.consumer.subscribe([topic])

    def receive(self):
        message = self.consumer.poll(1)
        return [message] if message else []

    def handled(self, message):
        if message.offset() % BATCH == BATCH - 1:
            self.consumer.commit(message)

    def close(self):
        self.consumer.commit(asynchronous=False)
        self.consumer.close()

class ShareConsumer:
    """A ShareConsumer, which commits when it polls."""

    def __init__(self, topic, callback, mode):
        self.explicit = mode == "explicit"
        self.consumer = kafka.ShareConsumer({**client, "group.id": topic, "max.poll.records": BATCH,
                                             "share.acknowledgement.mode": mode})
        self.consumer.set_acknowledgement_commit_callback(callback)
        self.consumer.subscribe([topic])

    def receive(self):
        return self.consumer.poll(1)

    def handled(self, message):
        if self.explicit:
            self.consumer.acknowledge(message)

    def close(self):
        self.consumer.commit_sync()
        self.consumer.close()

def read(consumer, last):
    """Read until the last order or too many exceptions, and close; return the orders and the number of exceptions."""
    orders, exceptions, limit = set(), 0, time.monotonic() + LIMIT_S
    while last not in orders and exceptions < MAX_EXCEPTIONS and time.monotonic() < limit:
        try:
            for message in consumer.receive():
                time.sleep(WORK_S)
                orders.add(int(message.value()))
                consumer.handled(message)
        except (RuntimeError, *ILLEGAL_STATE):
            exceptions += 1
    consumer.close()
    return orders, exceptions

def run(name, raises, mode="implicit"):
    """Return how many orders the first consumer saw, its exceptions, and how many more the next one got."""
    topic = f"orders-{uuid.uuid4()}"
    create(topic)
    seen, exceptions = read(kind(topic, Callback(raises), mode), ORDERS - 1)
    send(topic, [ORDERS])
    left, _ = read(kind(topic, Callback(False), mode), ORDERS)
    more = len(left - seen - {ORDERS})
    errors = "1 exception" if exceptions == 1 else f"{exceptions} exceptions"
    print(f"{kafka.__version__}, {name}, callback {'raises' if raises else 'returns'}: "
          f"{len(seen)} of {ORDERS} orders seen, {errors}; next consumer: {more} more orders")
    return len(seen), exceptions, more

kind = PlainConsumer
plain = run("Consumer", True)
if kafka.__version__ == "2.12.2":
    sys.exit(plain != (50, 1, 0))
kind = ShareConsumer
returned, raised = run("ShareConsumer", False), run("ShareConsumer", True)
seen, exceptions, more = run("explicit ShareConsumer", True, "explicit")
stuck = exceptions == MAX_EXCEPTIONS and more >= BATCH and seen + more == ORDERS
sys.exit(not stuck or [plain, returned, raised] != [(49, 1, 0), (50, 0, 0), (40, 1, 0)])
PYTHON
echo "confluent-kafka 2.16.1 and 2.12.2, Kafka 4.4.0"
for version in 2.12.2 2.16.1; do
    "venv-$version/bin/python" main.py "127.0.0.1:$port"
done
