import static java.util.stream.Collectors.toList;

import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.BooleanSupplier;
import org.apache.camel.Exchange;
import org.apache.camel.Message;
import org.apache.camel.ProducerTemplate;
import org.apache.camel.builder.RouteBuilder;
import org.apache.camel.impl.DefaultCamelContext;

/**
 * Uses an endpoint as programs with Camel's component aws2-sqs do: routes that produce and consume, and that fail.
 *
 * Variables: ENDPOINT, a URL. Prints one line of JSON with the number of messages per queue. Fails on the first
 * difference.
 */
public class CamelClient {
  static final int MESSAGES = 30;
  static final int DELAY_S = 3;
  static final int LIMIT_S = 120;
  static final String COUNT = "ApproximateReceiveCount";

  static final List<Message> received = new CopyOnWriteArrayList<>();
  static final List<Message> failed = new CopyOnWriteArrayList<>();
  static final List<String> ordered = new CopyOnWriteArrayList<>();
  static volatile long delayedNs;

  public static void main(String[] arguments) {
    try (DefaultCamelContext context = new DefaultCamelContext()) {
      context.addRoutes(new Routes());
      context.start();
      check(context.createProducerTemplate());
    } catch (Throwable error) {
      error.printStackTrace();
      System.exit(1);
    }
    System.out.printf("{\"camel\": %d, \"camel-failing\": 1, \"camel.fifo\": 3}%n", MESSAGES + 11);
  }

  static class Routes extends RouteBuilder {
    @Override
    public void configure() {
      from("direct:send").to(uri("camel", ""));
      from("direct:delayed").to(uri("camel", "&delaySeconds=" + DELAY_S));
      from("direct:batch").to(uri("camel", "&operation=sendBatchMessage"));
      from("direct:failing").to(uri("camel-failing", ""));
      from("direct:fifo")
          .to(uri("camel.fifo", "&messageGroupIdStrategy=useConstant&messageDeduplicationIdStrategy=useExchangeId"));
      from(uri("camel", "&maxMessagesPerPoll=10&concurrentConsumers=2&messageAttributeNames=All"))
          .process(exchange -> receive(exchange, received));
      from(uri("camel-failing", "&visibilityTimeout=5"))
          .process(
              exchange -> {
                receive(exchange, failed);
                if (failed.size() == 1) {
                  throw new IllegalStateException("on purpose");
                }
              });
      from(uri("camel.fifo", "")).process(exchange -> ordered.add(exchange.getMessage().getBody(String.class)));
    }

    static String uri(String queue, String options) {
      return "aws2-sqs://"
          + queue
          + "?autoCreateQueue=true&region=us-east-1&accessKey=any&secretKey=any&overrideEndpoint=true"
          + "&uriEndpointOverride="
          + System.getenv("ENDPOINT")
          + "&waitTimeSeconds=5&attributeNames=All"
          + options;
    }
  }

  static void receive(Exchange exchange, List<Message> messages) {
    Message message = exchange.getMessage().copy();
    if ("delayed".equals(message.getBody())) {
      delayedNs = System.nanoTime();
    }
    messages.add(message);
  }

  static void check(ProducerTemplate template) {
    long sentNs = System.nanoTime();
    template.sendBody("direct:delayed", "delayed");
    Map<String, Object> headers =
        Map.of("text", "grüße 🚀", "number", 42, "flag", true, "data", new byte[] {0, 1, (byte) 254});
    for (int number = 0; number < MESSAGES; number++) {
      template.sendBodyAndHeaders("direct:send", "message " + number + " é🚀", headers);
    }
    List<String> batch = List.of("a", "b", "c", "d", "e", "f", "g", "h", "i", "j");
    template.sendBody("direct:batch", batch);
    template.sendBody("direct:failing", "fails once");
    List<String> bodies = List.of("created", "paid", "sent");
    bodies.forEach(body -> template.sendBody("direct:fifo", body));

    until(() -> received.size() == MESSAGES + 11 && failed.size() == 2 && ordered.size() == 3);

    long delayMs = (delayedNs - sentNs) / 1_000_000;
    require(delayMs >= DELAY_S * 1000, "delayed by " + delayMs + " ms");
    List<Message> singles =
        received.stream().filter(each -> each.getBody(String.class).startsWith("message ")).collect(toList());
    equal(singles.stream().map(each -> each.getBody(String.class)).distinct().count(), (long) MESSAGES);
    for (Message message : singles) {
      equal(message.getHeader("text"), "grüße 🚀");
      equal(message.getHeader("number", Integer.class), 42);
      equal(message.getHeader("flag", Boolean.class), true);
      equal(attribute(message, COUNT), "1");
    }
    equal(
        received.stream()
            .map(each -> each.getBody(String.class))
            .filter(each -> each.length() == 1)
            .sorted()
            .collect(toList()),
        batch);
    equal(failed.stream().map(each -> attribute(each, COUNT)).collect(toList()), List.of("1", "2"));
    equal(failed.get(0).getHeader("CamelAwsSqsMessageId"), failed.get(1).getHeader("CamelAwsSqsMessageId"));
    equal(List.copyOf(ordered), bodies);
  }

  static String attribute(Message message, String name) {
    Map<?, ?> attributes = message.getHeader("CamelAwsSqsAttributes", Map.class);
    return attributes.entrySet().stream()
        .filter(each -> each.getKey().toString().equals(name))
        .map(each -> each.getValue().toString())
        .findFirst()
        .orElse(null);
  }

  static void until(BooleanSupplier enough) {
    long endNs = System.nanoTime() + LIMIT_S * 1_000_000_000L;
    while (!enough.getAsBoolean()) {
      require(
          System.nanoTime() < endNs,
          String.format(
              "not within %d s: %d received, %d failed, %s in order", LIMIT_S, received.size(), failed.size(), ordered));
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
