"""What a request asks for does not hold the loop: long work is done in threads, or in slices."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest


async def test_long_bad_words_are_tokenized_in_a_thread_and_short_ones_at_once(serve: Any) -> None:
    async with serve() as served:
        threads: list[threading.Thread] = []
        encode_bad_words = served.tokenizer.encode_bad_words

        def noted(words: Any) -> Any:
            threads.append(threading.current_thread())
            return encode_bad_words(words)

        served.tokenizer.encode_bad_words = noted
        for words in (["short"], ["a word " * 100] * 20):
            await served.engine.generate([1, 2, 3], max_tokens=2, seed=1, ignore_eos=True, bad_words=words)
        assert [thread is threading.current_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize("logprobs", [None, 20])
async def test_log_probabilities_are_handed_out_in_smaller_slices(serve: Any, tasks: Any, logprobs: int | None) -> None:
    async with serve(num_blocks=256, is_manual=True, config={"max_num_seqs": 64}) as served:
        await served.engine.pause()  # so that all are in one step: they may take several turns to come
        started = [
            tasks.start(served.engine.generate([1 + i] * 3, max_tokens=2, seed=1, ignore_eos=True, logprobs=logprobs))
            for i in range(64)
        ]
        await served.until(lambda: len(served.core._live) == 64)
        await served.engine.resume()
        await served.until(lambda: served.core.stats().running == 64)
        served.complete_all()
        slices: list[int] = []
        publish = served.core._publish_slice
        heard = 0

        def counted() -> bool:
            nonlocal heard
            is_more = publish()
            total = sum(len(s.listener.token_ids) for s in served.core._live.values() if s.listener is not None)
            slices.append(total - heard)
            heard = total
            return bool(is_more)

        served.core._publish_slice = counted
        await served.until(lambda: heard == 64)
        assert max(slices) == (32 if logprobs is None else 11), "a token with 20 counts for three"
        while not all(task.done() for task in started):
            served.complete_all()
            await asyncio.sleep(0)
        await tasks.end(*started)
