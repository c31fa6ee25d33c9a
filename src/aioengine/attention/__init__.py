"""Attention over the paged KV cache: backends behind one protocol."""
