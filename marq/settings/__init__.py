"""Settings of queues and schedules, in layers, and of clients."""
