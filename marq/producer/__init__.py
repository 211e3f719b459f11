"""The producer: sends, delays and cancels messages."""
