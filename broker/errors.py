"""One error for everything the tooling around the broker can run into."""


class BrokerError(Exception):
    """Java, Kafka's jars or the broker itself cannot be had; the message says what is wrong and what to do."""
