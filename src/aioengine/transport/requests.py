"""Requests of front ends, checked and handed to the core: a front end is not trusted to have checked them."""

from __future__ import annotations

import numpy as np

from aioengine.core.engine_core import EngineCore
from aioengine.core.listener import UNLIMITED
from aioengine.core.protocol import MAX_ID_CHARS, MAX_PRIORITY, MAX_SALT_CHARS, check_limits
from aioengine.core.request_log import RequestLog
from aioengine.errors import AioEngineError, EngineOverloaded, InvalidRequest, PromptTooLong
from aioengine.sampling_params import MAX_BAD_WORDS, MAX_BAD_WORDS_CHARS
from aioengine.scheduler.sequence import Request, Sequence
from aioengine.text.worker import TextWorker
from aioengine.transport.session import Follower, Session
from aioengine.transport.wire import AddRequest, Failed, Finish, unpack_params
from aioengine.transport.wire_errors import to_fault

RETRY_AFTER_S = 1.0

MAX_HELD_FACTOR = 8
"""So many times what may wait and run at once may be held by a front end in all: the rest is blocked by its readers."""

MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_TOKENS = 2 * 4 * (MAX_BAD_WORDS_CHARS + MAX_BAD_WORDS)
"""Of all bad words: each is tokenized twice, once behind a space, and a character is four tokens at most."""

CHARS_A_TOKEN = 1
"""Hashing a prompt's token takes as long as tokenizing a character: what is long is done in the worker's thread."""


class Requests:
    """Takes the requests of all front ends.

    Args:
        core: where they run.
        worker: hashes long prompts.
    """

    def __init__(self, core: EngineCore, worker: TextWorker) -> None:
        self._core = core
        self._worker = worker

    async def add(self, session: Session, body: AddRequest, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Hand a request to the core. A bad one fails, for its front end to hear, and nothing else does."""
        numbers = range(body.number, body.number + 1)
        try:
            params = unpack_params(body.params)
            check_limits(params, self._core.config, self._core.info.vocab_size, self._core.eos_token_ids)
            numbers = range(body.number, body.number + params.num_sequences)  # not more than may be had
            self._check(session, body, prompt, numbers)
            request = Request(
                request_id=body.request_id,
                prompt_token_ids=prompt,
                params=params,
                seed=body.seed,
                max_total_tokens=body.max_total_tokens,
                bad_words=body.bad_words,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
            size = CHARS_A_TOKEN * len(prompt)
            sequence = await self._worker.run(self._core.make_sequence, size, request)
            if session.is_over:
                return
            self._begin(session, sequence, numbers, body.num_allowed)
        except AioEngineError as error:
            for number in numbers:
                if number not in session.followers:
                    session.failed.append(Failed(number, to_fault(error)))
            session.mark()
        else:
            RequestLog(self._core.config, f"front end {session.index}: ").begun(request)

    def finish(self, session: Session, body: Finish) -> None:
        """End sequences; those that have ended, or never were, are nobody's business."""
        for number in body.numbers:
            follower = session.followers.get(number)
            if follower is not None:
                self._core.finish(follower.sequence, body.reason, body.stop_reason)

    def _begin(self, session: Session, sequence: Sequence, numbers: range, num_allowed: int) -> None:
        family = (sequence, *sequence.children)
        allowed = UNLIMITED if num_allowed < 0 else num_allowed
        followers = [
            Follower(session, number, member, self._core, allowed)
            for number, member in zip(numbers, family, strict=True)
        ]
        self._core.add(sequence, followers)
        session.num_unstarted += len(family)
        session.followers.update(zip(numbers, followers, strict=True))

    def _check(
        self,
        session: Session,
        body: AddRequest,
        prompt: np.ndarray[tuple[int], np.dtype[np.int32]],
        numbers: range,
    ) -> None:
        core = self._core
        core.check_accepting()
        info = core.info
        limit = info.max_model_len - 1
        if len(prompt) > limit:
            raise PromptTooLong(len(prompt), limit)
        if not len(prompt) or int(prompt.min()) < 0 or int(prompt.max()) >= info.vocab_size:
            raise InvalidRequest(f"the prompt needs token ids, from 0 to {info.vocab_size - 1}", param="prompt")
        if not len(prompt) < body.max_total_tokens <= info.max_model_len:
            raise InvalidRequest(
                f"max_total_tokens={body.max_total_tokens}: more than the prompt's {len(prompt)} and at most "
                f"{info.max_model_len} are needed",
                param="max_tokens",
            )
        num_bad = sum(map(len, body.bad_words))
        if len(body.bad_words) > MAX_BAD_SEQUENCES or num_bad > MAX_BAD_TOKENS:
            raise InvalidRequest("bad_words holds more than any text makes", param="bad_words")
        if any(not word or not all(0 <= token < info.vocab_size for token in word) for word in body.bad_words):
            raise InvalidRequest("bad_words holds what is no token", param="bad_words")
        if abs(body.priority) > MAX_PRIORITY or not -(2**63) <= body.seed < 2**64:
            raise InvalidRequest("priority or seed is out of range", param="priority")
        if len(body.request_id) > MAX_ID_CHARS:
            raise InvalidRequest(f"request_id: at most {MAX_ID_CHARS} characters are possible", param="request_id")
        if len(body.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequest(f"cache_salt: at most {MAX_SALT_CHARS} characters are possible", param="cache_salt")
        if numbers[0] < 0 or numbers[-1] >= 2**31 or any(number in session.followers for number in numbers):
            raise InvalidRequest(f"a sequence of number {body.number} is here already, or cannot be")
        most = core.config.max_waiting + core.config.max_num_seqs
        if len(session.followers) + len(numbers) > MAX_HELD_FACTOR * most:
            raise EngineOverloaded(
                f"{len(session.followers)} sequences of this front end have not ended; read some of them to their ends",
                retry_after_s=RETRY_AFTER_S,
            )
        if session.num_unstarted + len(numbers) > core.config.max_waiting:
            raise EngineOverloaded(
                f"{session.num_unstarted} sequences of this front end wait already (max_waiting)",
                retry_after_s=RETRY_AFTER_S,
            )
