"""Faults in real processes on a real broker: each scenario produces a history, which the checker judges."""
