"""The life of the owner of a markers partition, once for all shells that carry it out."""
