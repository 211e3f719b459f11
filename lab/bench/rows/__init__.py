"""The rows of the benchmark, and the clients that they measure; :mod:`lab.bench.__main__` lists all rows."""
