"""`aioengine info`: what a model is, what it needs and what fits beside it, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from aioengine.cli.command import EXIT_FAILURE, add_flags, add_model_argument, open_console, read_flags
from aioengine.config import EngineConfig
from aioengine.validation import UNITS, parse_size

if TYPE_CHECKING:
    from aioengine.executor.model_info import ModelInfo

FIELDS = (
    *("model", "revision", "model_path", "trust_remote_code", "dtype", "quantization", "device", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "memory_utilization"),
    *("gpu_memory_utilization", "kv_cache_dtype"),
)
"""The fields of `EngineConfig` that the figures depend on."""


def _memory(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}", context, option) from None


@click.command()
@click.option(
    "--memory",
    metavar="SIZE",
    callback=_memory,
    help="of the device, such as 16GiB; absent: what this machine has available",
)
@click.option("--json", "is_json", is_flag=True, help="print all of it as JSON")
@add_flags(EngineConfig, only=FIELDS)
@add_model_argument
def info(memory: int | None, is_json: bool, **flags: Any) -> int:
    """Show MODEL's parameters, the path by which it runs, the sizes of weights and KV cache, and how much fits.

    MODEL is a folder, a GGUF file or a hub id that is in the cache; absent: the bundled one. No weights are read, nor
    need they be there: most of it follows from config.json. Nothing is downloaded. For --device cuda, a GPU that is not
    there, give its --memory. Where an engine would not start in so much memory the exit code is 1.
    """
    from aioengine.executor.model_info import read_model_info

    found = read_model_info(EngineConfig(**read_flags(EngineConfig, flags)), memory_bytes=memory)
    if is_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _show(found)
    if found.problem:
        click.echo(f"aioengine: no engine starts in {_size(found.memory_bytes)}: {found.problem}", err=True)
        return EXIT_FAILURE
    return 0


def _show(found: ModelInfo) -> None:
    from rich.table import Table

    console = open_console()
    parameters = f"{found.num_parameters:,}"
    if found.num_active_parameters < found.num_parameters:
        parameters += f", of which a token uses {found.num_active_parameters:,}"
    kept = f"{found.quantization} of {found.dtype}" if found.quantization else found.dtype
    files = "; ".join(
        f"{each.num_tensors:,} tensors of {each.format}, {_size(each.file_bytes)}" for each in found.formats
    )
    weights = "quantised: how many bytes they take is unknown without the files"
    if found.weight_bytes is not None:
        weights = f"{_size(found.weight_bytes)} in {kept} ({found.weight_bytes:,} bytes)"
    facts = {
        "architecture": found.architecture,
        "path": f"{found.path}: {found.why}",
        "parameters": parameters,
        "layers": f"{found.num_layers}",
        "longest sequence": f"{found.max_model_len:,} tokens",
        "files": files or "no weights are here: all of this is by the config alone",
        "weights": weights,
    }
    for group in found.kv_groups:
        if group.state_bytes:
            facts[f"state of {group.num_layers} layers"] = f"{group.state_bytes:,} bytes a sequence"
            continue
        seen = "all tokens" if group.window is None else f"the last {group.window:,} tokens"
        facts[f"KV of {group.num_layers} layers"] = f"{group.bytes_per_token:,} bytes a token, of {seen}"
    if found.kv_cache_bytes is not None:
        facts[f"of {_size(found.memory_bytes)} on a {'CPU' if found.device == 'cpu' else 'GPU'}"] = (
            f"{_size(found.kv_cache_bytes)} for the KV cache in {found.kv_cache_dtype}: {found.num_kv_blocks:,} blocks "
            f"of {found.block_size} tokens; the longest sequence that fits has {found.longest:,} tokens"
        )
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    if not found.fits:
        return
    fits = Table(title="What fits at once")
    for heading in ("tokens a sequence", "sequences", "tokens in all"):
        fits.add_column(heading, justify="right")
    for fit in found.fits:
        fits.add_row(f"{fit.num_tokens:,}", f"{fit.num_sequences:,}", f"{fit.num_tokens * fit.num_sequences:,}")
    console.print(fits)


def _size(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(UNITS))
    unit = UNITS[power - 1] + "iB" if power else "bytes"
    return f"{num_bytes / 2 ** (10 * power):.4g} {unit}"
