"""The watchdog of a process: ends one that makes no progress, so that its supervisor starts it again."""
