"""The owner of a markers partition, from takeover to revocation; shells carry out its effects."""
