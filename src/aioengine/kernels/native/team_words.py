"""Where a team's words and those of its records lie, which its kernels and their launcher must know."""

RECORD_WORDS = 32
"""A record: a kernel's address, the number of chunks that its work is cut into, then its arguments; int64 each."""

RECORD_BYTES = 8 * RECORD_WORDS
MAX_ARGUMENTS = RECORD_WORDS - 2

CHUNK_BITS = 24
MAX_CHUNKS = 1 << CHUNK_BITS - 1
"""Of a record, fewer; what a thread takes in place of a chunk when there is no record is this and more."""

# A team's words, each in a cache line of its own, by their offsets in bytes.
GENERATION, NEXT, DONE, RECORDS, END, IS_OVER = range(0, 6 * 64, 64)
SEMAPHORES = 6 * 64
"""From here on 128 bytes a thread: whether it sleeps, and 64 bytes behind that the semaphore that wakes it."""
