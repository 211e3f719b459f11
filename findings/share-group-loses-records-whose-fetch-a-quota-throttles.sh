#!/usr/bin/env bash
# Shows that a share group loses records under a quota: a throttled fetch is empty, but it uses up an attempt.
#
# Kafka 4.4.0 (broker and Java client from Maven; the script needs a JDK). A topic has 200 records of 10 kB in batches
# of one. A share group of 4 consumers accepts each record that poll() returns. Its clients have no quota, or a quota of
# consumer_byte_rate=50000. A consumer group with one consumer gets a quota of the same size. The lock lasts 5 s
# (default: 30 s). A record has 5 attempts (the default).
# Expected: a quota slows the consumers down. Each of them gets all records.
# Seen: under the quota, the share group loses about a fifth of the records (92 of 400 with a lock of 15 s, in another
# run). The broker acquires the records of a fetch, and then measures the response. If the client exceeds its quota, the
# broker sends an empty response instead, with the time to wait. A consumer group fetches the same offsets again. The
# share group has counted an attempt, and keeps the records locked until the lock expires. After some such fetches, a
# record has no attempts left, and the broker archives it. The lag is 0, no consumer reports an error, and no
# application has seen these records. Issue KAFKA-21397 says that a batch larger than the quota's burst stalls
# consumers, but not that throttled fetches of share groups lose records. All clients with the same client.id or user
# share a quota, so more consumers are throttled more often. A message queue on share groups must not limit its
# consumers with quotas.
# Output seen:
#   share group, no quota: 200 of 200 records seen, lag 0
#   consumer group, quota: 200 of 200 records seen
#   share group, quota: 157 of 200 records seen, lag 0
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
group.share.min.record.lock.duration.ms=5000
PROPERTIES
java -cp 'jars/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'jars/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >Main.java <<'JAVA'
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.quota.*;
import org.apache.kafka.common.serialization.*;

public class Main {
    static final int RECORDS = 200, RECORD_BYTES = 10_000, CONSUMERS = 4;
    static final double BYTES_PER_SECOND = 50_000;
    static final ByteArrayDeserializer BYTES = new ByteArrayDeserializer();
    static final ExecutorService threads = Executors.newCachedThreadPool();
    static String server;
    static Admin admin;

    /** Create a topic with records, and settings for a group and a client of its name. */
    static void create(String name, boolean quota) throws Exception {
        admin.createTopics(List.of(new NewTopic(name, 1, (short) 1))).all().get();
        var start = new ConfigEntry("share.auto.offset.reset", "earliest");
        var lock = new ConfigEntry("share.record.lock.duration.ms", "5000");
        var set = AlterConfigOp.OpType.SET;
        List<AlterConfigOp> operations = List.of(new AlterConfigOp(start, set), new AlterConfigOp(lock, set));
        var group = new ConfigResource(ConfigResource.Type.GROUP, name);
        admin.incrementalAlterConfigs(Map.of(group, operations)).all().get();
        if (quota) {
            var clients = new ClientQuotaEntity(Map.of(ClientQuotaEntity.CLIENT_ID, name));
            var limit = new ClientQuotaAlteration.Op("consumer_byte_rate", BYTES_PER_SECOND);
            admin.alterClientQuotas(List.of(new ClientQuotaAlteration(clients, List.of(limit)))).all().get();
        }
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "batch.size", 0);
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (int number = 0; number < RECORDS; number++)
                producer.send(new ProducerRecord<>(name, new byte[RECORD_BYTES]));
        }
    }

    /** Return the lag of a share group, or -1 if it is not known yet. */
    static long lag(String name) throws Exception {
        var offsets = admin.listShareGroupOffsets(Map.of(name, new ListShareGroupOffsetsSpec()));
        try {
            var offset = offsets.partitionsToOffsetInfo(name).get().get(new TopicPartition(name, 0));
            return offset == null ? -1 : offset.lag().orElse(-1L);
        } catch (ExecutionException error) {
            return -1;
        }
    }

    /** Read a topic with a share group until it has no lag; return how many records its consumers saw. */
    static int shareGroup(String name) throws Exception {
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "group.id", name, "client.id", name);
        var offsets = new ConcurrentSkipListSet<Long>();
        var errors = new ConcurrentLinkedQueue<Exception>();
        var ended = new CountDownLatch(1);
        Callable<Void> consume = () -> {
            try (var consumer = new KafkaShareConsumer<>(settings, BYTES, BYTES)) {
                consumer.setAcknowledgementCommitCallback((acknowledged, error) -> {
                    if (error != null) errors.add(error);
                });
                consumer.subscribe(List.of(name));
                while (ended.getCount() > 0)
                    consumer.poll(Duration.ofMillis(500)).forEach(received -> offsets.add(received.offset()));
            }
            return null;
        };
        var consumers = new ArrayList<Future<Void>>();
        for (int number = 0; number < CONSUMERS; number++) consumers.add(threads.submit(consume));
        var limit = System.nanoTime() + 150_000_000_000L;
        while (lag(name) != 0 && System.nanoTime() < limit) Thread.sleep(200);
        ended.countDown();
        for (var consumer : consumers) consumer.get();
        if (lag(name) != 0 || !errors.isEmpty()) throw new AssertionError("lag " + lag(name) + ", errors " + errors);
        return offsets.size();
    }

    /** Read a topic with a consumer group until it has no lag; return how many records its consumer saw. */
    static int consumerGroup(String name) {
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "group.id", name, "client.id", name,
            "auto.offset.reset", "earliest");
        var offsets = new TreeSet<Long>();
        try (var consumer = new KafkaConsumer<>(settings, BYTES, BYTES)) {
            consumer.subscribe(List.of(name));
            var limit = System.nanoTime() + 150_000_000_000L;
            while ((offsets.isEmpty() || offsets.last() < RECORDS - 1) && System.nanoTime() < limit)
                consumer.poll(Duration.ofMillis(500)).forEach(received -> offsets.add(received.offset()));
        }
        return offsets.size();
    }

    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        admin = Admin.create(Map.of("bootstrap.servers", server, "default.api.timeout.ms", 180_000));
        create("share-group-free", false);
        create("share-group-quota", true);
        create("consumer-group-quota", true);
        int free = shareGroup("share-group-free");
        var consumers = threads.submit(() -> consumerGroup("consumer-group-quota"));
        int shared = shareGroup("share-group-quota"), consumed = consumers.get();
        System.out.printf("share group, no quota: %d of %d records seen, lag 0%n", free, RECORDS);
        System.out.printf("consumer group, quota: %d of %d records seen%n", consumed, RECORDS);
        System.out.printf("share group, quota: %d of %d records seen, lag 0%n", shared, RECORDS);
        System.exit(free == RECORDS && consumed == RECORDS && shared < RECORDS - 10 ? 0 : 1);
    }
}
JAVA
echo "Kafka 4.4.0"
java -cp 'jars/*' Main.java "127.0.0.1:$port" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
