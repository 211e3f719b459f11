"""Settings of the worker and definitions of its queues."""
