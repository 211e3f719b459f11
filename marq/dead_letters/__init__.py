"""Dead letters: listed, counted, redriven and deleted."""
