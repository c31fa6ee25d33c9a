"""The words of `sample_rows`, and its flags, as constants of kernels."""

from __future__ import annotations

import triton.language as tl

from aioengine.kernels.sample_rows import PARAM_WORDS, SAMPLE_WORDS, SampleFlag, SampleRow

SAMPLE_STRIDE = tl.constexpr(SAMPLE_WORDS)
LOGITS_ROW = tl.constexpr(int(SampleRow.LOGITS_ROW))
ROW = tl.constexpr(int(SampleRow.ROW))
END = tl.constexpr(int(SampleRow.END))
OUTPUT_POSITION = tl.constexpr(int(SampleRow.OUTPUT_POSITION))
FLAGS = tl.constexpr(int(SampleRow.FLAGS))
CHOICE = tl.constexpr(int(SampleRow.CHOICE))
SEED_LOW = tl.constexpr(int(SampleRow.SEED_LOW))
SEED_HIGH = tl.constexpr(int(SampleRow.SEED_HIGH))
MASK = tl.constexpr(int(SampleRow.MASK))
TEMPERATURE = tl.constexpr(PARAM_WORDS["temperature"])
TOP_K = tl.constexpr(PARAM_WORDS["top_k"])
TOP_P = tl.constexpr(PARAM_WORDS["top_p"])
MIN_P = tl.constexpr(PARAM_WORDS["min_p"])
REPETITION = tl.constexpr(PARAM_WORDS["repetition_penalty"])
FREQUENCY = tl.constexpr(PARAM_WORDS["frequency_penalty"])
PRESENCE = tl.constexpr(PARAM_WORDS["presence_penalty"])
FIRST = tl.constexpr(int(SampleFlag.FIRST))
LOGPROBS = tl.constexpr(int(SampleFlag.LOGPROBS))
