"""Sizes of attention's kernels, which their launchers must know."""

PART = 512
"""Positions that have a softmax state of their own: contexts are cut into chunks at multiples of it alone."""

MAX_HEADS = 128
"""The most query heads of a decode's chunk, and so the most that share a KV head."""

MAX_STATES = 32768
"""The most float32 numbers in the states of a decode's chunk."""

MAX_ROWS = 192
"""The most query tokens times heads of a group in a tile: a chunk does them together."""

MAX_HEAD_DIM = 512
"""The largest head size in a tile."""
