#!/usr/bin/env bash
# Shows that renew() of Spring's share listeners calls the listener again, or has no effect until the listener returns.
#
# Kafka 4.4.0 (broker from Maven; the script needs a JDK), spring-kafka 4.1.2 with the kafka-clients 4.2.2 that it
# depends on. A container with ShareAckMode.MANUAL and two consumers gets one record. The task takes 7 s and renews the
# record's lock every 2 s. The lock lasts 5 s (default: 30 s), and a record has 5 attempts (the default). The task runs
# in the listener, which also calls commitSync() after renew(), or in a thread that the listener starts. For comparison,
# it renews in the listener with the Java client itself: acknowledge(record, RENEW), commitSync() and poll().
# Expected: the listener gets the record once. ShareAcknowledgment.renew() says: "The broker will extend the lock so the
# record is not redelivered while processing continues", and that commitSync() commits it.
# Seen: renew() only adds the acknowledgement to a queue, which the container's thread reads before its next poll. That
# is after the listener has returned, so commitSync() commits nothing, and the lock expires. The other consumer starts
# the same task, and so on: all attempts are used up, although each of them succeeds. In a thread, renew() reaches the
# broker, but poll() of the Java client returns renewed records again, which issue KAFKA-20458 reports for that client.
# The container calls the listener for them as for new ones, with the same delivery count, so each renewal starts the
# task once more, and these tasks renew, too. The reference of Spring mentions none of this. A listener must not call
# renew(), or it has to recognize the records that it works on; a task in the listener has to end before the lock.
# Output seen (the last line had 4 to 7 attempts):
#   renewed with the Java client: attempts 1
#   renew() in the listener: attempts 1 2 3 4 5
#   renew() in a thread: attempts 1 1 1 1
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder"
cat >broker.xml <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>broker</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.4.0</version>
  </dependency></dependencies></project>
XML
cat >program.xml <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>program</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>org.springframework.kafka</groupId><artifactId>spring-kafka</artifactId><version>4.1.2</version>
  </dependency></dependencies></project>
XML
for pom in broker program; do
    mvn -q -B -f $pom.xml dependency:copy-dependencies -DoutputDirectory="$folder/$pom" >/dev/null
done
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
java -cp 'broker/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c broker.properties >broker.log 2>&1
java -Xmx512m -cp 'broker/*' kafka.Kafka broker.properties >>broker.log 2>&1 &
broker=$!
cat >Main.java <<'JAVA'
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.*;
import org.springframework.kafka.core.DefaultShareConsumerFactory;
import org.springframework.kafka.listener.*;
import org.springframework.kafka.support.ShareAcknowledgment;

public class Main {
    static final int WORK_S = 7, RENEWAL_S = 2, LOCK_MS = 5000, CONSUMERS = 2, LIMIT_S = 80;
    static final ExecutorService threads = Executors.newCachedThreadPool();
    static String server;
    static Admin admin;

    /** The task: work for some seconds, renew the lock meanwhile, and accept the record. */
    static void work(ShareAcknowledgment acknowledgment, Runnable renew) {
        for (int second = 1; second <= WORK_S; second++) {
            try {
                Thread.sleep(1000);
            } catch (InterruptedException interrupted) {
                return;
            }
            if (second % RENEWAL_S == 0) renew.run();
        }
        acknowledgment.acknowledge();
    }

    /** Renew the lock with the Java client, and take the record from the next poll, which returns it. */
    static void renew(ShareConsumer<String, String> consumer, ConsumerRecord<String, String> record) {
        consumer.acknowledge(record, AcknowledgeType.RENEW);
        consumer.commitSync();
        consumer.poll(Duration.ofMillis(100));
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

    /** Send one record to a container until its group has no lag; return the attempts that its listener saw. */
    static List<Integer> attempts(String name, AcknowledgingShareConsumerAwareMessageListener<String, String> listener)
            throws Exception {
        admin.createTopics(List.of(new NewTopic(name, 1, (short) 1))).all().get();
        var start = new ConfigEntry("share.auto.offset.reset", "earliest");
        var lock = new ConfigEntry("share.record.lock.duration.ms", String.valueOf(LOCK_MS));
        var set = AlterConfigOp.OpType.SET;
        List<AlterConfigOp> operations = List.of(new AlterConfigOp(start, set), new AlterConfigOp(lock, set));
        var group = new ConfigResource(ConfigResource.Type.GROUP, name);
        admin.incrementalAlterConfigs(Map.of(group, operations)).all().get();
        Map<String, Object> client = Map.of("bootstrap.servers", server);
        try (var producer = new KafkaProducer<>(client, new StringSerializer(), new StringSerializer())) {
            producer.send(new ProducerRecord<>(name, "task")).get();
        }
        var seen = Collections.synchronizedList(new ArrayList<Integer>());
        var properties = new ContainerProperties(name);
        properties.setGroupId(name);
        properties.setShareAckMode(ContainerProperties.ShareAckMode.MANUAL);
        properties.setMessageListener((AcknowledgingShareConsumerAwareMessageListener<String, String>)
            (record, acknowledgment, consumer) -> {
                seen.add((int) record.deliveryCount().get());
                listener.onShareRecord(record, acknowledgment, consumer);
            });
        var container = new ShareKafkaMessageListenerContainer<>(new DefaultShareConsumerFactory<String, String>(
            client, StringDeserializer::new, StringDeserializer::new), properties);
        container.setBeanName(name);
        container.setConcurrency(CONSUMERS);
        container.start();
        var limit = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_S);
        while (lag(name) != 0 && System.nanoTime() < limit) Thread.sleep(200);
        if (lag(name) != 0) throw new AssertionError(name + ": lag " + lag(name));
        return List.copyOf(seen);
    }

    static void print(String name, List<Integer> attempts) {
        var numbers = attempts.stream().map(String::valueOf).collect(Collectors.joining(" "));
        System.out.println(name + ": attempts " + numbers);
    }

    @SuppressWarnings("unchecked")
    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        admin = Admin.create(Map.of("bootstrap.servers", server, "default.api.timeout.ms", 180_000));
        var byClient = threads.submit(() -> attempts("by-client", (record, acknowledgment, consumer) ->
            work(acknowledgment, () -> renew((ShareConsumer<String, String>) consumer, record))));
        var inListener = threads.submit(() -> attempts("in-listener", (record, acknowledgment, consumer) ->
            work(acknowledgment, () -> {
                acknowledgment.renew();
                consumer.commitSync();
            })));
        var inThread = threads.submit(() -> attempts("in-thread", (record, acknowledgment, consumer) ->
            threads.submit(() -> work(acknowledgment, acknowledgment::renew))));
        print("renewed with the Java client", byClient.get());
        print("renew() in the listener", inListener.get());
        print("renew() in a thread", inThread.get());
        var once = byClient.get().equals(List.of(1));
        var usedUp = inListener.get().equals(List.of(1, 2, 3, 4, 5));
        var again = inThread.get().size() > 2 && Set.copyOf(inThread.get()).equals(Set.of(1));
        System.exit(once && usedUp && again ? 0 : 1);
    }
}
JAVA
echo "Kafka 4.4.0, spring-kafka 4.1.2"
java -cp 'program/*' Main.java "127.0.0.1:$port" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
