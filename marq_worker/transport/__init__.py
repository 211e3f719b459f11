"""Between Faust's consumer and the agents: batches instead of single records."""
