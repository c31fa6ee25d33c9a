"""What the engine reaches on a CPU, beside the machine's limits and other engines: ``python -m benchmarks.cpu``."""
