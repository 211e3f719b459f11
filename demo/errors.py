"""One error for what keeps the demo from being carried through: it says nothing about messages."""


class DemoError(Exception):
    """The broker is gone, a process did not start or ended by itself, or time ran out; with the end of its log."""
