#!/usr/bin/env bash
# Shows that the reset of a share group has no effect on its consumers while a stuck consumer is still connected.
#
# Kafka 4.4.0 (broker and Java client from Maven; the script needs a JDK). The first consumer of a group accepts five
# records. Then it closes, or its handler gets stuck: it does not poll within max.poll.interval.ms (3 s, to make the
# script short), so it leaves the group. The group is now empty, and Admin.alterShareGroupOffsets() succeeds (the call
# that kafka-share-groups.sh makes). The reset goes to the first offset, to replay all records, or to the end, to skip
# five records that were sent meanwhile. Then a second consumer starts.
# Expected: it gets the five records that are to be replayed, and none of the others.
# Seen: if the first consumer has closed, this happens. If it is stuck, the second consumer does not get the replay, but
# it does get the records that were skipped. The admin client already reports the new offset and its lag. The broker
# that leads the partition keeps the old position in memory until all consumers of the group have closed their session
# or connection, and leaving the group does neither. A new record gives the reset away: the broker refuses the next
# acknowledgement with NOT_LEADER_OR_FOLLOWER, although the leader has not changed. Then it reads the offset that was
# set, and delivers from there: what was acknowledged in vain comes a second time. An operator who skips messages with
# a reset has to end stuck consumers first, because an empty group does not mean that there are none.
# Output seen:
#   closed, replay: group empty, offset 0; next consumer gets 0 1 2 3 4
#   stuck, replay: group empty, offset 0; next consumer gets nothing
#   stuck, replay, after a new record: 5 (NOT_LEADER_OR_FOLLOWER) 0 1 2 3 4 5
#   closed, skip: group empty, offset 10; next consumer gets nothing
#   stuck, skip: group empty, offset 10; next consumer gets 5 6 7 8 9 (NOT_LEADER_OR_FOLLOWER)
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
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >Main.java <<'JAVA'
import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.*;

public class Main {
    static final int RECORDS = 5;
    static String server;
    static Admin admin;

    static KafkaShareConsumer<String, String> consumer(String name, int maxPollIntervalMs) {
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "group.id", name,
            "share.acknowledgement.mode", "explicit", "max.poll.interval.ms", maxPollIntervalMs);
        var consumer = new KafkaShareConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of(name));
        return consumer;
    }

    /** Accept so many records, or all that come within some seconds; return their offsets, and errors of commits. */
    static String read(KafkaShareConsumer<String, String> consumer, int records, int seconds) {
        var seen = new ArrayList<String>();
        var end = System.nanoTime() + seconds * 1_000_000_000L;
        for (int count = 0; count < records && System.nanoTime() < end; ) {
            for (var received : consumer.poll(Duration.ofMillis(500))) {
                seen.add(String.valueOf(received.offset()));
                consumer.acknowledge(received);
                count++;
            }
            for (var error : consumer.commitSync().values())
                error.ifPresent(exception -> seen.add("(" + Errors.forException(exception) + ")"));
        }
        return seen.isEmpty() ? "nothing" : String.join(" ", seen);
    }

    static void send(String name, int records) throws Exception {
        Map<String, Object> settings = Map.of("bootstrap.servers", server);
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (int number = 0; number < records; number++) producer.send(new ProducerRecord<>(name, "message")).get();
        }
    }

    /** Reset a group whose first consumer has closed or is stuck; return what the next consumer gets. */
    static List<String> reset(boolean stuck, boolean skip) throws Exception {
        var title = (stuck ? "stuck, " : "closed, ") + (skip ? "skip" : "replay");
        var name = title.replace(", ", "-");
        admin.createTopics(List.of(new NewTopic(name, 1, (short) 1))).all().get();
        var start = new ConfigEntry("share.auto.offset.reset", "earliest");
        List<AlterConfigOp> operations = List.of(new AlterConfigOp(start, AlterConfigOp.OpType.SET));
        var group = new ConfigResource(ConfigResource.Type.GROUP, name);
        admin.incrementalAlterConfigs(Map.of(group, operations)).all().get();
        send(name, RECORDS);
        var first = consumer(name, 3000);
        assertEqual("0 1 2 3 4", read(first, RECORDS, 60));
        if (!stuck) first.close();
        if (skip) send(name, RECORDS);
        while (admin.describeShareGroups(List.of(name)).all().get().get(name).groupState() != GroupState.EMPTY)
            Thread.sleep(100);
        var partition = new TopicPartition(name, 0);
        long offset = skip ? 2 * RECORDS : 0;
        admin.alterShareGroupOffsets(name, Map.of(partition, offset)).all().get();
        var offsets = admin.listShareGroupOffsets(Map.of(name, new ListShareGroupOffsetsSpec()));
        assertEqual(offset, offsets.partitionsToOffsetInfo(name).get().get(partition).startOffset());
        var results = new ArrayList<String>();
        try (var second = consumer(name, 300_000)) {
            results.add(read(second, RECORDS, 12));
            System.out.printf("%s: group empty, offset %d; next consumer gets %s%n", title, offset, results.get(0));
            if (stuck && !skip) {
                send(name, 1);
                results.add(read(second, RECORDS + 2, 30));
                System.out.printf("%s, after a new record: %s%n", title, results.get(1));
            }
        }
        if (stuck) first.close();
        return results;
    }

    static void assertEqual(Object expected, Object seen) {
        if (!expected.equals(seen)) throw new AssertionError("expected " + expected + ", got " + seen);
    }

    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        admin = Admin.create(Map.of("bootstrap.servers", server));
        var refused = " (NOT_LEADER_OR_FOLLOWER)";
        assertEqual(List.of("0 1 2 3 4"), reset(false, false));
        assertEqual(List.of("nothing", "5" + refused + " 0 1 2 3 4 5"), reset(true, false));
        assertEqual(List.of("nothing"), reset(false, true));
        assertEqual(List.of("5 6 7 8 9" + refused), reset(true, true));
        System.exit(0);
    }
}
JAVA
echo "Kafka 4.4.0"
java -cp 'jars/*' Main.java "127.0.0.1:$port" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
