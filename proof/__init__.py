"""One history of what everybody did and what the logs say, and one checker of it: see history.py and checker.py."""
