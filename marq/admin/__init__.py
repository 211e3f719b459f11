"""Purge and replay: administration of the messages of a queue."""
