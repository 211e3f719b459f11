#!/usr/bin/env bash
# Shows that a dead letter of Kafka Streams is empty if its record was copied to another topic before it failed.
#
# Kafka 4.4.0 (broker and Kafka Streams from Maven; the script needs a JDK). An application reads orders, and a step
# fails for two of five. It has errors.dead.letter.queue.topic.name (KIP-1034) and the handler that logs and continues.
# One topology only processes the orders. The others also copy each order to an archive topic, before or after that.
# Expected: all of them write the same two dead letters, with the key and the value of the orders that failed.
# Seen: if the copy comes first, the dead letters have neither key nor value. A sink drops the source's raw bytes from
# the context of the record, as soon as it has serialized its output. The next step that gets the record shares this
# context, and its dead letter is made from these bytes. The order of two lines decides, since Streams calls the
# children of a node in the order of their definition. The application commits the orders. ErrorHandlerContext says when
# it has no raw bytes (in a punctuation or a production handler), but does not mention this case. Headers of the dead
# letters name the offsets of the orders, which help until the source topic deletes them. A message queue on Kafka
# Streams has to copy messages last, or its handler has to build dead letters from the record that it is called with.
# Output seen:
#   processed only: results 10 30 50, committed offset 5, dead letters b=twenty d=forty
#   archived last: results 10 30 50, committed offset 5, dead letters b=twenty d=forty
#   archived first: results 10 30 50, committed offset 5, dead letters null=null null=null
set -euo pipefail
folder=$(mktemp -d) broker=
trap '[ -z "$broker" ] || { kill -9 "$broker" && wait "$broker" || :; }; rm -rf "$folder"' EXIT
cd "$folder"
cat >pom.xml <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>broker</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.4.0</version>
  </dependency><dependency>
  <groupId>org.apache.kafka</groupId><artifactId>kafka-streams</artifactId><version>4.4.0</version>
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
group.initial.rebalance.delay.ms=0
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
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;
import org.apache.kafka.streams.*;
import org.apache.kafka.streams.errors.LogAndContinueProcessingExceptionHandler;
import org.apache.kafka.streams.kstream.KStream;

public class Main {
    static final List<String> ORDERS = List.of("a=10", "b=twenty", "c=30", "d=forty", "e=50");
    static String server;

    static String parsed(String value) {
        return String.valueOf(Integer.parseInt(value));
    }

    /** Read a topic until it has so many records; return them. */
    static List<ConsumerRecord<String, String>> read(String topic, int expected) {
        var records = new ArrayList<ConsumerRecord<String, String>>();
        Map<String, Object> settings = Map.of("bootstrap.servers", server, "auto.offset.reset", "earliest");
        try (var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.assign(List.of(new TopicPartition(topic, 0)));
            var end = System.nanoTime() + 60_000_000_000L;
            while (records.size() < expected && System.nanoTime() < end)
                consumer.poll(Duration.ofMillis(500)).forEach(records::add);
        }
        return records;
    }

    /** Run a topology over the orders; return its dead letters. */
    static List<String> deadLetters(String name, boolean archiveFirst, boolean archiveLast) throws Exception {
        var id = name.replace(' ', '-');
        String orders = id + "-orders", archive = id + "-archive", results = id + "-results", dead = id + "-dead";
        Map<String, Object> client = Map.of("bootstrap.servers", server);
        try (var admin = Admin.create(client)) {
            var topics = List.of(orders, archive, results, dead);
            admin.createTopics(topics.stream().map(topic -> new NewTopic(topic, 1, (short) 1)).toList()).all().get();
        }
        try (var producer = new KafkaProducer<>(client, new StringSerializer(), new StringSerializer())) {
            for (var order : ORDERS)
                producer.send(new ProducerRecord<>(orders, order.split("=")[0], order.split("=")[1])).get();
        }
        var builder = new StreamsBuilder();
        KStream<String, String> stream = builder.stream(orders);
        if (archiveFirst) stream.to(archive);
        stream.mapValues(Main::parsed).to(results);
        if (archiveLast) stream.to(archive);
        var settings = new Properties();
        settings.put("bootstrap.servers", server);
        settings.put("application.id", id);
        settings.put("state.dir", "state");
        settings.put("auto.offset.reset", "earliest");
        settings.put("default.key.serde", Serdes.StringSerde.class);
        settings.put("default.value.serde", Serdes.StringSerde.class);
        settings.put("processing.exception.handler", LogAndContinueProcessingExceptionHandler.class);
        settings.put("errors.dead.letter.queue.topic.name", dead);
        List<ConsumerRecord<String, String>> parsed, letters;
        try (var streams = new KafkaStreams(builder.build(), settings)) {
            streams.start();
            parsed = read(results, 3);
            letters = read(dead, 2);
            if (archiveFirst || archiveLast)
                assertEqual(ORDERS, read(archive, ORDERS.size()).stream().map(r -> r.key() + "=" + r.value()).toList());
        }
        try (var admin = Admin.create(client)) {
            var offsets = admin.listConsumerGroupOffsets(id).partitionsToOffsetAndMetadata().get();
            assertEqual((long) ORDERS.size(), offsets.get(new TopicPartition(orders, 0)).offset());
        }
        var offsets = letters.stream().map(r -> new String(r.headers().lastHeader("__streams.errors.offset").value()));
        assertEqual(List.of("1", "3"), offsets.toList());
        var numbers = parsed.stream().map(ConsumerRecord::value).collect(Collectors.joining(" "));
        assertEqual("10 30 50", numbers);
        var contents = letters.stream().map(letter -> letter.key() + "=" + letter.value()).toList();
        System.out.printf("%s: results %s, committed offset %d, dead letters %s%n",
            name, numbers, ORDERS.size(), String.join(" ", contents));
        return contents;
    }

    static void assertEqual(Object expected, Object seen) {
        if (!expected.equals(seen)) throw new AssertionError("expected " + expected + ", got " + seen);
    }

    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        var complete = List.of("b=twenty", "d=forty");
        var alone = deadLetters("processed only", false, false).equals(complete);
        var last = deadLetters("archived last", false, true).equals(complete);
        var first = deadLetters("archived first", true, false).equals(List.of("null=null", "null=null"));
        System.exit(alone && last && first ? 0 : 1);
    }
}
JAVA
echo "Kafka 4.4.0"
java -cp 'jars/*' Main.java "127.0.0.1:$port" 2>client.log || { tail -n 20 client.log >&2; exit 1; }
