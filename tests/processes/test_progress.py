"""The bar while a model loads, in a notebook without ipywidgets."""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

import pytest

from aioengine.processes.progress import loading_bar


def test_a_notebook_shows_a_line_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(data: dict[str, str], **_: Any) -> Any:
        shown.append(data["text/plain"])
        return types.SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    with loading_bar("loading fox", is_shown=True) as show:
        assert show is not None
        for done in range(0, 2001):
            show(done * 1000, 2_000_000)
        show(3, 3, "graphs")
    first, *lines, last = shown
    assert (first, last) == ("loading fox", "")
    assert len(lines) < 100, "an eye follows five a second"
    assert lines[-2:] == [f"loading fox {'█' * 40} 2.0 MB/2.0 MB", f"graphs {'█' * 40} 3/3"]
    assert "░" in lines[0]
