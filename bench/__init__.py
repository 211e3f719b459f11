"""Benchmarks: ``python -m bench`` compares in one run, alternated, and prints medians."""
