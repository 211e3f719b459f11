"""One history of all clients' actions and the logs' contents, and one checker of it: see history.py and checker.py."""
