"""State of the lease machine: the rows of the lease table, and everything that is computed from them."""
