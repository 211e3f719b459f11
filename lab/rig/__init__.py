"""Starts Marq's programs as processes and observes them: for the demo, fault scenarios, benchmarks and tests."""
