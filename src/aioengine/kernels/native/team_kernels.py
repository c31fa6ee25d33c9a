"""A team of threads that runs programs of kernels, without Python between them.

A program is a list of records, each a kernel with its arguments and the number of chunks that its work is cut into.
All threads take chunks of one record until none is left; the last to finish one begins the next record. A thread
that is not running when its turn comes (another process has its core) holds nothing up but a chunk that it has begun.
"""

from __future__ import annotations

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.sizes import (
    CHUNK_BITS,
    DONE,
    END,
    GENERATION,
    IS_OVER,
    MAX_CHUNKS,
    NEXT,
    RECORD_BYTES,
    RECORDS,
    SEMAPHORES,
)
from aioengine.kernels.native.vectors import (
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

SPINS = 20_000
"""How often a thread looks for work before it sleeps: some 0.5 ms, longer than Python takes between two launches of a
step."""

PATIENT_SPINS = 2_000
"""How often a thread looks whether the others' chunks are done, before it lets other threads have its core."""


@inlined
def begin(team, place, record):
    """Let the threads take chunks of a record, or of none if that is the program's end.

    NEXT has the record's place, counted on from program to program, in its upper bits and the next chunk in the lower
    ones: taken together, so that a thread knows of which record its chunk is. Two records have a slot each, and that of
    a place is written when NEXT is beyond the place that had it before.
    """
    if record == get_i64(team + END):
        atomic_put(team + NEXT, place << CHUNK_BITS | MAX_CHUNKS)
        return
    slot = team + RECORDS + place % 2 * 16
    put_i64(slot, record)
    put_i64(slot + 8, get_i64(record + 8))
    atomic_put(team + NEXT, place << CHUNK_BITS)


@kernel("void(int64, int64)")
def work(team: int, thread: int) -> None:
    """Take chunks until the program's last record is done."""
    while True:
        taken = fetch_add(team + NEXT, 1)
        place, chunk = taken >> CHUNK_BITS, taken & (1 << CHUNK_BITS) - 1
        if chunk >= MAX_CHUNKS:
            return
        slot = team + RECORDS + place % 2 * 16
        record, num_chunks = atomic_get(slot), atomic_get(slot + 8)
        # A chunk that there is holds up its record. If there is none, the others may be far beyond, even in another
        # program, and the slot is not this record's any more.
        if chunk < num_chunks and atomic_get(team + NEXT) >> CHUNK_BITS == place:
            call_kernel(get_i64(record), record + 16, chunk, thread)
            if fetch_add(team + DONE, 1) + 1 == num_chunks:
                atomic_put(team + DONE, 0)
                begin(team, place + 1, record + RECORD_BYTES)
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
    put_i64(team + END, program + num_records * RECORD_BYTES)
    begin(team, (atomic_get(team + NEXT) >> CHUNK_BITS) + 1, program)
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
        # The thread that took the mark away has posted, or is about to: the semaphore must be taken back.
        if is_idle or not exchange(is_asleep, 0):
            sem_wait(is_asleep + 64)


@kernel("void(int64, int64)")
def end(team: int, num_threads: int) -> None:
    """Let the other threads return from `serve`."""
    atomic_put(team + IS_OVER, 1)
    for thread in range(1, num_threads):
        if exchange(team + SEMAPHORES + 128 * thread, 0):
            sem_post(team + SEMAPHORES + 128 * thread + 64)
