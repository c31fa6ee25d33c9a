"""`aioengine generate --n`: several choices on one terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys

DEADLINE_S = 90


def test_choices_are_shown_one_after_the_other_each_under_its_number() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "aioengine", "generate", "Once upon a time", "--n", "3", "--seed", "1",
            "--max-tokens", "20", "--stats",
        ],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pattern = "".join(rf"--- choice {number} of 3\n(Once upon a time.*)\n" for number in (1, 2, 3))
    shown = re.fullmatch(pattern, done.stdout)
    assert shown is not None, done.stdout
    assert len(set(shown.groups())) == 3
    assert "output tokens: 60, ended by length × 3" in done.stderr
