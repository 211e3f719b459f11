"""Benchmarks: ``python -m bench`` compares systems in alternating runs and prints medians."""
