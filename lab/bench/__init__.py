"""Benchmarks: ``python -m lab.bench`` compares systems in alternating runs and prints medians."""
