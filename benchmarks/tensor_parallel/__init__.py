"""Steps of a tensor-parallel GPT on an emulated network: ``python -m benchmarks.tensor_parallel --help``."""
