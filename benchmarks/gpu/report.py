"""RESULTS.md and results.json: every row of the table, measured or not."""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.gpu.rows import NEEDS_GPU, ROWS, Bounds, KernelResult, Result, Row, is_met

REPOSITORY = Path(__file__).parents[2]
NOT_RUN = "not run"
JSON, MARKDOWN = "results.json", "RESULTS.md"
UNKNOWN = "unknown"
CHANGED = ", and changes that are not committed"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Of what the results are."""

    device: str
    is_tiny: bool
    gpu: str
    driver: str
    versions: dict[str, str]
    commit: str
    date: str

    def is_same_setup(self, other: About) -> bool:
        """Whether results of both may stand together: not where a commit does not say what was measured."""
        if self.commit == UNKNOWN or self.commit.endswith(CHANGED):
            return False
        return msgspec.structs.replace(self, date="") == msgspec.structs.replace(other, date="")


class Results(msgspec.Struct, kw_only=True):
    """What results.json holds.

    Attributes:
        results: by row.
        failed: why a part ended early, by part: what its missing rows say.
    """

    about: About
    bounds: Bounds | None = None
    results: dict[str, Result] = {}
    kernels: list[KernelResult] = []
    failed: dict[str, str] = {}


def about(device: str, is_tiny: bool) -> About:
    """Raises nothing: what cannot be found out is called unknown."""
    gpu, driver = _gpu() if device == "cuda" else (f"none; a CPU, {platform.machine()}", "none")
    return About(
        device=device,
        is_tiny=is_tiny,
        gpu=gpu,
        driver=driver,
        versions={"python": platform.python_version(), **{n: _version(n) for n in ("torch", "triton", "transformers")}},
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _gpu() -> tuple[str, str]:
    shown = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    name, _, rest = (shown.splitlines() or ["unknown"])[0].partition(",")
    memory, _, driver = rest.partition(",")
    return f"{name.strip()}, {memory.strip() or 'unknown memory'}", driver.strip() or "unknown"


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short=12", "HEAD") or UNKNOWN
    # What this writes itself is no change of what was measured.
    changed = _output("git", "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/gpu/*results*")
    changed = "\n".join(line for line in changed.splitlines() if not line.endswith((MARKDOWN, JSON)))
    return commit + CHANGED if changed else commit


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else ""


def load(folder: Path) -> Results | None:
    """What an earlier run left; None: nothing, or nothing that can be read."""
    try:
        return msgspec.json.decode((folder / JSON).read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError):
        return None


def save(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    (folder / MARKDOWN).write_text(markdown(results))


def markdown(results: Results) -> str:
    about = results.about
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    lines = [
        "# What the GPU path reaches: `python -m benchmarks.gpu`",
        "",
        f"GPU: {about.gpu}. Driver: {about.driver}. Versions: {versions}. Commit: {about.commit}. {about.date}.",
        "",
        "Random weights; medians; bounds are measured in the same run. A row that does not say *measured* was not.",
        *_not_a_gpu(about),
        "",
        *_bounds_table(results.bounds),
        "",
        "| workload | aim | | value | bound | ratio | reached | beside it |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(row, results) for row in ROWS),
        "",
        "## Kernels",
        "",
        *_kernel_table(results),
    ]
    return "\n".join(lines) + "\n"


def _not_a_gpu(about: About) -> Iterable[str]:
    if about.device != "cuda":
        yield ""
        yield "**This ran on a CPU, with tiny shapes: the command runs to its end. Nothing here is measured.**"
    elif about.is_tiny:
        yield ""
        yield "**This ran with tiny shapes, which are not those of the table: no row is measured.**"


def _line(row: Row, results: Results) -> str:
    result = results.results.get(row.key)
    cells = [row.workload, row.aim]
    if result is None:
        reason = results.failed.get(row.part) or NOT_RUN
        cells += [f"not measured: {reason}", "", "", "", "", ""]
    elif result.value is None:
        ran = "; its code ran on the CPU" if result.device != "cuda" and result.reason == NEEDS_GPU else ""
        cells += [f"not measured: {result.reason}{ran}", "", "", "", "", _details(result)]
    elif results.about.is_tiny:
        reason = f"{NEEDS_GPU}; ran on a CPU, tiny" if result.device != "cuda" else "tiny shapes"
        cells += [
            f"not measured: {reason}",
            "",
            "",
            "",
            "",
            f"{result.device}: {_value(result)}; {_details(result)}",
        ]
    else:
        bound = f"{figure(result.bound)}, {result.bound_of}" if result.bound is not None else ""
        ratio = figure(result.ratio) if result.ratio is not None else ""
        met = {True: "met", False: "**missed**", None: ""}[is_met(result)]
        cells += ["measured", _value(result), bound, ratio, met, _details(result)]
    return "| " + " | ".join(cells) + " |"


def _value(result: Result) -> str:
    assert result.value is not None
    return f"{figure(result.value)} {result.unit}".strip()


def _details(result: Result) -> str:
    return ", ".join(
        f"{name}: {each if isinstance(each, str) else figure(each)}" for name, each in result.details.items()
    )


def figure(value: float) -> str:
    """Three digits, or all of a whole number."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _bounds_table(bounds: Bounds | None) -> list[str]:
    if bounds is None:
        return ["Bounds: not measured."]
    mark = "" if bounds.device == "cuda" else " (a CPU's, tiny)"
    return [
        f"Copy bandwidth{mark}: {figure(bounds.copy_bytes_per_s / 1e9)} GB/s, read and written. "
        f"Matrix rate{mark}, {bounds.matrix_dtype}: {figure(bounds.matrix_flops / 1e12)} TFLOP/s.",
    ]


def _kernel_table(results: Results) -> list[str]:
    lines = [
        "A call's time against that of its bytes or operations at the rates above, with a cold cache.",
        "",
        "| kernel | size | | µs | bound, µs | of | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results.kernels:
        cells = [f"`{each.name}`", each.size]
        if each.median_us is None or each.bound_us is None or each.ratio is None:
            cells += [f"not measured: {each.reason}".replace("|", "/"), "", "", "", ""]
        elif results.about.is_tiny:
            reason = f"{NEEDS_GPU}; its oracle ran on a CPU" if each.device != "cuda" else "tiny shapes"
            cells += [f"not measured: {reason}", "", "", "", ""]
        else:
            cells += ["measured", figure(each.median_us), figure(each.bound_us), each.bound_of, figure(each.ratio)]
        lines.append("| " + " | ".join(cells) + " |")
    if not results.kernels:
        lines.append(f"| all | | not measured: {results.failed.get('kernels') or NOT_RUN} | | | | |")
    return lines
