import static java.util.stream.Collectors.toList;
import static java.util.stream.Collectors.toSet;

import io.awspring.cloud.sqs.annotation.SqsListener;
import io.awspring.cloud.sqs.operations.SendResult;
import io.awspring.cloud.sqs.operations.SqsTemplate;
import java.io.PrintStream;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.BooleanSupplier;
import java.util.stream.IntStream;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.WebApplicationType;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.messaging.Message;
import org.springframework.messaging.support.MessageBuilder;

/**
 * Uses an endpoint as programs with Spring Cloud AWS do: SqsTemplate and @SqsListener, with their default settings.
 *
 * Variables: ENDPOINT, a URL; PREFIX, the beginning of all queues' names. Prints one line of JSON with the number of
 * messages per queue. Fails on the first difference.
 */
@Configuration
@EnableAutoConfiguration
public class SpringClient {
  static final int MESSAGES = 40;
  static final int DELAY_S = 3;
  static final int LIMIT_S = 120;
  static final String RECEIVE_COUNT = "Sqs_Msa_ApproximateReceiveCount";

  public record Order(String id, int amount) {}

  /** The listeners, and what they have received. */
  public static class Listeners {
    final List<Message<Order>> orders = new CopyOnWriteArrayList<>();
    final List<Message<String>> batches = new CopyOnWriteArrayList<>();
    final List<Message<String>> failing = new CopyOnWriteArrayList<>();
    final List<String> fifo = new CopyOnWriteArrayList<>();
    volatile long delayedNs;

    @SqsListener("${PREFIX}-orders")
    public void order(Message<Order> message) {
      if (message.getPayload().id().equals("delayed")) {
        delayedNs = System.nanoTime();
      }
      orders.add(message);
    }

    @SqsListener("${PREFIX}-batches")
    public void batch(List<Message<String>> messages) {
      batches.addAll(messages);
    }

    @SqsListener(value = "${PREFIX}-failing", messageVisibilitySeconds = "5")
    public void fail(Message<String> message) {
      failing.add(message);
      if (failing.size() == 1) {
        throw new IllegalStateException("on purpose");
      }
    }

    @SqsListener("${PREFIX}.fifo")
    public void fifo(String body) {
      fifo.add(body);
    }
  }

  @Bean
  Listeners listeners() {
    return new Listeners();
  }

  public static void main(String[] arguments) {
    // Spring logs to the standard output.
    PrintStream output = System.out;
    System.setOut(System.err);
    String prefix = System.getenv("PREFIX");
    SpringApplication application = new SpringApplication(SpringClient.class);
    application.setWebApplicationType(WebApplicationType.NONE);
    application.setDefaultProperties(
        Map.of(
            "spring.main.banner-mode", "off",
            "spring.cloud.aws.sqs.endpoint", System.getenv("ENDPOINT"),
            "spring.cloud.aws.region.static", "us-east-1",
            "spring.cloud.aws.credentials.access-key", "any",
            "spring.cloud.aws.credentials.secret-key", "any"));
    try (var context = application.run()) {
      SqsTemplate template = context.getBean(SqsTemplate.class);
      Listeners listeners = context.getBean(Listeners.class);
      checkOrders(template, listeners, prefix + "-orders");
      checkBatches(template, listeners, prefix + "-batches");
      checkFailing(template, listeners, prefix + "-failing");
      checkFifo(template, listeners, prefix + ".fifo");
      checkReceive(template, prefix + "-received");
    }
    // The context has ended, so all acknowledgements have been sent.
    output.printf(
        "{\"%1$s-orders\": %2$d, \"%1$s-batches\": 10, \"%1$s-failing\": 1, \"%1$s.fifo\": 3, \"%1$s-received\": 11}%n",
        prefix, MESSAGES + 1);
  }

  /** Single messages with headers of several types, one of them delayed. */
  static void checkOrders(SqsTemplate template, Listeners listeners, String queue) {
    long sentNs = System.nanoTime();
    template.<Order>send(to -> to.queue(queue).payload(new Order("delayed", 0)).delaySeconds(DELAY_S));
    Set<UUID> ids = new HashSet<>();
    for (int number = 0; number < MESSAGES; number++) {
      Order order = new Order("é🚀 " + number, number);
      SendResult<Order> result =
          template.send(to -> to.queue(queue).payload(order).header("text", "grüße 🚀").header("number", 42));
      ids.add(result.messageId());
    }
    until(() -> listeners.orders.size() > MESSAGES);
    long delayMs = (listeners.delayedNs - sentNs) / 1_000_000;
    require(delayMs >= DELAY_S * 1000, "delayed by " + delayMs + " ms");
    List<Message<Order>> received =
        listeners.orders.stream().filter(each -> !each.getPayload().id().equals("delayed")).collect(toList());
    equal(received.stream().map(each -> each.getHeaders().getId()).collect(toSet()), ids);
    for (Message<Order> message : received) {
      Order order = message.getPayload();
      equal(order.id(), "é🚀 " + order.amount());
      equal(message.getHeaders().get("text"), "grüße 🚀");
      equal(message.getHeaders().get("number"), 42);
      equal(message.getHeaders().get(RECEIVE_COUNT), "1");
    }
    equal(listeners.orders.size(), MESSAGES + 1);
  }

  static void checkBatches(SqsTemplate template, Listeners listeners, String queue) {
    List<Message<String>> messages =
        IntStream.range(0, 10).mapToObj(each -> MessageBuilder.withPayload("batch " + each).build()).collect(toList());
    SendResult.Batch<String> result = template.sendMany(queue, messages);
    equal(result.successful().size(), 10);
    equal(result.failed().size(), 0);
    until(() -> listeners.batches.size() == 10);
    equal(
        listeners.batches.stream().map(Message::getPayload).sorted().collect(toList()),
        messages.stream().map(Message::getPayload).collect(toList()));
    equal(
        listeners.batches.stream().map(each -> each.getHeaders().getId()).collect(toSet()),
        result.successful().stream().map(SendResult::messageId).collect(toSet()));
  }

  /** The listener fails at first: the message comes again with its id. */
  static void checkFailing(SqsTemplate template, Listeners listeners, String queue) {
    UUID id = template.send(queue, "fails once").messageId();
    until(() -> listeners.failing.size() == 2);
    equal(listeners.failing.stream().map(each -> each.getHeaders().getId()).collect(toList()), List.of(id, id));
    equal(
        listeners.failing.stream().map(each -> each.getHeaders().get(RECEIVE_COUNT)).collect(toList()),
        List.of("1", "2"));
  }

  static void checkFifo(SqsTemplate template, Listeners listeners, String queue) {
    List<String> bodies = List.of("created", "paid", "sent");
    for (String body : bodies) {
      SendResult<String> result =
          template.send(to -> to.queue(queue).payload(body).messageGroupId("order").messageDeduplicationId(body));
      require(result.additionalInformation().containsKey("sequenceNumber"), result.additionalInformation().toString());
    }
    until(() -> listeners.fifo.size() == 3);
    equal(List.copyOf(listeners.fifo), bodies);
  }

  /** The template receives and acknowledges. */
  static void checkReceive(SqsTemplate template, String queue) {
    template.send(to -> to.queue(queue).payload("é🚀").header("text", "1"));
    Message<String> message =
        template.receive(from -> from.queue(queue).pollTimeout(Duration.ofSeconds(20)), String.class).orElseThrow();
    equal(message.getPayload(), "é🚀");
    equal(message.getHeaders().get("text"), "1");
    List<Message<String>> messages =
        IntStream.range(0, 10).mapToObj(each -> MessageBuilder.withPayload("" + each).build()).collect(toList());
    template.sendMany(queue, messages);
    Set<String> bodies = new HashSet<>();
    until(
        () -> {
          Collection<Message<String>> received =
              template.receiveMany(
                  from -> from.queue(queue).pollTimeout(Duration.ofSeconds(5)).maxNumberOfMessages(10), String.class);
          received.forEach(each -> require(bodies.add(each.getPayload()), each.getPayload() + " came twice"));
          return bodies.size() == 10;
        });
  }

  static void until(BooleanSupplier enough) {
    long endNs = System.nanoTime() + Duration.ofSeconds(LIMIT_S).toNanos();
    while (!enough.getAsBoolean()) {
      require(System.nanoTime() < endNs, "not within " + LIMIT_S + " s");
      try {
        Thread.sleep(50);
      } catch (InterruptedException error) {
        throw new IllegalStateException(error);
      }
    }
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
