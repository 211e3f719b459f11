#!/usr/bin/env bash
# Shows that the batch manager of AWS SDK for Java ignores the visibility timeout and the wait time of its polls.
#
# AWS SDK for Java 2.57.8 (sqs, from Maven; the script needs a JDK). The script's own endpoint has one queue with a
# visibility timeout of 1 s and a wait time of 0, and answers GetQueueAttributes and ReceiveMessage. A program polls
# with waitTimeSeconds(20), until a message comes, and goes on polling while it works on that message.
# Expected: SqsAsyncBatchManager does as SqsAsyncClient does. The developer guide calls it a drop-in replacement, shows
# waitTimeSeconds on its receiveMessage, and describes receiveMessageVisibilityTimeout as the visibility timeout of
# messages; "if unset, the queue's default is used". With 60 s, the message comes once, and one poll waits for it.
# Seen: the manager sends the queue's own visibility timeout with each poll, whatever its setting is, so the message
# comes again while the program works on it. It sends no wait time: waitTimeSeconds and receiveMessageMinWaitDuration
# only limit how long it waits for its buffer, and an empty answer ends a call at once. A loop that polled three times a
# minute now polls an empty queue again after each answer, and pays for all polls. The guide's example of both settings
# hides this: a visibilityTimeout in the request bypasses the manager, which the guide does not say. Messages that take
# longer than the queue's timeout are handled several times at once, and each time counts for the dead-letter queue. A
# program has to set both times as attributes of its queue. An SQS endpoint has to expect many short polls.
# Output seen:
#   client: wait 20, visibility timeout 60; 1 polls before the message, which comes once
#   manager: wait none, visibility timeout 1; 20 polls before the message, which comes again
#   manager, timeout in the request: wait 20, visibility timeout 60; 1 polls before the message, which comes once
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >pom.xml <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>
  <artifactId>program</artifactId><version>1</version><packaging>pom</packaging><dependencies><dependency>
  <groupId>software.amazon.awssdk</groupId><artifactId>sqs</artifactId><version>2.57.8</version>
  </dependency></dependencies></project>
XML
mvn -q -B dependency:copy-dependencies -DoutputDirectory=jars >/dev/null
cat >Main.java <<'JAVA'
import com.sun.net.httpserver.*;
import java.net.*;
import java.time.Duration;
import java.util.concurrent.*;
import java.util.function.BooleanSupplier;
import java.util.function.Supplier;
import java.util.regex.Pattern;
import software.amazon.awssdk.auth.credentials.*;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.sqs.SqsAsyncClient;
import software.amazon.awssdk.services.sqs.batchmanager.SqsAsyncBatchManager;
import software.amazon.awssdk.services.sqs.model.*;

public class Main {
    static final int WAIT_S = 20, TIMEOUT_S = 60, QUEUE_TIMEOUT_S = 1, MANY_POLLS = 20, LIMIT_S = 60;
    static final int PATIENCE_S = 5;  // For polls or deliveries that must not come.

    /** An endpoint with one queue of at most one message. */
    static class Endpoint {
        final HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
        volatile int polls;
        volatile String wait, timeout;
        private boolean sent;
        private long visibleAt;

        Endpoint() throws Exception {
            server.setExecutor(Executors.newCachedThreadPool());
            server.createContext("/", this::answer);
            server.start();
        }

        String url() {
            return "http://127.0.0.1:" + server.getAddress().getPort();
        }

        synchronized void send() {
            sent = true;
            notifyAll();
        }

        private void answer(HttpExchange exchange) throws java.io.IOException {
            var request = new String(exchange.getRequestBody().readAllBytes());
            var operation = exchange.getRequestHeaders().getFirst("X-Amz-Target").replace("AmazonSQS.", "");
            var answer = operation.equals("ReceiveMessage") ? receive(request)
                : "{\"Attributes\":{\"VisibilityTimeout\":\"%d\",\"ReceiveMessageWaitTimeSeconds\":\"0\"}}"
                    .formatted(QUEUE_TIMEOUT_S);
            exchange.getResponseHeaders().add("Content-Type", "application/x-amz-json-1.0");
            exchange.sendResponseHeaders(200, answer.length());
            exchange.getResponseBody().write(answer.getBytes());
            exchange.close();
        }

        private static String number(String request, String name) {
            var matcher = Pattern.compile("\"" + name + "\":(\\d+)").matcher(request);
            return matcher.find() ? matcher.group(1) : "none";
        }

        private synchronized String receive(String request) {
            polls++;
            wait = number(request, "WaitTimeSeconds");
            timeout = number(request, "VisibilityTimeout");
            var end = System.nanoTime() + (wait.equals("none") ? 0 : Long.parseLong(wait)) * 1_000_000_000L;
            while (!sent || System.nanoTime() < visibleAt) {
                if (System.nanoTime() >= end) return "{}";
                try {
                    wait(20);
                } catch (InterruptedException error) {
                    return "{}";
                }
            }
            var seconds = timeout.equals("none") ? QUEUE_TIMEOUT_S : Long.parseLong(timeout);
            visibleAt = System.nanoTime() + seconds * 1_000_000_000L;
            return "{\"Messages\":[{\"MessageId\":\"m\",\"ReceiptHandle\":\"r\",\"Body\":\"body\","
                + "\"MD5OfBody\":\"841a2d689ad86bd1611447453c22c6fc\"}]}";
        }
    }

    static void await(BooleanSupplier condition, int seconds) throws InterruptedException {
        var end = System.nanoTime() + seconds * 1_000_000_000L;
        while (!condition.getAsBoolean() && System.nanoTime() < end) Thread.sleep(20);
    }

    /** Poll, work on the message, and poll on; return what the endpoint saw. */
    static String run(String name, boolean managed, boolean inRequest, boolean comesAgain) throws Exception {
        var endpoint = new Endpoint();
        var credentials = StaticCredentialsProvider.create(AwsBasicCredentials.create("key", "secret"));
        var client = SqsAsyncClient.builder().endpointOverride(URI.create(endpoint.url())).region(Region.EU_WEST_1)
            .credentialsProvider(credentials).build();
        var scheduler = Executors.newScheduledThreadPool(2);
        var manager = SqsAsyncBatchManager.builder().client(client).scheduledExecutor(scheduler)
            .overrideConfiguration(b -> b.receiveMessageVisibilityTimeout(Duration.ofSeconds(TIMEOUT_S))).build();
        var request = ReceiveMessageRequest.builder().queueUrl(endpoint.url() + "/000000000000/q")
            .waitTimeSeconds(WAIT_S).visibilityTimeout(inRequest ? TIMEOUT_S : null).build();
        Supplier<CompletableFuture<ReceiveMessageResponse>> poll =
            () -> managed ? manager.receiveMessage(request) : client.receiveMessage(request);
        var received = new LinkedBlockingQueue<String>();
        var consumer = new Thread(() -> {
            try {
                while (true) poll.get().get().messages().forEach(message -> received.add(message.body()));
            } catch (InterruptedException | ExecutionException | RuntimeException error) {
                received.add("stopped");
            }
        });
        consumer.setDaemon(true);
        consumer.start();
        await(() -> endpoint.polls >= 1, LIMIT_S);
        await(() -> endpoint.polls >= MANY_POLLS, comesAgain ? LIMIT_S : PATIENCE_S);
        var before = Math.min(endpoint.polls, MANY_POLLS);
        endpoint.send();
        if (!"body".equals(received.poll(LIMIT_S, TimeUnit.SECONDS))) throw new AssertionError("no message");
        var again = received.poll(comesAgain ? LIMIT_S : PATIENCE_S, TimeUnit.SECONDS);
        consumer.interrupt();
        var seen = "wait %s, visibility timeout %s; %d polls before the message, which comes %s".formatted(
            endpoint.wait, endpoint.timeout, before, again == null ? "once" : "again");
        System.out.println(name + ": " + seen);
        return seen;
    }

    public static void main(String[] arguments) throws Exception {
        var kept = "wait 20, visibility timeout 60; 1 polls before the message, which comes once";
        var ignored = "wait none, visibility timeout 1; 20 polls before the message, which comes again";
        var client = run("client", false, true, false).equals(kept);
        var manager = run("manager", true, false, true).equals(ignored);
        var bypassed = run("manager, timeout in the request", true, true, false).equals(kept);
        System.exit(client && manager && bypassed ? 0 : 1);
    }
}
JAVA
echo "AWS SDK for Java 2.57.8"
java -cp 'jars/*' Main.java 2>program.log || { tail -n 20 program.log >&2; exit 1; }
