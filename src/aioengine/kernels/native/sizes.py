"""Sizes and places that kernels and their launchers share; numba is not needed to read them."""

from __future__ import annotations

from llvmlite import binding

# Attention

CONTEXT_PART = 512
"""Positions that have a softmax state of their own: contexts are cut into chunks at multiples of it alone."""

MAX_HEADS = 128
"""The most query heads of a decode's chunk, and so the most that share a KV head."""

MAX_STATES = 32768
"""The most float32 numbers in the states of a decode's chunk."""

MAX_ROWS = 192
"""The most query tokens times heads of a group in a tile: a chunk does them together."""

MAX_HEAD_DIM = 512
"""The largest head size in a tile."""

# Weights of codes

_FEATURES = binding.get_host_cpu_features()

HAS_PAIRS = all(_FEATURES.get(feature) for feature in ("avx512bw", "avx512bf16"))
"""Whether pairs of bfloat16 are looked up and multiplied at once."""

STEP_INPUTS = 64
"""The most inputs whose products are summed before they are scaled."""

# Teams

RECORD_WORDS = 32
"""A record: a kernel's address, the number of chunks that its work is cut into, then its arguments; int64 each."""

RECORD_BYTES = 8 * RECORD_WORDS
MAX_ARGUMENTS = RECORD_WORDS - 2

CHUNK_BITS = 24
MAX_CHUNKS = 1 << CHUNK_BITS - 1
"""A record has fewer; what a thread takes in place of a chunk when there is no record is this and more."""

# A team's words, each in a cache line of its own, by their offsets in bytes.
GENERATION, NEXT, DONE, RECORDS, END, IS_OVER = range(0, 6 * 64, 64)
SEMAPHORES = 6 * 64
"""From here on 128 bytes a thread: whether it sleeps, and 64 bytes behind that the semaphore that wakes it."""
