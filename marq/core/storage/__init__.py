"""What the lease machine keeps: the rows of the lease table, and everything that is computed from them."""
