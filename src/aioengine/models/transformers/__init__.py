"""Models that transformers' own code computes, with this package's attention, KV cache and sampler."""
