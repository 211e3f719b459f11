"""A seeded simulation of producers, consumers and trackers around the real core, with faults, on simulated Kafka."""
