"""Sender, processor and tracker as separate processes; the processor loses messages on purpose."""
