"""Pages outside of docs/ become pages of the site; links between all of them hold there as they do in a checkout."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/gpu/README.md": "benchmarks-gpu.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages of the checkout by their path, and their names in the site."""

LINK = re.compile(r"\[([^\]]*)\]\(((?!\w+:)[^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the checkout to those of docs/."""
    for path, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site; a link to a file that is no page becomes its text."""
    folder = Path(page.file.abs_src_path).parent
    site_folder = os.path.dirname(page.file.src_uri) or "."

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], os.path.normpath(folder / match[2]), match[3] or ""
        path = os.path.relpath(target, ROOT)
        name = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if name is None or not os.path.isfile(target):
            return text
        return f"[{text}]({os.path.relpath(name, site_folder)}{anchor})"

    return LINK.sub(link, markdown)
