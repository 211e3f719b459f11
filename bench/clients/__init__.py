"""Processes that the rows of the benchmark start: each is a producer or a consumer of its own."""
