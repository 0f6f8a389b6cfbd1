"""Files of weights, memory-mapped."""
