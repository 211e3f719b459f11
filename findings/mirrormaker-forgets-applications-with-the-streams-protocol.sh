#!/usr/bin/env bash
# Shows that MirrorMaker stops copying the offsets of a Kafka Streams application that moves to the streams protocol.
#
# Kafka 4.4.0 (brokers and Kafka Streams from Maven; the script needs a JDK), MirrorMaker 2 from Kafka 4.3.1. It copies
# a topic with orders, and each second the offsets of its groups (sync.group.offsets.enabled, groups=.*). Three
# applications handle 50 orders and stop. Then they start again, and handle 50 more, and one more. The first one uses
# the classic protocol all the time. The second one uses group.protocol=streams (KIP-1071) when it starts again, which
# is the documented way to migrate. The third one has always used it. Then the first cluster fails, and the applications
# go on with the second one.
# Expected: each of them goes on with offset 101, or a little before, since all of them have committed this offset.
# Seen: only the first one does. The offset of the second one is still 50, as it was at the migration, and the third one
# has no offset at all. So they handle orders again: all since the migration, or all in the topic. MirrorMaker lists
# groups of the types "classic" and "consumer" (ListGroupsOptions.forConsumerGroups(), which its
# MirrorCheckpointConnector calls), but a streams group has a type of its own. The task that copies the offsets does not
# look at the type, so it goes on until the list is refreshed: after refresh.groups.interval.seconds, 10 minutes by
# default and 1 second here. A check right after the migration does not find the problem. After the refresh,
# MirrorMaker logs at level INFO how many groups were removed, but not their names. In the second cluster, the group looks as if it lagged
# behind. The documentation of the migration says that committed offsets are preserved, and does not name MirrorMaker.
# Before a failover with such applications, copy their offsets with another tool, or make it harmless to handle orders
# again.
# Output seen:
#   first cluster: classic 101, moved 101, streams 101
#   second cluster: classic 101, moved 50, streams none
#   handled again in the second cluster: classic 0, moved 51, streams 101
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
  <groupId>org.apache.kafka</groupId><artifactId>$2</artifactId><version>$3</version>
  </dependency></dependencies></project>
XML
    mvn -q -B -f "$1/pom.xml" dependency:copy-dependencies -DoutputDirectory="$folder/$1" >/dev/null
}
fetch broker kafka_2.13 4.4.0
fetch program kafka-streams 4.4.0
fetch mirror connect-mirror 4.3.1
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
offsets.topic.num.partitions=5
group.initial.rebalance.delay.ms=0
group.streams.initial.rebalance.delay.ms=0
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
first->second.groups=.*
first->second.sync.group.offsets.enabled=true
first->second.sync.group.offsets.interval.seconds=1
first->second.emit.checkpoints.interval.seconds=1
first->second.emit.heartbeats.enabled=false
first->second.offset.lag.max=0
second->first.enabled=false
second->first.emit.heartbeats.enabled=false
replication.policy.class=org.apache.kafka.connect.mirror.IdentityReplicationPolicy
refresh.groups.interval.seconds=1
replication.factor=1
offset-syncs.topic.replication.factor=1
checkpoints.topic.replication.factor=1
offset.storage.replication.factor=1
status.storage.replication.factor=1
config.storage.replication.factor=1
PROPERTIES
cat >Main.java <<'JAVA'
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;
import org.apache.kafka.streams.*;

public class Main {
    static final int LIMIT_S = 180;
    static final TopicPartition ORDERS = new TopicPartition("orders", 0);
    static final List<String> NAMES = List.of("classic", "moved", "streams");
    static final List<String> AT_FIRST = List.of("classic", "classic", "streams");
    static final List<String> LATER = List.of("classic", "streams", "streams");

    /** The applications, running in one of the clusters. */
    static class Applications implements AutoCloseable {
        final List<AtomicInteger> handled = NAMES.stream().map(name -> new AtomicInteger()).toList();
        final List<KafkaStreams> running = new ArrayList<>();

        Applications(String server, List<String> protocols) {
            for (int index = 0; index < NAMES.size(); index++) {
                var count = handled.get(index);
                var builder = new StreamsBuilder();
                builder.<String, String>stream("orders").foreach((key, value) -> count.incrementAndGet());
                var settings = new Properties();
                settings.put("bootstrap.servers", server);
                settings.put("application.id", NAMES.get(index));
                settings.put("group.protocol", protocols.get(index));
                settings.put("state.dir", "state-" + server.replace(':', '-'));
                settings.put("commit.interval.ms", 200);
                settings.put("default.key.serde", Serdes.StringSerde.class);
                settings.put("default.value.serde", Serdes.StringSerde.class);
                running.add(new KafkaStreams(builder.build(), settings));
            }
            running.forEach(KafkaStreams::start);
        }

        @Override
        public void close() {
            var leave = CloseOptions.groupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP);
            running.forEach(streams -> streams.close(leave));
        }
    }

    static void send(String server, int number) {
        Map<String, Object> settings = Map.of("bootstrap.servers", server);
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (int index = 0; index < number; index++) producer.send(new ProducerRecord<>("orders", "an order"));
        }
    }

    /** Return the committed offset of a group, or null. */
    static Long committed(Admin admin, String group) throws Exception {
        var offset = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().get(ORDERS);
        return offset == null ? null : offset.offset();
    }

    static void await(Admin admin, List<String> groups, long offset) throws Exception {
        var limit = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_S);
        for (var group : groups) {
            Long last = null;
            while ((last = committed(admin, group)) == null || last < offset) {
                if (System.nanoTime() > limit) throw new AssertionError(group + " has committed " + last);
                Thread.sleep(100);
            }
        }
    }

    static String each(List<?> values) {
        var parts = new ArrayList<String>();
        for (int index = 0; index < NAMES.size(); index++)
            parts.add(NAMES.get(index) + " " + (values.get(index) == null ? "none" : values.get(index)));
        return String.join(", ", parts);
    }

    static List<Long> offsets(Admin admin) throws Exception {
        var offsets = new ArrayList<Long>();
        for (var name : NAMES) offsets.add(committed(admin, name));
        return offsets;
    }

    /** Wait until the second application has migrated, and MirrorMaker has a list of groups from after that. */
    static void awaitRefresh(Admin admin, Admin second) throws Exception {
        var limit = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_S);
        var streams = ListGroupsOptions.forStreamsGroups();
        while (admin.listGroups(streams).all().get().stream().noneMatch(group -> group.groupId().equals("moved"))) {
            if (System.nanoTime() > limit) throw new AssertionError("not migrated");
            Thread.sleep(100);
        }
        admin.alterConsumerGroupOffsets("new", Map.of(ORDERS, new OffsetAndMetadata(50))).all().get();
        await(second, List.of("new"), 50);
    }

    /** Handle all orders in the first cluster, and wait until MirrorMaker has copied the offset of the first group. */
    static void first(String server, String secondServer) throws Exception {
        var admin = Admin.create(Map.of("bootstrap.servers", server, "default.api.timeout.ms", 180_000));
        var second = Admin.create(Map.of("bootstrap.servers", secondServer));
        admin.createTopics(List.of(new NewTopic("orders", 1, (short) 1))).all().get();
        send(server, 50);
        try (var applications = new Applications(server, AT_FIRST)) {
            await(admin, NAMES, 50);
        }
        await(second, List.of("classic", "moved"), 50);
        try (var applications = new Applications(server, LATER)) {
            awaitRefresh(admin, second);
            send(server, 50);
            await(admin, NAMES, 100);
            await(second, List.of("classic"), 100);
            send(server, 1);
            await(admin, NAMES, 101);
        }
        await(second, List.of("classic"), 101);
        System.out.println("first cluster: " + each(offsets(admin)));
        System.out.println("second cluster: " + each(offsets(second)));
    }

    static boolean second(String server) throws Exception {
        var admin = Admin.create(Map.of("bootstrap.servers", server));
        List<Integer> again;
        try (var applications = new Applications(server, LATER)) {
            send(server, 1);
            await(admin, NAMES, 102);
            again = applications.handled.stream().map(count -> count.get() - 1).toList();
        }
        System.out.println("handled again in the second cluster: " + each(again));
        return again.equals(List.of(0, 51, 101));
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length > 1) first(arguments[0], arguments[1]);
        System.exit(arguments.length > 1 || second(arguments[0]) ? 0 : 1);
    }
}
JAVA
echo "Kafka 4.4.0, MirrorMaker 2 of Kafka 4.3.1"
java -Xmx384m -cp 'mirror/*' org.apache.kafka.connect.mirror.MirrorMaker mirror.properties >mirror.log 2>&1 &
processes+=($!)
java -cp 'program/*' Main.java "$first" "$second" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
stop "${processes[0]}" "${processes[2]}"
processes=("${processes[1]}")
java -cp 'program/*' Main.java "$second" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
