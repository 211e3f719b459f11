#!/usr/bin/env bash
# Shows that a share consumer that renews one record uses up the attempts of others, which no application has seen.
#
# Kafka 4.4.0 (broker and Java client from Maven; the script needs a JDK). A topic has 60 records in batches of 10. A
# consumer polls with max.poll.records=10 and explicit acknowledgement. It accepts each record at once, but the first
# one takes long, so it renews the lock of that record with each poll (KIP-1222). Then the consumer ends (a crash, a
# deployment), and another one takes over. The lock lasts 15 s (default: 30 s). A record has 5 attempts (the default).
# Expected: polls also return the other 50 records, or leave them to other consumers. The next consumer gets the rest.
# Seen: while a consumer has a renewed record, poll() returns only that record, but the client also fetches others. The
# broker counts an attempt for each of them, and the client keeps them in its buffer. After 15 s, their locks expire,
# and the client fetches them again, until they have no attempts left. The next consumer gets the renewed record only:
# 50 records are lost, although no application has seen them. Issue KAFKA-20458 says that polls return renewed records,
# but not that they return nothing else. A message queue on share groups cannot renew locks of single records without
# this loss, so its tasks must end within the lock's duration.
# Output seen:
#   renewed for 5 s: its consumer sees 10 records, the next one 51, never seen: 0
#   renewed for 150 s: its consumer sees 10 records, the next one 1, never seen: 50
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
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.*;

public class Main {
    static final int RECORDS = 60, BATCH = 10;
    static String server;
    static Admin admin;

    /** Create a topic with records, and a group of its name that reads it from the start. */
    static void create(String name) throws Exception {
        admin.createTopics(List.of(new NewTopic(name, 1, (short) 1))).all().get();
        var start = new ConfigEntry("share.auto.offset.reset", "earliest");
        var lock = new ConfigEntry("share.record.lock.duration.ms", "15000");
        var set = AlterConfigOp.OpType.SET;
        List<AlterConfigOp> operations = List.of(new AlterConfigOp(start, set), new AlterConfigOp(lock, set));
        var group = new ConfigResource(ConfigResource.Type.GROUP, name);
        admin.incrementalAlterConfigs(Map.of(group, operations)).all().get();
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "linger.ms", 1000);
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (int number = 0; number < RECORDS; number++) {
                producer.send(new ProducerRecord<>(name, "message"));
                if (number % BATCH == BATCH - 1) producer.flush();
            }
        }
    }

    /** Poll for some seconds after the first records; return the offsets. */
    static Set<Long> read(String name, int seconds, boolean renewFirst) {
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "group.id", name, "max.poll.records", BATCH,
            "share.acknowledgement.mode", "explicit");
        var offsets = new TreeSet<Long>();
        try (var consumer = new KafkaShareConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(name));
            var end = System.nanoTime() + 60_000_000_000L;
            while (System.nanoTime() < end)
                for (var received : consumer.poll(Duration.ofMillis(500))) {
                    if (offsets.isEmpty()) end = System.nanoTime() + seconds * 1_000_000_000L;
                    offsets.add(received.offset());
                    var renewed = renewFirst && received.offset() == 0;
                    consumer.acknowledge(received, renewed ? AcknowledgeType.RENEW : AcknowledgeType.ACCEPT);
                }
        }
        return offsets;
    }

    /** Read with one consumer that renews the first record, and then with another; return how many no one has seen. */
    static int unseen(int seconds) throws Exception {
        var name = "renewed-for-" + seconds;
        create(name);
        var first = read(name, seconds, true);
        var second = read(name, 20, false);
        var seen = new TreeSet<>(first);
        seen.addAll(second);
        System.out.printf("renewed for %d s: its consumer sees %d records, the next one %d, never seen: %d%n",
            seconds, first.size(), second.size(), RECORDS - seen.size());
        return RECORDS - seen.size();
    }

    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        admin = Admin.create(Map.of("bootstrap.servers", server));
        System.exit(unseen(5) == 0 && unseen(150) >= RECORDS / 2 ? 0 : 1);
    }
}
JAVA
echo "Kafka 4.4.0"
java -cp 'jars/*' Main.java "127.0.0.1:$port" 2>client.log
