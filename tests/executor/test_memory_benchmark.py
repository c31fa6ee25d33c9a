"""Loading takes little more memory than the weights that are kept, dense or coded: two cases of the benchmark."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.memory import CASES, DENSE, MAX_RATIO, measure

SMALL = {**DENSE, "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816}


# Of codes some 25 MB are beside the weights however few layers there are, too much for the small model's ratio.
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "config"), [("bfloat16", SMALL), ("GPTQ int4", DENSE)])
def test_the_peak_is_little_above_the_weights(name: str, config: dict[str, object]) -> None:
    case = next(case for case in CASES if case.name == name)
    measured = measure(msgspec.structs.replace(case, config=config), scale=1)
    assert measured.weight_bytes > 10**8
    assert 1 <= measured.ratio <= MAX_RATIO, measured
