"""Small parts that all clients share: codecs, outcomes, receipts, tokens."""
