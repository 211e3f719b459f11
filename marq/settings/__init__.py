"""Settings: of queues and schedules, layer upon layer, and of clients."""
