"""Sizes of attention's kernels, which their launchers must know."""

PART = 512
"""Positions whose state is made alone: a context in several chunks is cut at multiples of it."""

MAX_GROUP = 128
"""Query heads a KV head, of single tokens."""

MAX_STATES = 32768
"""float32 numbers in the states of a chunk of single tokens."""

MAX_ROWS = 192
"""Query tokens times heads of a group that are done at once in a tile."""

MAX_HEAD_DIM = 512
"""Of a tile."""
