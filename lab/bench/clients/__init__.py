"""Clients that the benchmark measures, each as a process."""
