"""The consumer: receives messages in five steps, runs handlers, and finishes each message."""
