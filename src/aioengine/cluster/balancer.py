"""Chooses the replica of a request: the one with its session, with its prefix, or with the least load.

Pure: a replica's load comes in with each call, and of the replicas' caches it knows what it has sent there. A request
costs O(replicas + blocks of the prompt).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import Literal, NamedTuple

BalancePolicy = Literal["prefix", "load", "round_robin"]

MAX_AFFINITY_BLOCKS = 1024
"""First blocks of a prompt that are looked at: prompts which are alike up to there are one and the same here."""
MAX_HASHES, MAX_SESSIONS = 1 << 18, 1 << 16
"""Most entries of a balancer, of all replicas together, about 0.15 KB each; the least recently used go first."""
WAITING_WEIGHT = 4
"""A waiting request is as much load as this many running ones (vLLM's DPLBAsyncMPClient)."""
SPARE_BLOCKS = 0.25
"""With a smaller share of its KV blocks free a replica counts as fuller: by a whole batch when none is free."""
TOKENS_PER_REQUEST = 64
"""So many tokens of a prompt, to be computed where another replica has them, are as much load as a running request."""
HOME_SLACK = 6.0
"""By so much load a session's home may exceed the best replica, and a new session goes there all the same."""
_GOLDEN = 0.6180339887498949
_ODD, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


class Candidate(NamedTuple):
    """A replica that serves, and its load by its last report. ``num_sent``: requests sent to it by us since then."""

    rank: int
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    max_num_seqs: int
    num_sent: int


class Balancer:
    """Chooses a replica for each request.

    The load of a replica is vLLM's score, waiting x 4 + running, and more when its KV cache is nearly full. Requests
    sent since its last report take its free rows, then wait, and their prompts are to be computed, so that a burst
    spreads before any report.

    * "prefix": the smallest load after what its cache saves: `TOKENS_PER_REQUEST` tokens of the prompt that it has
      computed count like one running request less. So a prefix is followed until that replica is overloaded by more
      than it saves, as in NVIDIA Dynamo's KV router, without a threshold for the whole cluster (SGLang's).
    * "load": the smallest load.
    * "round_robin": one after the other.

    A session stays at its replica while that serves, but for "round_robin", unless a batch of its size waits there. It
    begins at its home, the same for all front ends, unless that is `HOME_SLACK` busier than the best.

    Args:
        block_size: tokens a block.
        offset: another number for each front end of the same replicas, so that equal loads do not send all to one.

    Attributes:
        num_hashes: what it remembers of the replicas' caches now, at most ``max_hashes``.
    """

    def __init__(
        self,
        policy: BalancePolicy = "prefix",
        *,
        block_size: int = 16,
        offset: int = 0,
        max_hashes: int = MAX_HASHES,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self.policy = policy
        self._first = offset * _GOLDEN % 1.0
        """Where the first turn begins, as a share of the candidates: these stay far apart, however many offsets are."""
        self._num_chosen = 0
        self._block_size = block_size
        self._sent_blocks: dict[int, int] = {}
        """{rank: blocks of prompts, sent to it since its last report and not known to be in its cache}."""
        self._max_hashes = max_hashes
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, int] = OrderedDict()
        """{session: rank}, the least recently used first."""
        self._caches: dict[int, _KnownCache] = {}
        self.num_hashes = 0
        self._holders: dict[bytes, int] = {}
        """{hash: a bit for each rank that has computed it}."""

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def choose(self, candidates: Items[Candidate], hashes: Items[bytes] = (), session: str = "") -> int:
        """The rank of the replica that a request goes to, which is noted as if it went there.

        Args:
            candidates: the replicas that serve, at least one.
            hashes: of the prompt's full blocks (`PrefixKey.hash_blocks`); all behind the first
                `MAX_AFFINITY_BLOCKS` are ignored.
            session: requests of one session go to one replica; "": of none.
        """
        assert candidates, "there is no replica to choose"
        chosen, num_cached = self._choose(candidates, hashes[:MAX_AFFINITY_BLOCKS], session)
        self._num_chosen += 1
        before = self._sent_blocks.get(chosen.rank, 0) if chosen.num_sent else 0
        self._sent_blocks[chosen.rank] = before + len(hashes) - num_cached
        if self.policy == "prefix" and hashes:
            self._remember(chosen, hashes[:MAX_AFFINITY_BLOCKS])
        if session:
            self._sessions[session] = chosen.rank
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        return chosen.rank

    def forget(self, rank: int) -> None:
        """Forget what this replica had: it is gone, or its cache was reset. Its sessions begin again."""
        self._sent_blocks.pop(rank, None)
        for block_hash in self._caches.pop(rank, _KnownCache()).widths:
            self._drop_holder(block_hash, rank)
        for session in [session for session, at in self._sessions.items() if at == rank]:
            del self._sessions[session]

    def _choose(self, candidates: Items[Candidate], hashes: Items[bytes], session: str) -> tuple[Candidate, int]:
        """The replica, and how many of the prompt's blocks it is known to have."""
        count = len(candidates)
        first = (int(self._first * count) + self._num_chosen) % count
        if self.policy == "round_robin":
            return candidates[first], 0
        cached = self._cached_blocks(hashes) if self.policy == "prefix" else {}
        rank = self._sessions.get(session) if session else None
        if rank is not None:
            stuck_to = next((candidate for candidate in candidates if candidate.rank == rank), None)
            if stuck_to is not None and not (_is_full(stuck_to) and not all(map(_is_full, candidates))):
                return stuck_to, cached.get(rank, 0)
        costs = [self._load(candidate) for candidate in candidates]
        if cached:
            block = self._block_size / TOKENS_PER_REQUEST
            costs = [
                cost - cached.get(candidate.rank, 0) * block for cost, candidate in zip(costs, candidates, strict=True)
            ]
        least = min(costs)
        if session:
            home = _home(session, candidates)
            if costs[home] <= least + HOME_SLACK:
                return candidates[home], cached.get(candidates[home].rank, 0)
        place = next(at % count for at in range(first, first + count) if costs[at % count] == least)
        return candidates[place], cached.get(candidates[place].rank, 0)

    def _load(self, candidate: Candidate) -> float:
        rank, running, waiting, free_blocks, num_blocks, max_num_seqs, num_sent = candidate
        load: float = running + WAITING_WEIGHT * waiting
        if num_blocks and free_blocks < num_blocks * SPARE_BLOCKS:
            load += max_num_seqs * (1 - free_blocks / (num_blocks * SPARE_BLOCKS))
        if num_sent:
            num_taken = min(num_sent, max(max_num_seqs - running - waiting, 0))
            load += num_taken + WAITING_WEIGHT * (num_sent - num_taken)
            load += self._sent_blocks.get(rank, 0) * self._block_size / TOKENS_PER_REQUEST
        return load

    def _cached_blocks(self, hashes: Items[bytes]) -> dict[int, int]:
        """{rank: how many of these blocks it has}, of those that have any. From the end: the longest comes first."""
        found: dict[int, int] = {}
        seen = 0
        for position in range(len(hashes), 0, -1):
            holders = self._holders.get(hashes[position - 1], 0) & ~seen
            seen |= holders
            while holders:
                lowest = holders & -holders
                found[lowest.bit_length() - 1] = position
                holders ^= lowest
        return found

    def _remember(self, chosen: Candidate, hashes: Items[bytes]) -> None:
        """The chosen replica is going to have these blocks. Those at `_marks` stand for the ones before them."""
        rank = chosen.rank
        cache = self._caches.setdefault(rank, _KnownCache())
        widths = cache.widths
        bit = 1 << rank
        for position, width in _marks(len(hashes)):
            block_hash = hashes[position - 1]
            if block_hash in widths:
                widths.move_to_end(block_hash)
                continue
            widths[block_hash] = width
            cache.num_blocks += width
            self._holders[block_hash] = self._holders.get(block_hash, 0) | bit
            self.num_hashes += 1
        self._trim(cache, rank, num_over=0, num_blocks=chosen.num_blocks)
        while (num_over := self.num_hashes - self._max_hashes) > 0:
            fullest = max(self._caches, key=lambda of: len(self._caches[of].widths))
            self._trim(self._caches[fullest], fullest, num_over=num_over)

    def _trim(self, cache: _KnownCache, rank: int, *, num_over: int, num_blocks: float = math.inf) -> None:
        """Forget its ``num_over`` oldest hashes, and more while it has more than ``num_blocks`` blocks."""
        while cache.widths and (num_over > 0 or cache.num_blocks > num_blocks):
            block_hash, width = cache.widths.popitem(last=False)
            cache.num_blocks -= width
            self._drop_holder(block_hash, rank)
            num_over -= 1

    def _drop_holder(self, block_hash: bytes, rank: int) -> None:
        self.num_hashes -= 1
        left = self._holders[block_hash] & ~(1 << rank)
        if left:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]


class _KnownCache:
    """The known contents of one replica's cache."""

    __slots__ = ("num_blocks", "widths")

    def __init__(self) -> None:
        self.widths: OrderedDict[bytes, int] = OrderedDict()
        """{hash: the number of blocks it stands for}, the least recently used first, of a prompt's the last first."""
        self.num_blocks = 0
        """Sum of ``widths``."""


def _is_full(candidate: Candidate) -> bool:
    """Whether as many wait there as can run: a newcomer waits for a whole batch."""
    return candidate.running + candidate.waiting + candidate.num_sent >= 2 * candidate.max_num_seqs


def _home(session: str, candidates: Items[Candidate]) -> int:
    """Where the candidate is that a session goes to at first, for all front ends alike, and whichever others serve.

    Rendezvous hashing: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """
    seed = int.from_bytes(blake2b(session.encode(), digest_size=8).digest())
    weights = [(seed ^ candidate.rank * _ODD) * _ODD & _MASK for candidate in candidates]
    return weights.index(max(weights))


@functools.cache
def _marks(num_blocks: int) -> tuple[tuple[int, int], ...]:
    """(position, blocks that it stands for) of the blocks by which a prompt is remembered, the last first.

    The first eight, then four in each octave, and the last: prompts of n blocks cost O(log n), and a prefix that ends
    between two marks is taken for at least 4/5 of its length. The last block is there for chats, whose next turn begins
    with all of it.
    """
    positions = [at for at in range(1, num_blocks) if at % (1 << max(at.bit_length() - 3, 0)) == 0]
    positions = [0, *positions, num_blocks]
    return tuple((at, at - before) for before, at in itertools.pairwise(positions))[::-1]
