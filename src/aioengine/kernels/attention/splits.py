"""How the contexts of single query tokens are cut into parts, so that a GPU has enough to do."""

from __future__ import annotations

MAX_SPLITS = 64
SPLIT_KEYS = 64
"""A part is as long or longer: a tile of 16-bit keys of 128, below which the loads would be half empty."""

PROGRAMS_PER_MULTIPROCESSOR = 2


def choose_num_splits(num_rows: int, num_kv_heads: int, max_context: int, num_multiprocessors: int) -> int:
    """Into how many parts the contexts of single query tokens are best cut, by numbers that the host knows.

    Parts fill a GPU that rows and KV heads alone leave partly idle. When they fill it, 1: the second kernel would cost
    more than it brings.
    """
    programs = max(num_rows * num_kv_heads, 1)
    fitting = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // programs
    return max(1, min(fitting, -(-max_context // SPLIT_KEYS), MAX_SPLITS))
