"""The messages between a coordinator and the front ends of its cluster, beside those of every session (`wire`)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aioengine.config import MAX_REPLICAS
from aioengine.core.protocol import ReplicaStatus
from aioengine.errors import InvalidRequest, WireError
from aioengine.transport import wire
from aioengine.transport.wire import Number, WireMessage

MAX_REASON_CHARS = 1_000
"""Most characters of a replica's reason: the reasons of all fit into one message."""

ShortText = Annotated[str, Meta(max_length=64)]


def check_count(replicas: object) -> None:
    """Raise InvalidRequest unless a cluster can have so many replicas."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= MAX_REPLICAS:
        raise InvalidRequest(f"replicas={replicas!r}: an int from 1 to {MAX_REPLICAS} is needed", param="replicas")


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A replica, as front ends see it; fields that are not here are a `ReplicaStatus`'s.

    Attributes:
        state: a `ReplicaStatus`'s; or "reserved": it serves another front end alone, for now.
        address: where it serves; empty unless it serves or drains. Each start has another one, or other restarts.
        server_key: the public key that it serves by; empty: none.
    """

    rank: Number
    state: ShortText
    num_restarts: Number
    address: Annotated[str, Meta(max_length=1024)] = ""
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] = ""
    where: Annotated[str, Meta(max_length=1024)] = ""
    num_blocks: Number = 0
    server_key: ShortText = ""

    def status(self, counts: Counts, *, num_moved: int) -> ReplicaStatus:
        """Return the status, with the load that ``counts`` has of it."""
        place = counts.ranks.index(self.rank) if self.rank in counts.ranks else None
        return ReplicaStatus(
            rank=self.rank,
            state=self.state,
            reason=self.reason,
            num_restarts=self.num_restarts,
            where=self.where,
            running=0 if place is None else counts.running[place],
            waiting=0 if place is None else counts.waiting[place] + counts.blocked[place],
            free_blocks=0 if place is None else counts.free_blocks[place],
            num_blocks=self.num_blocks,
            num_moved=num_moved,
        )


class Counts(WireMessage, frozen=True, tag=32):
    """The replicas' load, of all front ends together: a column each, by rank.

    Raises:
        WireError: the columns are of several lengths.
    """

    ranks: Annotated[list[Number], Meta(max_length=MAX_REPLICAS)]
    running: list[Number]
    waiting: list[Number]
    blocked: list[Number]
    free_blocks: list[Number]

    def __post_init__(self) -> None:
        columns = (self.running, self.waiting, self.blocked, self.free_blocks)
        if any(len(column) != len(self.ranks) for column in columns):
            raise WireError(f"counts of {len(self.ranks)} replicas in columns of other lengths")


class Membership(WireMessage, frozen=True, tag=31):
    """All replicas; one that is missing here and was there before is gone."""

    members: Annotated[list[Member], Meta(max_length=MAX_REPLICAS)]


# From a front end


class Drained(WireMessage, frozen=True, tag=21):
    """A front end has nothing at a replica that drains or is reserved, and sends it nothing any more."""

    rank: Number


ToCoordinator = wire.Attach | wire.CallControl | wire.Acknowledge | wire.Detach | wire.CancelCall | Drained


class Scale(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Serve with so many replicas. → None, once they serve, and those that are too many have drained."""

    replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)]


class RestartReplicas(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Restart one replica after the other, each drained first. → None."""


class Reserve(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Have a replica that all other front ends leave. → its rank, once they have. See `Reservation`."""


class Release(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Let the others use it again. → None."""

    rank: Number


ClusterCall = Scale | RestartReplicas | Reserve | Release

CALL_DECODER: msgspec.msgpack.Decoder[ClusterCall] = msgspec.msgpack.Decoder(ClusterCall)


# From the coordinator


class AttachedToCluster(WireMessage, frozen=True, tag=30):
    """The answer to `Attach`: the first message of a coordinator's side of a session."""

    version: int
    index: Number
    """How many front ends have attached before."""
    config: dict[str, Any]
    """The replicas' `EngineConfig`, of a version that may have other settings."""
    options: dict[str, Any]
    """The replicas' `ReplicaOptions`, of a version that may have other settings."""
    members: Membership
    counts: Counts
    pair_path: Annotated[str, Meta(max_length=4096)] = ""
    """The file with the pair by which front ends connect to members that serve by a key."""


FromCoordinator = AttachedToCluster | wire.Refused | Membership | Counts | wire.Returned | wire.Shutdown
