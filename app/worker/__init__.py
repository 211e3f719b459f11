"""The worker process: the Faust application, its start, its watchdog and its end."""
