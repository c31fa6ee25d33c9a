"""What type checkers see: public names that are there, keywords with the names and types that the structs have."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from test_readme import PAGES, programs_of

import aioengine
import aioengine.server
from aioengine.config import ConfigKeywords, EngineConfig
from aioengine.frontend.call_options import OF_SOME_CALLS, CallKeywords, CallOptions
from aioengine.sampling_params import SamplingKeywords, SamplingParams
from aioengine.validation import field_types
from aioengine.vllm_names import NEUTRAL_PARAMS

ROOT = Path(__file__).parents[1]

PROGRAM = """
import asyncio
from dataclasses import dataclass
from typing import Literal
from aioengine import LLM, Choice, Engine, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from aioengine.server import HttpLimits, ServerConfig

@dataclass
class Message:
    role: str
    content: str

async def main() -> None:
    async with Engine(max_model_len=64, cuda_graphs="off", seed=1) as engine:
        task = asyncio.create_task(engine.generate("x", SamplingParams(stop=["a"]), "id"))
        text: str = (await task).text + (await engine.generate("x", max_tokens=3)).text
        await engine.generate({"prompt": text}, sampling_params=SamplingParams())
        ids: list[int] = (await engine.get_tokenizer()).apply_chat_template([])
        await engine.generate([Message("user", "hi")])
        await engine.generate(3)  # wrong
        await engine.generate(ids, max_tokns=3)  # wrong
        await engine.generate(ids, max_tokens="3")  # wrong
        engine.stream(ids, max_tokns=3)  # wrong
        async for _ in engine.generate(ids):  # wrong
            pass
        number: int = (await engine.generate("x", output_type=int)).parsed
        words: list[str] = (await engine.generate("x", output_type=list[str])).parsed
        plain: RequestOutput = await engine.generate("x", structured=Choice(["a", "b"]))
        literal = await engine.generate("x", output_type=Literal["a", "b"])
        outputs: list[RequestOutput] = [plain, literal, await engine.generate("x", output_type=int)]
        text = (await engine.generate("x", output_type=int)).parsed  # wrong
    Engine(kv_cache_memory_bytes="4GiB")
    size: int | None = EngineConfig(kv_cache_memory_bytes="4GiB").kv_cache_memory_bytes
    number = ServerConfig(max_body_bytes="16MiB", max_stored_response_bytes="1G").max_stored_response_bytes
    number = HttpLimits(max_header_bytes="32K", max_url_bytes=8192).max_header_bytes
    EngineConfig(kv_cache_memory_bytes=4.5)  # wrong
    HttpLimits(max_url_bytes=None)  # wrong
    numbers: list[int] = [output.parsed for output in LLM().generate(["x"], output_type=int)]
    Engine(max_model_ln=3)  # wrong
    await Engine.start(max_model_ln=3)  # wrong
    LLM(max_model_ln=3)  # wrong
    LLMEngine(max_model_ln=3)  # wrong
    LLM().generate("x", max_tokns=3)  # wrong
    LLM().chat([], max_tokns=3)  # wrong
    SamplingParams(max_tokns=3)  # wrong
    SamplingParams().clone(max_tokns=3)  # wrong
"""


def members(hint: Any) -> set[Any]:
    """The types of a union, without bounds; a tuple may be given as a list."""
    if get_origin(hint) is Annotated:
        return members(hint.__origin__)
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*map(members, get_args(hint)))
    if get_origin(hint) in (tuple, dict):
        bare = tuple(argument if argument is ... else next(iter(members(argument))) for argument in get_args(hint))
        whole = get_origin(hint)[bare]
        return {whole, list[bare[0]]} if get_origin(hint) is tuple else {whole}  # type: ignore[valid-type]
    return {("Literal", get_args(hint))} if get_origin(hint) is Literal else {hint}


@pytest.mark.parametrize("package", [aioengine, aioengine.server], ids=["aioengine", "server"])
def test_every_public_name_can_be_imported(package: types.ModuleType) -> None:
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = package.no_such_name


@pytest.mark.parametrize(
    ("keywords", "struct", "others"),
    [
        (SamplingKeywords, SamplingParams, set()),
        (ConfigKeywords, EngineConfig, {"model"}),
        (CallKeywords, CallOptions, set(OF_SOME_CALLS)),
    ],
)
def test_keywords_are_the_fields_of_the_struct(keywords: Any, struct: type[msgspec.Struct], others: set[str]) -> None:
    expected = {name: members(hint) for name, hint in field_types(struct).items() if name not in others}
    if struct is SamplingParams:
        for name in NEUTRAL_PARAMS.keys() & expected.keys():
            expected[name].add(type(None))
        expected["structured"] = {Any}  # any type that has a schema, among others
    elif struct is CallOptions:
        kwargs, headers = {Mapping[str, Any], type(None)}, {Mapping[str, str], type(None)}
        expected |= {"chat_template_kwargs": kwargs, "trace_headers": headers}
    else:
        expected["scheduler"].add(type)
        for name in expected:
            if name.endswith("_bytes"):
                expected[name].add(str)  # as people write sizes
    own = {name: hint for name, hint in get_type_hints(keywords).items() if name in keywords.__annotations__}
    if struct is CallOptions:
        own = {name: hint for name, hint in own.items() if name not in SamplingKeywords.__annotations__}
    assert {name: members(hint) for name, hint in own.items()} == expected


@pytest.mark.nightly
def test_a_misspelt_keyword_fails_the_type_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("MYPYPATH", str(Path(aioengine.__file__).parents[1]))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    told = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert told == wrong, done.stdout + done.stderr


@pytest.mark.nightly
def test_the_programs_of_the_pages_pass_the_type_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those in which others' clients are given plain dicts, and vLLM's neutral arguments."""
    for page in PAGES:
        for number, program in enumerate(programs_of(page)):
            if not any(other in program for other in ("openai", "anthropic", "tensor_parallel_size")):
                (tmp_path / f"{page.stem.replace('-', '_')}_{number}.py").write_text(program)
    monkeypatch.setenv("MYPYPATH", str(Path(aioengine.__file__).parents[1]))
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--ignore-missing-imports", "--no-pretty", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert not [line for line in done.stdout.splitlines() if ": error: " in line], done.stdout
    assert "Success" in done.stdout


def test_a_notebook_completes_all_keywords_of_a_call() -> None:
    own = (aioengine.Engine.generate, aioengine.Engine.stream)
    for call in (*own, aioengine.LLM.generate, aioengine.LLM.chat, aioengine.LLMEngine.add_request):
        assert {"tools", "tenant", "max_tokens", "seed", "priority"} <= inspect.signature(call).parameters.keys()
    for made in (aioengine.Engine, aioengine.Engine.start, aioengine.LLM, aioengine.LLMEngine):
        assert {"process", "replicas", "max_model_len"} <= inspect.signature(made).parameters.keys()
