"""Compiles a grammar in a process of its own, which ends where that takes too long or too much: python trial.py.

It imports llguidance and nothing else, which takes 0.1 s. Its parent learns from its exit alone; what is wrong with a
grammar is seen when that is compiled there.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
import threading
from typing import Any

import llguidance

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read ``{"text", "num_tokens", "limits", "cpu_s", "memory_bytes", "stack_bytes"}``, and compile the text."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    given = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (given["cpu_s"],) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (given["memory_bytes"] + given["stack_bytes"],) * 2)
    tokenizer = llguidance.LLTokenizer(bytes_as_tokens(), n_vocab=max(given["num_tokens"], 257), eos_token=256)
    threading.stack_size(given["stack_bytes"])
    thread = threading.Thread(target=compile_and_mask, args=(tokenizer, given))
    thread.start()
    thread.join()


def compile_and_mask(tokenizer: llguidance.LLTokenizer, given: dict[str, Any]) -> None:
    limits = llguidance.LLParserLimits(**given["limits"])
    matcher = llguidance.LLMatcher(tokenizer, given["text"], log_level=0, limits=limits)
    for _ in range(2):
        mask = matcher.compute_bitmask()
        first = next((token for token in range(256) if mask[token // 8] >> token % 8 & 1), None)
        if first is None or not matcher.consume_token(first):
            break


def bytes_as_tokens() -> str:
    """A tokenizer.json with a token for each byte, in the spelling of byte-level tokenizers, and an end."""
    alphabet = map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": 256, "content": "<end>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    return json.dumps({
        "version": "1.0",
        "added_tokens": [{**end, "normalized": False}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {char: token_id for token_id, char in enumerate(alphabet)}, "merges": []},
    })  # fmt: skip


if __name__ == "__main__":
    main()
