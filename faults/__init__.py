"""Faults on real parts: each scenario is a history of real processes on a real broker, and the checker judges it."""
