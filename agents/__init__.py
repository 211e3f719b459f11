"""Thin agents: they take batches, ask the core, and send."""
