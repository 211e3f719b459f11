"""The seam between the clients and a broker: Kafka here, the broker in memory in ``marq.testing``."""
