import java.net.URI;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.core.SdkBytes;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.sqs.SqsAsyncClient;
import software.amazon.awssdk.services.sqs.batchmanager.SqsAsyncBatchManager;
import software.amazon.awssdk.services.sqs.model.DeleteMessageResponse;
import software.amazon.awssdk.services.sqs.model.Message;
import software.amazon.awssdk.services.sqs.model.MessageAttributeValue;
import software.amazon.awssdk.services.sqs.model.MessageSystemAttributeName;
import software.amazon.awssdk.services.sqs.model.QueueAttributeName;
import software.amazon.awssdk.services.sqs.model.SendMessageResponse;
import software.amazon.awssdk.services.sqs.model.SqsException;

/**
 * Uses an endpoint as programs with the batch manager of the AWS SDK for Java do, which makes batches of single calls.
 *
 * Variables: ENDPOINT, a URL. Prints one line of JSON with the number of messages per queue. Fails on the first
 * difference; the SDK itself compares the MD5 sums of bodies.
 */
public class BatchClient {
  static final String QUEUE = "batch-manager";
  static final int MESSAGES = 55;
  static final Duration LIMIT = Duration.ofSeconds(120);
  static final Map<String, MessageAttributeValue> ATTRIBUTES =
      Map.of(
          "text", MessageAttributeValue.builder().dataType("String.color").stringValue("grüße 🚀").build(),
          "number", MessageAttributeValue.builder().dataType("Number").stringValue("-12.5e3").build(),
          "bytes",
              MessageAttributeValue.builder()
                  .dataType("Binary")
                  .binaryValue(SdkBytes.fromByteArray(new byte[] {0, 1, (byte) 254, (byte) 255}))
                  .build());

  public static void main(String[] arguments) {
    try {
      check();
    } catch (Throwable error) {
      error.printStackTrace();
      System.exit(1);
    }
  }

  static void check() {
    SqsAsyncClient client =
        SqsAsyncClient.builder()
            .endpointOverride(URI.create(System.getenv("ENDPOINT")))
            .region(Region.US_EAST_1)
            .credentialsProvider(StaticCredentialsProvider.create(AwsBasicCredentials.create("any", "any")))
            .build();
    Map<QueueAttributeName, String> attributes = Map.of(QueueAttributeName.VISIBILITY_TIMEOUT, "300");
    String url = client.createQueue(request -> request.queueName(QUEUE).attributes(attributes)).join().queueUrl();
    ScheduledExecutorService executor = Executors.newScheduledThreadPool(2);
    try (SqsAsyncBatchManager manager =
        SqsAsyncBatchManager.builder()
            .client(client)
            .scheduledExecutor(executor)
            .overrideConfiguration(
                settings ->
                    settings
                        .receiveMessageMinWaitDuration(Duration.ofSeconds(1))
                        .receiveMessageAttributeNames(List.of("All"))
                        .receiveMessageSystemAttributeNames(List.of(MessageSystemAttributeName.ALL)))
            .build()) {
      Map<String, String> bodies = send(manager, url);
      Map<String, Message> first = receive(manager, url, bodies, "1");
      // Half of the messages are deleted, and the others are returned to the queue.
      List<CompletableFuture<DeleteMessageResponse>> deletes = new ArrayList<>();
      List<CompletableFuture<?>> changes = new ArrayList<>();
      for (Message message : first.values()) {
        if (deletes.size() < MESSAGES / 2) {
          deletes.add(delete(manager, url, message));
          bodies.remove(message.messageId());
        } else {
          changes.add(
              manager.changeMessageVisibility(
                  request -> request.queueUrl(url).receiptHandle(message.receiptHandle()).visibilityTimeout(0)));
        }
      }
      deletes.forEach(CompletableFuture::join);
      changes.forEach(CompletableFuture::join);
      for (Message message : receive(manager, url, bodies, "2").values()) {
        delete(manager, url, message).join();
      }
    }
    executor.shutdown();
    client.close();
    System.out.printf("{\"%s\": %d}%n", QUEUE, MESSAGES);
  }

  /** Send messages at the same time, one of which is refused; return the bodies of the others by message id. */
  static Map<String, String> send(SqsAsyncBatchManager manager, String url) {
    Map<String, CompletableFuture<SendMessageResponse>> sends = new HashMap<>();
    CompletableFuture<SendMessageResponse> refused =
        manager.sendMessage(request -> request.queueUrl(url).messageBody("\u0001"));
    for (int number = 0; number < MESSAGES; number++) {
      String body = number + " é\t\"\\ 🚀";
      sends.put(
          body,
          manager.sendMessage(request -> request.queueUrl(url).messageBody(body).messageAttributes(ATTRIBUTES)));
    }
    checkRefusal(refused);
    Map<String, String> bodies = new HashMap<>();
    sends.forEach((body, response) -> bodies.put(response.join().messageId(), body));
    equal(bodies.size(), MESSAGES);
    return bodies;
  }

  static void checkRefusal(CompletableFuture<SendMessageResponse> refused) {
    try {
      refused.join();
      throw new AssertionError("a body with a control character was accepted");
    } catch (CompletionException error) {
      equal(((SqsException) error.getCause()).awsErrorDetails().errorCode(), "InvalidMessageContents");
    }
  }

  /** Receive each of these messages once. */
  static Map<String, Message> receive(
      SqsAsyncBatchManager manager, String url, Map<String, String> bodies, String count) {
    Map<String, Message> received = new HashMap<>();
    long endNs = System.nanoTime() + LIMIT.toNanos();
    while (received.size() < bodies.size()) {
      require(System.nanoTime() < endNs, received.size() + " of " + bodies.size() + " messages came");
      for (Message message : manager.receiveMessage(request -> request.queueUrl(url)).join().messages()) {
        equal(message.body(), bodies.get(message.messageId()));
        equal(message.messageAttributes(), ATTRIBUTES);
        equal(message.attributes().get(MessageSystemAttributeName.APPROXIMATE_RECEIVE_COUNT), count);
        require(received.put(message.messageId(), message) == null, message.body() + " came twice");
      }
    }
    return received;
  }

  static CompletableFuture<DeleteMessageResponse> delete(SqsAsyncBatchManager manager, String url, Message message) {
    return manager.deleteMessage(request -> request.queueUrl(url).receiptHandle(message.receiptHandle()));
  }

  static void equal(Object actual, Object expected) {
    require(Objects.equals(actual, expected), "expected " + expected + ", got " + actual);
  }

  static void require(boolean condition, String problem) {
    if (!condition) {
      throw new AssertionError(problem);
    }
  }
}
