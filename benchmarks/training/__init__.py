"""Training with every method beside DDP, in one set of processes: step times, bytes, CPU seconds, losses."""
