"""A team of threads that runs programs of kernels, without Python between them.

A program is a list of records, each a kernel with its arguments and the number of chunks that its work is cut into.
All threads take chunks of one record until none is left; the last to finish one begins the next record. A thread
that is not running when its turn comes (another process has its core) holds nothing up but a chunk that it has begun.
"""

from __future__ import annotations

from aioengine.kernels.native.kernels.compiler import kernel
from aioengine.kernels.native.kernels.simd import (
    atomic_get,
    atomic_put,
    call_kernel,
    exchange,
    fetch_add,
    get_i64,
    pause,
    put_i64,
    sched_yield,
    sem_post,
    sem_wait,
)
from aioengine.kernels.native.kernels.team_words import (
    DONE,
    FIRST,
    GENERATION,
    IS_OVER,
    NEXT,
    NUM_RECORDS,
    PROGRAM,
    RECORD_BYTES,
    SEMAPHORES,
)

CHUNK_BITS = 24

SPINS = 20_000
"""How often a thread looks for work before it sleeps: some 0.5 ms. Python takes less between two records of a step."""

PATIENT_SPINS = 2_000
"""How often a thread looks whether the others' chunks are done, before it lets other threads have its core."""


@kernel("void(int64, int64)")
def work(team: int, thread: int) -> None:
    """Take chunks until the program's last record is done."""
    while True:
        # The record in the upper bits and the next chunk in the lower ones: taken together, or a thread that comes late
        # would take a chunk of another record than it thinks. Records are counted on from program to program, so that
        # what was taken at the end of the last one is none of this one's.
        taken = fetch_add(team + NEXT, 1)
        place = taken >> CHUNK_BITS
        index = place - get_i64(team + FIRST)
        if index < 0 or index >= get_i64(team + NUM_RECORDS):
            return
        record = get_i64(team + PROGRAM) + index * RECORD_BYTES
        chunk = taken & ((1 << CHUNK_BITS) - 1)
        num_chunks = get_i64(record + 8)
        if chunk < num_chunks:
            call_kernel(get_i64(record), record + 16, chunk, thread)
            if fetch_add(team + DONE, 1) + 1 == num_chunks:
                atomic_put(team + DONE, 0)
                atomic_put(team + NEXT, (place + 1) << CHUNK_BITS)
            continue
        spins = 0
        while atomic_get(team + NEXT) >> CHUNK_BITS == place:
            spins += 1
            if spins > PATIENT_SPINS:
                sched_yield()
            else:
                pause()


@kernel("void(int64, int64, int64, int64)")
def run(team: int, program: int, num_records: int, num_threads: int) -> None:
    """Run a program with so many threads of the team, this one included; returns when all of it is done.

    Args:
        program: address of records.
    """
    first = (atomic_get(team + NEXT) >> CHUNK_BITS) + 1
    put_i64(team + PROGRAM, program)
    put_i64(team + NUM_RECORDS, num_records)
    put_i64(team + FIRST, first)
    atomic_put(team + NEXT, first << CHUNK_BITS)
    if num_threads > 1:
        fetch_add(team + GENERATION, 1)
        for thread in range(1, num_threads):
            if exchange(team + SEMAPHORES + 128 * thread, 0):
                sem_post(team + SEMAPHORES + 128 * thread + 64)
    work(team, 0)


@kernel("void(int64, int64)")
def serve(team: int, thread: int) -> None:
    """Work for the team until it is over; sleeps when nothing comes for long."""
    seen, spins = 0, 0
    is_asleep = team + SEMAPHORES + 128 * thread
    while not atomic_get(team + IS_OVER):
        generation = atomic_get(team + GENERATION)
        if generation != seen:
            seen, spins = generation, 0
            work(team, thread)
            continue
        spins += 1
        if spins < SPINS:
            pause()
            continue
        spins = 0
        atomic_put(is_asleep, 1)
        is_idle = atomic_get(team + GENERATION) == seen and not atomic_get(team + IS_OVER)
        # What took the mark away has posted, or is about to.
        if is_idle or not exchange(is_asleep, 0):
            sem_wait(is_asleep + 64)


@kernel("void(int64, int64)")
def end(team: int, num_threads: int) -> None:
    """Let the others return from `serve`."""
    atomic_put(team + IS_OVER, 1)
    for thread in range(1, num_threads):
        if exchange(team + SEMAPHORES + 128 * thread, 0):
            sem_post(team + SEMAPHORES + 128 * thread + 64)
