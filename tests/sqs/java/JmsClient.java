import com.amazon.sqs.javamessaging.ProviderConfiguration;
import com.amazon.sqs.javamessaging.SQSConnection;
import com.amazon.sqs.javamessaging.SQSConnectionFactory;
import com.amazon.sqs.javamessaging.SQSSession;
import jakarta.jms.BytesMessage;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.ObjectMessage;
import jakarta.jms.Session;
import jakarta.jms.TextMessage;
import java.net.URI;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.sqs.SqsClient;
import software.amazon.awssdk.services.sqs.model.QueueAttributeName;

/**
 * Uses an endpoint as programs with the Amazon SQS Java Messaging Library do: text, bytes, objects, properties, delays,
 * client acknowledgement, recovery, listeners and FIFO queues.
 *
 * Variables: ENDPOINT, a URL. Prints one line of JSON with the number of messages per queue. Fails on the first
 * difference.
 */
public class JmsClient {
  static final int MESSAGES = 20;
  static final int DELAY_S = 3;
  static final int LIMIT_MS = 60_000;

  public static void main(String[] arguments) {
    try {
      check();
    } catch (Throwable error) {
      // The library's threads would keep the program running.
      error.printStackTrace();
      System.exit(1);
    }
  }

  static void check() throws Exception {
    SqsClient client =
        SqsClient.builder()
            .endpointOverride(URI.create(System.getenv("ENDPOINT")))
            .region(Region.US_EAST_1)
            .credentialsProvider(StaticCredentialsProvider.create(AwsBasicCredentials.create("any", "any")))
            .build();
    for (String name : List.of("jms", "jms-delayed", "jms-acks", "jms-unordered", "jms-listener")) {
      client.createQueue(
          request -> request.queueName(name).attributes(Map.of(QueueAttributeName.VISIBILITY_TIMEOUT, "300")));
    }
    client.createQueue(
        request -> request.queueName("jms.fifo").attributes(Map.of(QueueAttributeName.FIFO_QUEUE, "true")));
    List<Check> checks =
        List.of(
            JmsClient::checkTypes,
            JmsClient::checkDelay,
            connection -> checkAcks(connection, Session.CLIENT_ACKNOWLEDGE, "jms-acks"),
            connection -> checkAcks(connection, SQSSession.UNORDERED_ACKNOWLEDGE, "jms-unordered"),
            JmsClient::checkListener,
            JmsClient::checkFifo);
    // Side by side, because a session that closes waits for its last poll of 20 s.
    ExecutorService executor = Executors.newFixedThreadPool(checks.size());
    List<Future<?>> running = new ArrayList<>();
    for (Check check : checks) {
      running.add(
          executor.submit(
              () -> {
                SQSConnection connection =
                    new SQSConnectionFactory(new ProviderConfiguration(), client).createConnection();
                connection.start();
                check.run(connection);
                connection.close();
                return null;
              }));
    }
    for (Future<?> check : running) {
      check.get();
    }
    executor.shutdown();
    client.close();
    System.out.printf(
        "{\"jms\": %d, \"jms-delayed\": 1, \"jms-acks\": 3, \"jms-unordered\": 3, \"jms-listener\": %d, \"jms.fifo\": 3}%n",
        MESSAGES + 2, MESSAGES + 1);
  }

  /** A part of the program, with a connection of its own. */
  interface Check {
    void run(SQSConnection connection) throws Exception;
  }

  /** Bodies and properties arrive as they were sent. */
  static void checkTypes(SQSConnection connection) throws Exception {
    require(connection.getWrappedAmazonSQSClient().queueExists("jms"), "the queue exists");
    require(!connection.getWrappedAmazonSQSClient().queueExists("jms-missing"), "the queue does not exist");
    Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
    MessageProducer producer = session.createProducer(session.createQueue("jms"));
    MessageConsumer consumer = session.createConsumer(session.createQueue("jms"));
    byte[] data = {0, 1, (byte) 254, (byte) 255};
    BytesMessage bytes = session.createBytesMessage();
    bytes.writeBytes(data);
    Map<String, Message> sent = new HashMap<>();
    for (int number = 0; number < MESSAGES; number++) {
      TextMessage text = session.createTextMessage("text " + number + " é\t\"\\ 🚀");
      setProperties(text);
      text.setJMSCorrelationID("correlation " + number);
      text.setJMSReplyTo(session.createQueue("jms-listener"));
      producer.send(text);
      sent.put(text.getJMSMessageID(), text);
    }
    for (Message message : List.of(bytes, session.createObjectMessage(new HashMap<>(Map.of("number", 42))))) {
      setProperties(message);
      producer.send(message);
      sent.put(message.getJMSMessageID(), message);
    }
    for (int number = 0; number < MESSAGES + 2; number++) {
      Message message = receive(consumer);
      Message expected = sent.remove(message.getJMSMessageID());
      require(expected != null, "an unknown message: " + message.getJMSMessageID());
      checkProperties(message);
      if (message instanceof TextMessage text) {
        equal(text.getText(), ((TextMessage) expected).getText());
        equal(text.getJMSCorrelationID(), expected.getJMSCorrelationID());
        equal(text.getJMSReplyTo(), expected.getJMSReplyTo());
      } else if (message instanceof BytesMessage received) {
        byte[] actual = new byte[(int) received.getBodyLength()];
        received.readBytes(actual);
        require(Arrays.equals(actual, data), Arrays.toString(actual));
      } else {
        equal(((ObjectMessage) message).getObject(), Map.of("number", 42));
      }
    }
  }

  static void setProperties(Message message) throws Exception {
    message.setStringProperty("text", "grüße 🚀");
    message.setBooleanProperty("flag", true);
    message.setIntProperty("integer", -42);
    message.setLongProperty("long", Long.MAX_VALUE);
    message.setDoubleProperty("double", 12.5);
  }

  static void checkProperties(Message message) throws Exception {
    equal(message.getStringProperty("text"), "grüße 🚀");
    equal(message.getObjectProperty("flag"), true);
    equal(message.getObjectProperty("integer"), -42);
    equal(message.getObjectProperty("long"), Long.MAX_VALUE);
    equal(message.getObjectProperty("double"), 12.5);
    equal(message.getIntProperty("JMSXDeliveryCount"), 1);
    equal(message.getJMSRedelivered(), false);
  }

  static void checkDelay(SQSConnection connection) throws Exception {
    Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
    MessageProducer producer = session.createProducer(session.createQueue("jms-delayed"));
    MessageConsumer consumer = session.createConsumer(session.createQueue("jms-delayed"));
    producer.setDeliveryDelay(DELAY_S * 1000);
    long sentNs = System.nanoTime();
    producer.send(session.createTextMessage("delayed"));
    equal(((TextMessage) receive(consumer)).getText(), "delayed");
    long delayMs = (System.nanoTime() - sentNs) / 1_000_000;
    require(delayMs >= DELAY_S * 1000, "delayed by " + delayMs + " ms");
  }

  /**
   * Messages that were not acknowledged come again after a recovery. An acknowledgement is for all messages that the
   * session has received, or for one in an unordered session.
   */
  static void checkAcks(SQSConnection connection, int mode, String queue) throws Exception {
    Session session = connection.createSession(false, mode);
    MessageProducer producer = session.createProducer(session.createQueue(queue));
    Set<String> bodies = Set.of("1", "2", "3");
    for (String body : bodies) {
      producer.send(session.createTextMessage(body));
    }
    MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
    Message last = null;
    Set<String> received = new HashSet<>();
    for (int number = 0; number < 3; number++) {
      last = receive(consumer);
      received.add(((TextMessage) last).getText());
    }
    equal(received, bodies);
    Set<String> expected = bodies;
    if (mode == SQSSession.UNORDERED_ACKNOWLEDGE) {
      last.acknowledge();
      expected = new HashSet<>(bodies);
      expected.remove(((TextMessage) last).getText());
    }
    session.recover();
    received.clear();
    for (int number = 0; number < expected.size(); number++) {
      last = receive(consumer);
      require(received.add(((TextMessage) last).getText()), "a message came twice");
      equal(last.getIntProperty("JMSXDeliveryCount"), 2);
      equal(last.getJMSRedelivered(), true);
      if (mode == SQSSession.UNORDERED_ACKNOWLEDGE) {
        last.acknowledge();
      }
    }
    equal(received, expected);
    last.acknowledge();
  }

  /** A listener that fails gets the message again. */
  static void checkListener(SQSConnection connection) throws Exception {
    Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
    MessageConsumer consumer = session.createConsumer(session.createQueue("jms-listener"));
    Set<String> handled = new HashSet<>();
    AtomicInteger failures = new AtomicInteger();
    CountDownLatch left = new CountDownLatch(MESSAGES + 1);
    consumer.setMessageListener(
        message -> {
          try {
            String body = ((TextMessage) message).getText();
            if (body.equals("fails once") && failures.incrementAndGet() == 1) {
              throw new IllegalStateException("on purpose");
            }
            if (handled.add(body)) {
              left.countDown();
            }
          } catch (jakarta.jms.JMSException error) {
            throw new IllegalStateException(error);
          }
        });
    Session sending = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
    MessageProducer producer = sending.createProducer(sending.createQueue("jms-listener"));
    producer.send(sending.createTextMessage("fails once"));
    for (int number = 0; number < MESSAGES; number++) {
      producer.send(sending.createTextMessage("message " + number));
    }
    require(left.await(LIMIT_MS, TimeUnit.MILLISECONDS), "only " + handled + " were handled");
    equal(failures.get(), 2);
  }

  static void checkFifo(SQSConnection connection) throws Exception {
    Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
    MessageProducer producer = session.createProducer(session.createQueue("jms.fifo"));
    MessageConsumer consumer = session.createConsumer(session.createQueue("jms.fifo"));
    List<String> bodies = List.of("created", "paid", "sent");
    for (String body : bodies) {
      TextMessage message = session.createTextMessage(body);
      message.setStringProperty("JMSXGroupID", "order");
      message.setStringProperty("JMS_SQS_DeduplicationId", body);
      producer.send(message);
    }
    for (String body : bodies) {
      Message message = receive(consumer);
      equal(((TextMessage) message).getText(), body);
      equal(message.getStringProperty("JMSXGroupID"), "order");
      equal(message.getStringProperty("JMS_SQS_DeduplicationId"), body);
      require(message.getStringProperty("JMS_SQS_SequenceNumber") != null, "no sequence number");
    }
  }

  static Message receive(MessageConsumer consumer) throws Exception {
    Message message = consumer.receive(LIMIT_MS);
    require(message != null, "no message within " + Duration.ofMillis(LIMIT_MS));
    return message;
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
