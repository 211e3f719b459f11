#!/usr/bin/env bash
# Shows that a Kafka share group writes dead letters for the markers of transactions if its consumers crash.
#
# Kafka 4.4.0 (broker and Java client from Maven; the script needs a JDK). A producer sends four orders, each in its own
# transaction, and aborts the third. The group reads with share.isolation.level=read_committed. It has a dead-letter
# queue (KIP-1191) and two attempts. A consumer rejects the orders, or two consumers crash one after the other while
# they process them, as they do if an order is poisonous. A crash is a killed process: the broker sees its connection
# end, and releases what it held.
# Expected: three dead letters, one for each committed order, because no consumer ever gets a marker.
# Seen: if a consumer rejects the orders, there are three. After two crashes there are seven: the broker takes the range
# of offsets that the consumer held for messages. It also copies keys and values of the four markers, even of the marker
# of the aborted transaction, as plain records: a key of 4 bytes (version and type) and a value of 6. Without
# errors.deadletterqueue.copy.record.enable (the default), they do not differ from dead letters of orders. A client that
# settles its messages names the gaps between them, but a crashed one cannot. If each transaction has one record, about
# half of the dead letters are false. A tool that counts or redrives the dead letters of a share group has to look up
# whether their offset has a message.
# Output seen:
#   rejected: 3 dead letters: order-0 order-1 order-3
#   crashed: 7 dead letters: order-0 0x000000000000 order-1 0x000000000000 0x000000000000 order-3 0x000000000000
#   crashed, no copies: 7 dead letters: null null null null null null null
#   their offsets: 0 2 6 / 0 1 2 3 5 6 7 / 0 1 2 3 5 6 7
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder"
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
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >Main.java <<'JAVA'
import java.time.Duration;
import java.util.*;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.*;

public class Main {
    static final int ORDERS = 4, ABORTED = 2, ATTEMPTS = 2;
    static final Map<Long, String> REAL = new TreeMap<>(Map.of(0L, "order-0", 2L, "order-1", 6L, "order-3"));
    static final List<Long> WITH_MARKERS = List.of(0L, 1L, 2L, 3L, 5L, 6L, 7L);
    static String server;
    static Admin admin;

    /** Create a topic with orders, and a group of its name that reads it from the start. */
    static void create(String name, boolean copy) throws Exception {
        var dead = new NewTopic("dlq." + name, 1, (short) 1);
        dead.configs(Map.of("errors.deadletterqueue.group.enable", "true"));
        admin.createTopics(List.of(new NewTopic(name, 1, (short) 1), dead)).all().get();
        var settings = Map.of("share.auto.offset.reset", "earliest", "share.isolation.level", "read_committed",
            "share.delivery.count.limit", "" + ATTEMPTS, "errors.deadletterqueue.topic.name", "dlq." + name,
            "errors.deadletterqueue.copy.record.enable", "" + copy);
        var operations = new ArrayList<AlterConfigOp>();
        settings.forEach((option, value) ->
            operations.add(new AlterConfigOp(new ConfigEntry(option, value), AlterConfigOp.OpType.SET)));
        var group = new ConfigResource(ConfigResource.Type.GROUP, name);
        admin.incrementalAlterConfigs(Map.of(group, operations)).all().get();
        Map<String, Object> client = Map.of("bootstrap.servers", server, "transactional.id", name);
        try (var producer = new KafkaProducer<>(client, new StringSerializer(), new StringSerializer())) {
            producer.initTransactions();
            for (int number = 0; number < ORDERS; number++) {
                producer.beginTransaction();
                producer.send(new ProducerRecord<>(name, "order-" + number)).get();
                if (number == ABORTED) producer.abortTransaction();
                else producer.commitTransaction();
            }
        }
        var partition = new TopicPartition(name, 0);
        var committed = new ListOffsetsOptions(IsolationLevel.READ_COMMITTED);
        for (long end = 0; end < 2 * ORDERS; Thread.sleep(50)) {
            var offsets = admin.listOffsets(Map.of(partition, OffsetSpec.latest()), committed);
            end = offsets.partitionResult(partition).get().offset();
        }
    }

    /** Get all orders from the group; reject them, or keep them until this process is killed. */
    static void receive(String name, boolean reject) throws Exception {
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "group.id", name,
            "share.acknowledgement.mode", "explicit");
        var received = new TreeMap<Long, String>();
        try (var consumer = new KafkaShareConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(name));
            var end = System.nanoTime() + 90_000_000_000L;
            while (received.isEmpty() && System.nanoTime() < end)
                for (var record : consumer.poll(Duration.ofMillis(500))) {
                    received.put(record.offset(), record.value());
                    if (reject) consumer.acknowledge(record, AcknowledgeType.REJECT);
                }
            assertEqual(REAL, received);
            if (reject) {
                consumer.commitSync().values().forEach(error -> assertEqual(Optional.empty(), error));
            } else {
                System.out.println("received");
                Thread.sleep(Long.MAX_VALUE);
            }
        }
    }

    /** Run a consumer in another process, and kill it when it has the orders. */
    static void crash(String name) throws Exception {
        var java = ProcessHandle.current().info().command().orElseThrow();
        var command = List.of(java, "-Xmx256m", "-cp", "jars/*:.", "Main", server, name);
        var consumer = new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.DISCARD).start();
        assertEqual("received", consumer.inputReader().readLine());
        consumer.destroyForcibly().waitFor();
    }

    static String text(byte[] value) {
        if (value == null || value[0] != 0) return value == null ? "null" : new String(value);
        return "0x" + HexFormat.of().formatHex(value);
    }

    /** Read dead letters to the end, but at least so many; print and return their values by offsets of messages. */
    static Map<Long, String> deadLetters(String name, int expected) {
        var partition = new TopicPartition("dlq." + topic(name), 0);
        var letters = new TreeMap<Long, String>();
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "auto.offset.reset", "earliest");
        try (var reader = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            reader.assign(List.of(partition));
            var last = System.nanoTime() + 60_000_000_000L;
            while (System.nanoTime() < last && (letters.size() < expected
                || reader.position(partition) < reader.endOffsets(List.of(partition)).get(partition)))
                for (var letter : reader.poll(Duration.ofMillis(500))) {
                    var offset = new String(letter.headers().lastHeader("__dlq.errors.offset").value());
                    letters.put(Long.valueOf(offset), text(letter.value()));
                }
        }
        System.out.printf("%s: %d dead letters: %s%n", name, letters.size(), String.join(" ", letters.values()));
        return letters;
    }

    static void assertEqual(Object expected, Object seen) {
        if (!expected.equals(seen)) throw new AssertionError("expected " + expected + ", got " + seen);
    }

    static String topic(String name) {
        return name.replaceAll("[^a-z]+", "-");
    }

    /** Let the orders of a topic fail, all attempts of them or with a rejection. */
    static void fail(String name, boolean crashes, boolean copy) throws Exception {
        create(topic(name), copy);
        if (crashes) for (int attempt = 0; attempt < ATTEMPTS; attempt++) crash(topic(name));
        else receive(topic(name), true);
    }

    static String offsets(Map<Long, String> letters) {
        return letters.keySet().stream().map(String::valueOf).collect(Collectors.joining(" "));
    }

    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        if (arguments.length > 1) receive(arguments[1], false);
        admin = Admin.create(Map.of("bootstrap.servers", server));
        fail("rejected", false, true);
        fail("crashed", true, true);
        fail("crashed, no copies", true, false);
        var rejected = deadLetters("rejected", REAL.size());
        var crashed = deadLetters("crashed", WITH_MARKERS.size());
        var bare = deadLetters("crashed, no copies", WITH_MARKERS.size());
        System.out.printf("their offsets: %s / %s / %s%n", offsets(rejected), offsets(crashed), offsets(bare));
        var copied = new TreeMap<>(REAL);
        for (var offset : WITH_MARKERS) copied.putIfAbsent(offset, "0x000000000000");
        var same = crashed.equals(copied) && bare.keySet().equals(copied.keySet()) && rejected.equals(REAL);
        System.exit(same && bare.values().stream().allMatch("null"::equals) ? 0 : 1);
    }
}
JAVA
javac -cp 'jars/*' Main.java
echo "Kafka 4.4.0"
java -cp 'jars/*:.' Main "127.0.0.1:$port" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
