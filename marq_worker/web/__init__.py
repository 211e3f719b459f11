"""Web pages and APIs of a worker."""
