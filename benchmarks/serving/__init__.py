"""What `benchmarks/serve.py` consists of: see there."""
