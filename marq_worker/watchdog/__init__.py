"""The watchdog of a process: terminates a process that makes no progress, so that its supervisor restarts it."""
