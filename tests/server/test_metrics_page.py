"""The table in docs/metrics.md is what the exposition says of itself."""

from __future__ import annotations

from pathlib import Path

from aioengine.server.metrics import describe_series

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_series_is_in_the_table_as_it_is() -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert table == [
        f"| `{name}` | {kind} | {documentation} | {note} |" for name, kind, documentation, note in describe_series()
    ]
