"""What grammars cost: compiling them, their masks, and what they take of a device's throughput.

    python -m benchmarks.grammars                                # all, with the bundled model's 2,048 tokens
    python -m benchmarks.grammars --tokenizer tokenizer.json     # over another vocabulary
    python -m benchmarks.grammars --only throughput --seconds 10

**compile**: each schema of the tests' sample, compiled once, the first mask included.

**masks**: 256 rows of one schema go through one answer side by side: what each row costs a step, in µs of wall time, as
the device's thread does it (taking in the token, asking for forced ones, the mask), by as many threads as the library
takes.

**throughput**: 256 sequences at all times, over a stand-in for a GPU: its forward pass takes 5 ms in which the host may
work, its sampling begins when the step's masks have come, and two steps are in flight. A step's masks need the tokens
of the step before, so that they are made while the forward pass runs. Rows without grammars, rows with a schema that
take over forced tokens, and rows with a schema that do not, in turns; tokens and steps a second, medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from aioengine import Engine, Json
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.executor.completion_thread import DeferredResult, Pending
from aioengine.executor.device_thread import DeviceThread
from aioengine.models.folder import DEMO_MODEL, ModelFolder
from aioengine.scheduler.plan import RowAdded, StepPlan, StepResult, Want, int32
from aioengine.structured.constraints import as_constraint
from aioengine.structured.grammar import CompiledGrammar
from aioengine.structured.guidance import Vocabulary
from aioengine.structured.rows import GrammarRow, GrammarRows
from aioengine.testing import FakeExecutor

NUM_ROWS = 256
STEP_S = 0.005
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 24}, "vip": {"type": "boolean"}},
            "required": ["name", "vip"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "minItems": 3,
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {
                    "product": {"enum": ["apple", "pear", "plum", "cherry"]},
                    "count": {"type": "integer", "minimum": 1, "maximum": 999},
                    "note": {"type": "string", "maxLength": 30},
                },
                "required": ["product", "count", "note"],
                "additionalProperties": False,
            },
        },
        "status": {"enum": ["open", "paid", "shipped"]},
    },
    "required": ["customer", "lines", "status"],
    "additionalProperties": False,
}


# The stand-in


class DeviceStep(DeferredResult[StepResult]):
    """A step that ends at a known time: its sampling is done when its forward pass and its masks are."""

    def __init__(self, result: StepResult, ends_at_s: float) -> None:
        self._result = result
        self._ends_at_s = ends_at_s

    def wait(self) -> StepResult:
        while (left := self._ends_at_s - time.monotonic()) > 0:
            time.sleep(left)
        return self._result


class Gpu:
    """What the device thread owns: rows with their grammars, and the time at which the device is free."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._num_words = -(-num_tokens // 32)
        self._rows = GrammarRows(self._num_words)
        self._grammars: dict[int, GrammarRow] = {}
        self._free_at_s = 0.0
        self._rng = np.random.default_rng(0)

    def step(self, plan: StepPlan) -> DeferredResult[StepResult]:
        began_at_s = max(self._free_at_s, time.monotonic())
        if (left := self._free_at_s - time.monotonic()) > 0:  # the tokens of the step before
            time.sleep(left)
        for row in plan.removed.tolist():
            if (gone := self._grammars.pop(row, None)) is not None:
                self._rows.remove(gone)
        for added in plan.added:
            self._add(added)
        sampled = np.flatnonzero(plan.wants == Want.LOGITS)
        token_ids = self._rng.integers(300, self._num_tokens, len(sampled)).astype(np.int32)
        ends = (plan.starts + plan.num_tokens)[sampled].tolist()
        rows = [(index, self._grammars.get(row)) for index, row in enumerate(plan.rows[sampled].tolist())]
        masked = [(index, row) for index, row in rows if row is not None]
        forced: dict[int, list[int]] = {}
        if masked:
            masks = np.empty((len(masked), self._num_words), np.int32)
            self._rows.fill([(row, ends[index]) for index, row in masked], masks)
            token_ids[[index for index, _ in masked]] = self._sample(masks)
            told = self._rows.learn([(row, ends[index], int(token_ids[index])) for index, row in masked])
            forced = {index: of_row for (index, _), of_row in zip(masked, told, strict=True) if of_row}
        self._free_at_s = max(began_at_s + STEP_S, time.monotonic())
        counts = (plan.wants == Want.LOGITS).astype(np.int32)
        result = StepResult(
            step=plan.step,
            offsets=int32(np.concatenate(([0], np.cumsum(counts)))),
            token_ids=token_ids,
            forced=forced,
            device_time_s=STEP_S,
            ended_at_s=self._free_at_s,
        )
        return DeviceStep(result, self._free_at_s)

    def _sample(self, masks: np.ndarray) -> np.ndarray:
        """Of each mask the first token behind a random one, around its end if need be; 0.1 ms for 256 rows, since a GPU
        would take none of the host's time for it: mostly it is among the next 2,048."""
        first = self._rng.integers(self._num_tokens, size=len(masks))
        rows, words = np.arange(len(masks)), masks.view(np.uint32)
        at = (first[:, None] // 32 + np.arange(min(64, self._num_words))) % self._num_words
        near = words[rows[:, None], at]
        near[:, 0] &= np.uint32(0xFFFFFFFF) << (first % 32).astype(np.uint32)
        column = (near != 0).argmax(axis=1)
        word, found = near[rows, column], at[rows, column]
        for row in np.flatnonzero(word == 0).tolist():
            found[row] = (words[row] != 0).argmax()
            word[row] = words[row, found[row]]
        return found * 32 + np.log2(word & (~word + np.uint32(1))).astype(np.int64)

    def _add(self, added: RowAdded) -> None:
        if added.sampling.grammar is not None:
            self._grammars[added.row] = added.add_grammar(self._rows)


class StandInGpu(FakeExecutor):
    """An executor whose device thread does what a GPU's does about grammars, and sleeps where that would compute."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(vocab_size=num_tokens)
        self.info = ExecutorInfo(
            num_blocks=40_000, block_size=16, max_model_len=2048, vocab_size=num_tokens, max_in_flight=2, device="fake"
        )
        self._thread = DeviceThread()
        self._gpu = Gpu(num_tokens)

    def launch(self, plan: StepPlan) -> Pending[StepResult]:  # type: ignore[override]
        return self._thread.submit(self._gpu.step, plan)

    async def aclose(self) -> None:
        await self._thread.aclose()


async def rate(engine: Engine, params: dict[str, Any], seconds: float) -> tuple[float, float]:
    """Tokens and steps a second with `NUM_ROWS` sequences at all times; the first second does not count."""
    tokens = steps = 0

    def on_step(record: Any) -> None:
        nonlocal tokens, steps
        tokens += record.num_sampled
        steps += 1

    class Counter:
        def on_step(self, record: Any) -> None:
            on_step(record)

        def on_request(self, metrics: Any, reasons: Any) -> None:
            pass

    is_over = False

    async def go_on(number: int) -> None:
        rng = random.Random(number)
        while not is_over:
            await engine.generate([rng.randrange(300, 2048) for _ in range(20)], max_tokens=200, **params)

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_ROWS):
            group.create_task(go_on(number))
        await asyncio.sleep(1.0)
        stop = engine.add_observer(Counter())
        began = time.monotonic()
        await asyncio.sleep(seconds)
        stop()
        took = time.monotonic() - began
        is_over = True
        engine.abort_all()
    return tokens / took, steps / took


async def throughput(folder: Path, num_tokens: int, seconds: float, rounds: int) -> None:
    ways: dict[str, dict[str, Any]] = {
        "without grammars": {},
        "a schema": {"structured": Json(ORDER)},
        "a schema, any whitespace": {"structured": Json(ORDER, whitespace=True)},
        "a schema, no token taken over": {"structured": Json(ORDER), "bad_words": ["zzzzzzzz"]},
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    async with Engine(folder, executor=StandInGpu(num_tokens), max_num_seqs=NUM_ROWS, max_waiting=4096) as engine:
        for number in range(rounds + 1):
            for name, params in ways.items():
                measured = await rate(engine, params, seconds if number else 0.5)
                if number:
                    rates[name].append(measured)
    print(f"throughput, {num_tokens:,} tokens of vocabulary, {NUM_ROWS} rows, {STEP_S * 1e3:g} ms a step,")
    print(f"{rounds} rounds of {seconds:g} s in turns")
    plain = statistics.median(steps for _, steps in rates["without grammars"])
    for name, measured in rates.items():
        tokens, steps = (statistics.median(column) for column in zip(*measured, strict=True))
        spread = f"{min(s for _, s in measured):.1f}-{max(s for _, s in measured):.1f}"
        print(f"  {name:32} {tokens:9,.0f} tokens/s {steps:7.1f} steps/s ({spread}), {steps / plain:.3f} of the steps")


# Masks


def masks(vocabulary: Vocabulary, num_words: int) -> None:
    for name, constraint in (("a schema", Json(ORDER)), ("any whitespace", Json(ORDER, whitespace=True))):
        grammar = vocabulary.compile(constraint)
        costs: list[float] = []
        num_forced = num_sampled = 0
        for seed in range(4):
            table = GrammarRows(num_words)
            rows = [table.add(GrammarRow(grammar, 0), []) for _ in range(NUM_ROWS)]
            rng = np.random.default_rng(seed)
            position = 0
            filled = np.empty((NUM_ROWS, num_words), np.int32)
            while not rows[0].problem and position < 400:
                began = time.perf_counter()
                table.fill([(row, position) for row in rows], filled)
                cost = time.perf_counter() - began
                ids = np.flatnonzero(np.unpackbits(filled[0].view(np.uint8), bitorder="little"))
                token_id = int(rng.choice(ids))
                began = time.perf_counter()
                told = table.learn([(row, position, token_id) for row in rows])
                costs.append((cost + time.perf_counter() - began) / NUM_ROWS * 1e6)
                num_sampled, num_forced = num_sampled + 1, num_forced + len(told[0])
                position += 1 + len(told[0])
                if token_id in vocabulary.ending_ids or (told[0] and told[0][-1] in vocabulary.ending_ids):
                    break
        ranked = sorted(costs)
        print(
            f"masks, {name}: {num_words * 32:,} tokens, {NUM_ROWS} rows: median {statistics.median(costs):.1f} µs a "
            f"row and step, mean {statistics.mean(costs):.1f}, p99 {ranked[int(len(ranked) * 0.99)]:.1f}; "
            f"{num_forced / (num_forced + num_sampled):.0%} of the tokens are forced"
        )


def compiling(vocabulary: Vocabulary) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from structured.schema_sample import SAMPLE

    times: list[float] = []
    compiled: list[CompiledGrammar] = []
    for case in SAMPLE:
        began = time.perf_counter()
        try:
            compiled.append(vocabulary.compile(as_constraint(case.schema)))
        except Exception:  # it is refused
            continue
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    print(
        f"compile: {len(times)} of {len(SAMPLE)} schemas: median {statistics.median(times):.2f} ms, "
        f"p99 {times[int(len(times) * 0.99)]:.2f}, max {times[-1]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["compile", "masks", "throughput"])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; absent: the bundled model's")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    text = (asked.tokenizer or DEMO_MODEL / "tokenizer.json").read_text()
    endings = ModelFolder.read(DEMO_MODEL).eos_token_ids if asked.tokenizer is None else (1,)
    known = json.loads(text)
    added = [token["id"] + 1 for token in known.get("added_tokens", [])]
    num_tokens = max(len(known["model"]["vocab"]), *added)
    began = time.perf_counter()
    vocabulary = Vocabulary(text, num_tokens, endings)
    print(f"a vocabulary of {num_tokens:,} tokens: {time.perf_counter() - began:.2f} s to read, once")
    if asked.only in (None, "compile"):
        compiling(vocabulary)
    if asked.only in (None, "masks"):
        masks(vocabulary, vocabulary.num_words)
    if asked.only in (None, "throughput"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(shutil.copytree(DEMO_MODEL, name, dirs_exist_ok=True))
            (folder / "tokenizer.json").write_text(text)
            if asked.tokenizer is not None:
                (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
                (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*endings]}))
                config = json.loads((folder / "config.json").read_text())
                (folder / "config.json").write_text(json.dumps({**config, "vocab_size": num_tokens}))
            asyncio.run(throughput(folder, num_tokens, asked.seconds, asked.rounds))


if __name__ == "__main__":
    main()
