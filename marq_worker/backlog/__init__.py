"""Counts the waiting messages of each queue, and notices queues without consumers."""
