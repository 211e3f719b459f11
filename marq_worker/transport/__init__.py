"""Between a worker and its Faust agents: batches instead of single records, and turns."""
