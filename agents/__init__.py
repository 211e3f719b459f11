"""Thin agents: they pass batches to the core and carry out its decisions."""
