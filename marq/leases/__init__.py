"""What a consumer holds: leased messages, and what becomes of them."""
