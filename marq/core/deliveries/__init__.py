"""What a tracker delivers: redeliveries, dead letters, and the messages of schedules."""
