"""The wire format: markers and their encoding, the names of topics and headers, and the public errors."""
