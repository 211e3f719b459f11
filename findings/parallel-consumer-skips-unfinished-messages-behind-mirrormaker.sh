#!/usr/bin/env bash
# Shows that Parallel Consumer skips messages that it has not finished, if MirrorMaker has copied its offsets.
#
# Kafka 4.4.0 (brokers from Maven; the script needs a JDK), MirrorMaker 2 from Kafka 4.3.1, parallel-consumer-core
# 0.5.3.3 with the kafka-clients 3.9.1 that it depends on. MirrorMaker copies a topic with 500 orders and the offsets of
# its groups to a second cluster (sync.group.offsets.enabled). Parallel Consumer handles the orders in any order. Two of
# them take long, and it commits. Then the first cluster fails, and the program goes on with the second one. For
# comparison, a plain consumer group has committed the same offset.
# Expected: MirrorMaker translates an offset to that of the same message or of an earlier one. So the program may handle
# some orders again, but it handles all of them, also the two unfinished ones.
# Seen: it never gets the two. Parallel Consumer commits the offset of its first unfinished message. In the metadata of
# this offset, it encodes which later messages are done, by their distances from it. MirrorMaker knows only some pairs
# of offsets, so it mostly translates to an earlier one, here 150 to 1, and copies the metadata as it is. Now all
# distances start at another message: two finished orders count as unfinished, and the unfinished ones as done.
# Parallel Consumer accepts this metadata, reports no error, and commits the end of the topic, as if nothing was left.
# Neither documentation mentions the other. After a change of clusters, a group's metadata must be dropped before
# Parallel Consumer starts, for example by committing the same offset without metadata.
# Output seen:
#   first cluster: all handled but 150 160, committed 150
#   second cluster, plain group: offset 1, handled 1-499, never handled: none
#   second cluster, Parallel Consumer: offset 1, handled 1 11 351-499, never handled: 150 160
set -euo pipefail
folder=$(mktemp -d) processes=()
stop() { kill -9 "$@" && wait "$@" || :; }
trap '[ ${#processes[@]} -eq 0 ] || stop "${processes[@]}"; rm -rf "$folder"' EXIT
cd "$folder"
fetch() {
    mkdir "$1"
    cat >"$1/pom.xml" <<XML
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>$1</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>$2</groupId><artifactId>$3</artifactId><version>$4</version>
  </dependency></dependencies></project>
XML
    mvn -q -B -f "$1/pom.xml" dependency:copy-dependencies -DoutputDirectory="$folder/$1" >/dev/null
}
fetch broker org.apache.kafka kafka_2.13 4.4.0
fetch mirror org.apache.kafka connect-mirror 4.3.1
fetch program io.confluent.parallelconsumer parallel-consumer-core 0.5.3.3
free_port='import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
start_broker() {
    port=$(python3 -c "$free_port") controller=$(python3 -c "$free_port")
    cat >"$1.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller
controller.listener.names=CONTROLLER
log.dirs=$folder/$1
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
PROPERTIES
    java -cp 'broker/*' kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAA -c "$1.properties" >"$1.log" 2>&1
    java -Xmx384m -cp 'broker/*' kafka.Kafka "$1.properties" >>"$1.log" 2>&1 &
    processes+=($!)
}
start_broker first && first=127.0.0.1:$port
start_broker second && second=127.0.0.1:$port
cat >mirror.properties <<PROPERTIES
clusters=first,second
first.bootstrap.servers=$first
second.bootstrap.servers=$second
first->second.enabled=true
first->second.topics=orders
first->second.groups=plain,parallel
first->second.sync.group.offsets.enabled=true
first->second.sync.group.offsets.interval.seconds=1
first->second.emit.checkpoints.interval.seconds=1
first->second.emit.heartbeats.enabled=false
second->first.enabled=false
second->first.emit.heartbeats.enabled=false
refresh.groups.interval.seconds=1
replication.factor=1
offset-syncs.topic.replication.factor=1
checkpoints.topic.replication.factor=1
offset.storage.replication.factor=1
status.storage.replication.factor=1
config.storage.replication.factor=1
PROPERTIES
cat >Main.java <<'JAVA'
import io.confluent.parallelconsumer.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

public class Main {
    static final int ORDERS = 500, LIMIT_S = 80;
    static final SortedSet<Integer> SLOW = new TreeSet<>(Set.of(150, 160));
    static final TopicPartition FIRST = new TopicPartition("orders", 0);
    static final TopicPartition SECOND = new TopicPartition("first.orders", 0);

    static KafkaConsumer<String, String> consumer(String server, String group) {
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "group.id", group,
            "auto.offset.reset", "earliest", "enable.auto.commit", "false");
        return new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
    }

    static ParallelEoSStreamProcessor<String, String> parallel(String server, String topic, Duration commitInterval) {
        var processor = new ParallelEoSStreamProcessor<>(ParallelConsumerOptions.<String, String>builder()
            .consumer(consumer(server, "parallel"))
            .ordering(ParallelConsumerOptions.ProcessingOrder.UNORDERED)
            .commitInterval(commitInterval)
            .build());
        processor.subscribe(List.of(topic));
        return processor;
    }

    /** Return the committed offset of a group, once it is at least this. */
    static long committed(Admin admin, String group, TopicPartition partition, long least) throws Exception {
        var limit = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_S);
        OffsetAndMetadata offset = null;
        while (System.nanoTime() < limit) {
            offset = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().get(partition);
            if (offset != null && offset.offset() >= least) return offset.offset();
            Thread.sleep(100);
        }
        throw new AssertionError(group + " has committed " + offset + " in " + partition);
    }

    static String join(Collection<Integer> numbers) {
        return numbers.isEmpty() ? "none" : numbers.stream().map(String::valueOf).collect(Collectors.joining(" "));
    }

    /** Write runs of numbers as ranges. */
    static String ranges(SortedSet<Integer> numbers) {
        var parts = new ArrayList<String>();
        for (int first : numbers) {
            if (numbers.contains(first - 1)) continue;
            int last = first;
            while (numbers.contains(last + 1)) last++;
            parts.add(first == last ? String.valueOf(first) : first + "-" + last);
        }
        return String.join(" ", parts);
    }

    /** Handle orders of the first cluster, wait until MirrorMaker has copied the offsets, and crash. */
    static void first(String server, String secondServer) throws Exception {
        Map<String, Object> settings = Map.of("bootstrap.servers", server);
        Admin admin = Admin.create(settings), second = Admin.create(Map.of("bootstrap.servers", secondServer));
        admin.createTopics(List.of(new NewTopic(FIRST.topic(), 1, (short) 1))).all().get();
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (int number = 0; number < ORDERS; number++)
                producer.send(new ProducerRecord<>(FIRST.topic(), String.valueOf(number)));
        }
        try (var copies = consumer(secondServer, "none")) {
            copies.assign(List.of(SECOND));
            copies.seekToBeginning(List.of(SECOND));
            for (int seen = 0; seen < ORDERS; ) seen += copies.poll(Duration.ofSeconds(1)).count();
        }
        try (var plain = consumer(server, "plain")) {
            plain.commitSync(Map.of(FIRST, new OffsetAndMetadata(SLOW.first())));
        }
        var handled = ConcurrentHashMap.<Integer>newKeySet();
        var processor = parallel(server, FIRST.topic(), Duration.ofHours(1));
        processor.poll(context -> {
            int number = Integer.parseInt(context.value());
            if (SLOW.contains(number)) sleep();
            handled.add(number);
        });
        while (handled.size() < ORDERS - SLOW.size() || processor.workRemaining() > SLOW.size()) Thread.sleep(100);
        processor.requestCommitAsap();
        System.out.printf("first cluster: all handled but %s, committed %d%n",
            join(SLOW), committed(admin, "parallel", FIRST, 0));
        for (var group : List.of("plain", "parallel")) committed(second, group, SECOND, 0);
        Runtime.getRuntime().halt(handled.stream().anyMatch(SLOW::contains) ? 1 : 0);
    }

    static void sleep() {
        try {
            Thread.sleep(Long.MAX_VALUE);
        } catch (InterruptedException interrupted) {
            throw new IllegalStateException(interrupted);
        }
    }

    /** Print what a group handled in the second cluster; return the unfinished orders that it never got. */
    static SortedSet<Integer> neverHandled(String name, long offset, SortedSet<Integer> handled) {
        var missing = new TreeSet<>(SLOW);
        missing.removeAll(handled);
        System.out.printf("second cluster, %s: offset %d, handled %s, never handled: %s%n",
            name, offset, ranges(handled), join(missing));
        return missing;
    }

    static boolean second(String server) throws Exception {
        var admin = Admin.create(Map.of("bootstrap.servers", server));
        var byPlain = new TreeSet<Integer>();
        long plainOffset = committed(admin, "plain", SECOND, 0), offset = committed(admin, "parallel", SECOND, 0);
        try (var plain = consumer(server, "plain")) {
            plain.subscribe(List.of(SECOND.topic()));
            while (byPlain.isEmpty() || byPlain.last() < ORDERS - 1)
                plain.poll(Duration.ofSeconds(1)).forEach(record -> byPlain.add(Integer.parseInt(record.value())));
        }
        var byParallel = new ConcurrentSkipListSet<Integer>();
        try (var processor = parallel(server, SECOND.topic(), Duration.ofSeconds(1))) {
            processor.poll(context -> byParallel.add(Integer.parseInt(context.value())));
            committed(admin, "parallel", SECOND, ORDERS);
        }
        var missing = neverHandled("plain group", plainOffset, byPlain);
        return neverHandled("Parallel Consumer", offset, byParallel).equals(SLOW) && missing.isEmpty();
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length > 1) first(arguments[0], arguments[1]);
        System.exit(second(arguments[0]) ? 0 : 1);
    }
}
JAVA
echo "Kafka 4.4.0, MirrorMaker 2 of Kafka 4.3.1, parallel-consumer-core 0.5.3.3"
java -Xmx384m -cp 'mirror/*' org.apache.kafka.connect.mirror.MirrorMaker mirror.properties >mirror.log 2>&1 &
processes+=($!)
java -cp 'program/*' Main.java "$first" "$second" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
stop "${processes[0]}" "${processes[2]}"
processes=("${processes[1]}")
java -cp 'program/*' Main.java "$second" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
