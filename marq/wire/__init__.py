"""Everything that is bytes: markers and their encoding, the names of topics and headers, the public errors."""
