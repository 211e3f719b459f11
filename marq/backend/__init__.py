"""The seam between the clients and a broker: Kafka here, the in-memory broker in ``marq.testing``."""
