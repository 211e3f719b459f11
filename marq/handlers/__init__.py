"""Handlers: functions that are called with messages, and what surrounds them."""
