#!/usr/bin/env bash
# Shows that Kafka Connect commits past a record whose dead letter is refused, although it promises to write it first.
#
# Kafka 4.4.0 (broker and Connect from Maven; the script needs a JDK). A sink tolerates errors (errors.tolerance=all),
# and has a dead-letter topic with context headers. It gets four records. Two are not orders: a small one, and one of
# 1,048,300 bytes, which a producer and a topic with defaults accept. The sink's converter fails for them, or the sink
# itself reports them to its ErrantRecordReporter. With its headers, the dead letter of the large one exceeds
# max.request.size of Connect's producer. Or that limit is higher (producer.override.max.request.size), and the
# dead-letter topic refuses it.
# Expected: ErrantRecordReporter says: "Connect guarantees that sink records reported through this reporter will be
# written to the error topic before the framework calls the preCommit method and therefore before committing the
# consumer offsets." So the task fails, and its committed offset stays before the large record. The same holds for a
# record that the converter refuses.
# Seen: Connect commits the large record in all cases, but neither the sink nor the dead-letter topic has it. Connect
# waits only for dead letters that are not done right after they are sent. The producer refuses a record above its own
# limit at once, so that future is done, and its error is never read. If the topic refuses it, the wait fails, and so
# does the task. But a failed task commits once more when it closes. By then, it has forgotten the future that it waited
# for, so it commits the last batch. After a restart, it has nothing left to do. For records that a converter refuses,
# Connect drops the future, so it waits for none of their dead letters. Only the log and the metric
# deadletterqueue-produce-failures show the loss. A dead-letter topic and its producer need higher limits than the
# source, and this metric needs an alert.
# Output seen:
#   converter fails, producer refuses: stored 1 2, dead letters small, committed 4 of 4, task RUNNING
#   converter fails, topic refuses: stored 1 2, dead letters small, committed 4 of 4, task RUNNING
#   sink reports, producer refuses: stored 1 2, dead letters small, committed 4 of 4, task RUNNING
#   sink reports, topic refuses: stored 1 2, dead letters small, committed 4 of 4, task FAILED
set -euo pipefail
folder=$(mktemp -d) processes=()
stop() { kill -9 "$@" && wait "$@" || :; }
trap '[ ${#processes[@]} -eq 0 ] || stop "${processes[@]}"; rm -rf "$folder"' EXIT
cd "$folder"
cat >pom.xml <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>program</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.4.0</version>
  </dependency><dependency>
  <groupId>org.apache.kafka</groupId><artifactId>connect-runtime</artifactId><version>4.4.0</version>
  </dependency></dependencies></project>
XML
mvn -q -B dependency:copy-dependencies -DoutputDirectory=jars >/dev/null
free_port='import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
port=$(python3 -c "$free_port") controller=$(python3 -c "$free_port") rest=$(python3 -c "$free_port")
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
processes+=($!)
cat >OrderSink.java <<'JAVA'
import java.io.IOException;
import java.nio.file.*;
import java.util.*;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.connect.connector.Task;
import org.apache.kafka.connect.errors.ConnectException;
import org.apache.kafka.connect.sink.*;

/** Append orders to a file; report a record that is not an order. */
public class OrderSink extends SinkConnector {
    private Map<String, String> settings;

    @Override public void start(Map<String, String> settings) { this.settings = settings; }
    @Override public void stop() { }
    @Override public String version() { return "1"; }
    @Override public ConfigDef config() { return new ConfigDef(); }
    @Override public Class<? extends Task> taskClass() { return OrderTask.class; }
    @Override public List<Map<String, String>> taskConfigs(int tasks) { return List.of(settings); }

    public static class OrderTask extends SinkTask {
        private Path file;

        @Override public void start(Map<String, String> settings) { file = Path.of(settings.get("name") + ".txt"); }
        @Override public void stop() { }
        @Override public String version() { return "1"; }

        @Override public void put(Collection<SinkRecord> records) {
            for (var record : records) {
                var value = record.value().toString();
                if (value.startsWith("x"))
                    context.errantRecordReporter().report(record, new ConnectException("not an order"));
                else
                    store(value);
            }
        }

        private void store(String order) {
            try {
                Files.writeString(file, order + "\n", StandardOpenOption.CREATE, StandardOpenOption.APPEND);
            } catch (IOException error) {
                throw new ConnectException(error);
            }
        }
    }
}
JAVA
cat >Main.java <<'JAVA'
import java.io.IOException;
import java.net.URI;
import java.net.http.*;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

public class Main {
    static final int LARGE_BYTES = 1_048_300, RECORDS = 4, LIMIT_S = 60;
    static String server, connect;
    static Admin admin;

    static String state(String name) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(connect + "/connectors/" + name + "/status")).build();
        String status;
        try {
            status = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body();
        } catch (IOException notStarted) {
            return "unknown";
        }
        var task = status.substring(Math.max(0, status.indexOf("\"tasks\"")));
        return task.contains("\"FAILED\"") ? "FAILED" : task.contains("\"RUNNING\"") ? "RUNNING" : "unknown";
    }

    static long committed(String name) throws Exception {
        var offsets = admin.listConsumerGroupOffsets("connect-" + name).partitionsToOffsetAndMetadata().get();
        var offset = offsets.get(new TopicPartition(name, 0));
        return offset == null ? 0 : offset.offset();
    }

    static String deadLetters(String name) {
        var partition = new TopicPartition(name + "-dead", 0);
        var keys = new ArrayList<String>();
        Map<String, Object> settings = Map.of("bootstrap.servers", server);
        try (var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.assign(List.of(partition));
            consumer.seekToBeginning(List.of(partition));
            long end = consumer.endOffsets(List.of(partition)).get(partition);
            while (consumer.position(partition) < end)
                consumer.poll(Duration.ofSeconds(1)).forEach(record -> keys.add(record.key()));
        }
        return String.join(" ", keys);
    }

    /** Wait until a sink has committed all records and its task has this state; print the result, and compare it. */
    static boolean lost(String name, String text, String state) throws Exception {
        var limit = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_S);
        while (!(committed(name) == RECORDS && state(name).equals(state)) && System.nanoTime() < limit)
            Thread.sleep(200);
        var stored = String.join(" ", Files.readAllLines(Path.of(name + ".txt")));
        var result = String.format("stored %s, dead letters %s, committed %d of %d, task %s",
            stored, deadLetters(name), committed(name), RECORDS, state(name));
        System.out.println(text + ": " + result);
        return result.equals("stored 1 2, dead letters small, committed 4 of 4, task " + state);
    }

    public static void main(String[] arguments) throws Exception {
        server = arguments[0];
        connect = arguments[1];
        Map<String, Object> settings = Map.of("bootstrap.servers", server);
        admin = Admin.create(settings);
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (var name : List.of("converter-producer", "converter-topic", "sink-producer", "sink-topic")) {
                producer.send(new ProducerRecord<>(name, "first", "1")).get();
                producer.send(new ProducerRecord<>(name, "second", "2")).get();
                producer.send(new ProducerRecord<>(name, "small", "x")).get();
                producer.send(new ProducerRecord<>(name, "large", "x".repeat(LARGE_BYTES))).get();
            }
        }
        var asSeen = lost("converter-producer", "converter fails, producer refuses", "RUNNING")
            & lost("converter-topic", "converter fails, topic refuses", "RUNNING")
            & lost("sink-producer", "sink reports, producer refuses", "RUNNING")
            & lost("sink-topic", "sink reports, topic refuses", "FAILED");
        System.exit(asSeen ? 0 : 1);
    }
}
JAVA
cat >worker.properties <<PROPERTIES
bootstrap.servers=127.0.0.1:$port
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
offset.storage.file.filename=$folder/offsets
offset.flush.interval.ms=1000
listeners=http://127.0.0.1:$rest
PROPERTIES
for name in converter-producer converter-topic sink-producer sink-topic; do
    cat >$name.properties <<PROPERTIES
name=$name
connector.class=OrderSink
topics=$name
errors.tolerance=all
errors.deadletterqueue.topic.name=$name-dead
errors.deadletterqueue.topic.replication.factor=1
errors.deadletterqueue.context.headers.enable=true
PROPERTIES
done
for name in converter-producer converter-topic; do
    printf '%s\n' value.converter=org.apache.kafka.connect.json.JsonConverter value.converter.schemas.enable=false \
        >>$name.properties
done
for name in converter-topic sink-topic; do
    echo producer.override.max.request.size=2000000 >>$name.properties
done
javac -cp 'jars/*' -d classes OrderSink.java
java -Xmx512m -cp 'jars/*:classes' org.apache.kafka.connect.cli.ConnectStandalone worker.properties \
    {converter-producer,converter-topic,sink-producer,sink-topic}.properties >worker.log 2>&1 &
processes+=($!)
echo "Kafka 4.4.0"
java -cp 'jars/*' Main.java "127.0.0.1:$port" "http://127.0.0.1:$rest" 2>client.log ||
    { tail -n 20 client.log worker.log >&2; exit 1; }
