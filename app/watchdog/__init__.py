"""The watchdog of a process: ends a process that makes no progress, so that its supervisor restarts it."""
