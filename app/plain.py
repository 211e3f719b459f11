"""Text of others on a terminal: what senders and clients write must not move its cursor, colour it or forge lines."""


def plain(text: str) -> str:
    """Return a text on one line, with a mark in the place of what can't be printed: controls, escapes, bidi."""
    return "".join(each if each.isprintable() else "�" for each in text)
