"""The messages that a tracker sends: redeliveries, dead letters, and those of schedules."""
