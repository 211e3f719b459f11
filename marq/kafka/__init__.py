"""Everything that talks to a Kafka broker through aiokafka."""
