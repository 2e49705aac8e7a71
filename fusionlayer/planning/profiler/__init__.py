"""The profiler: measures the costs for a cost profile, of a job (``job``) or in training (``training``)."""
