"""Exit codes of a worker with a meaning of their own, from sysexits.h; docs/operations/deploy.md lists all of them."""

#: "Temporary failure": the watchdog has ended a stalled process, or its Kafka consumer has failed. A restart helps.
EXIT_STALLED = 75
#: "Configuration error": another worker uses the same MARQ_INSTANCE_ID. A restart would take its partitions away.
EXIT_FENCED = 78
