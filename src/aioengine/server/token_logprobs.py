"""Log-probabilities of tokens as JSON, in the layouts of chats, of completions and of vLLM's prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from aioengine.outputs import CompletionDelta, Logprob, TokenLogprobs

encode = msgspec.json.Encoder().encode

TokenBytes = Callable[..., list[bytes]]
"""`Engine.token_bytes`."""

ENTRIES_A_SLICE = 500
"""Log-probabilities that are encoded before other tasks run."""


class PositionWriter:
    """Writes log-probabilities of tokens in the chats' layout.

    Args:
        top_logprobs: likeliest tokens to report at each position.
        is_by_ids: tokens are named by their ids.
    """

    def __init__(self, token_bytes: TokenBytes, top_logprobs: int, *, is_by_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._top_logprobs = top_logprobs
        self._is_by_ids = is_by_ids
        self._begun: set[int] = set()
        """Choices of which some positions have been written."""

    def encode(self, choice: int, position: TokenLogprobs) -> bytes:
        """JSON of a choice's next token, and of the ``top_logprobs`` likeliest ones, by rank."""
        is_start = choice not in self._begun
        self._begun.add(choice)
        entries = {}
        for token_id, entry in position.items():
            # One at a time: they are alternatives, and do not follow each other.
            (data,) = self._token_bytes([token_id], is_start=is_start, skip_special_tokens=False)
            name = _name_of(token_id, _text_of(entry), is_by_ids=self._is_by_ids)
            entries[token_id] = {"token": name, "logprob": _finite(entry.logprob), "bytes": list(data)}
        ranked = sorted((entry.rank, token_id) for token_id, entry in position.items())
        top = [entries[token_id] for rank, token_id in ranked if rank <= self._top_logprobs]
        return encode({**entries[next(iter(position))], "top_logprobs": top})


def positions_a_slice(top_logprobs: int | None) -> int:
    """`Answer.max_positions` for so many likeliest tokens at each position."""
    return max(1, ENTRIES_A_SLICE // ((top_logprobs or 0) + 1))


class Columns:
    """Tokens with their log-probabilities in the completions' layout, as JSON: four lists of the same length.

    Attributes:
        offset: where the next token begins, in characters: behind the texts of all tokens before it, as in vLLM.
    Args:
        num_top: likeliest tokens to report. is_by_ids: tokens are named by their ids.
    """

    def __init__(self, offset: int, num_top: int, *, is_by_ids: bool) -> None:
        self.offset = offset
        self._num_top = num_top
        self._is_by_ids = is_by_ids
        self._rows: list[tuple[bytes, bytes, bytes, bytes]] = []

    def add(self, position: TokenLogprobs) -> None:
        """Add a sampled token, and the likeliest ones by their names, the sampled one among them."""
        top: dict[str, float] = {}
        for token_id, entry in _likeliest(position, self._num_top).items():
            name = _name_of(token_id, _text_of(entry), is_by_ids=self._is_by_ids)
            top.setdefault(name, _finite(entry.logprob))  # several half characters have the same text
        sampled_id, sampled = next(iter(position.items()))
        self.add_token(sampled_id, _text_of(sampled), _finite(sampled.logprob), top)

    def add_token(self, token_id: int, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        name = _name_of(token_id, text, is_by_ids=self._is_by_ids)
        self._rows.append((encode(name), encode(logprob), encode(top), b"%d" % self.offset))
        self.offset += len(text)

    def encoded(self) -> bytes:
        columns = [b",".join(column) for column in zip(*self._rows, strict=True)] or [b""] * 4
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % tuple(columns)


def split_delta(delta: CompletionDelta, max_positions: int) -> Iterator[CompletionDelta]:
    """Split a long merged delta into several with at most ``max_positions`` each; the last has its text."""
    positions = delta.logprobs or []
    last = max(0, len(positions) - 1) // max_positions * max_positions
    for first in range(0, last, max_positions):
        end = first + max_positions
        ids, part = delta.token_ids[first:end], positions[first:end]
        yield CompletionDelta(index=delta.index, text="", token_ids=ids, logprobs=part)
    yield msgspec.structs.replace(delta, token_ids=delta.token_ids[last:], logprobs=positions[last:])


def _likeliest(position: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """A position's own token and the likeliest ``num_top``: more may have been computed, for another field."""
    own = next(iter(position))
    return {token_id: entry for token_id, entry in position.items() if token_id == own or entry.rank <= num_top}


def plain_position(position: TokenLogprobs, num_top: int) -> dict[int, dict[str, Any]]:
    """A position of a prompt in vLLM's format."""
    return {
        token_id: {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in _likeliest(position, num_top).items()
    }


def _name_of(token_id: int, text: str, *, is_by_ids: bool) -> str:
    """A token's name: its text, or ``token_id:`` and its id, as in vLLM."""
    return f"token_id:{token_id}" if is_by_ids else text


def _text_of(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(logprob: float) -> float:
    """A log-probability of at least -9999, vLLM's floor: JSON has no infinities."""
    return max(logprob, -9999.0)
