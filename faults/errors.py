"""What keeps a fault run from being what it says."""


class ConditionError(Exception):
    """A condition that a scenario needs can't be had on this machine; the text says what to do."""
