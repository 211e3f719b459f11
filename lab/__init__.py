"""Starts systems, applies load and faults, records, judges and reports: demo, fault scenarios, benchmarks, checker."""
