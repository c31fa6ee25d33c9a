"""Every field of a struct that a text can say has a flag, and what it cannot take is said with the flag's name."""

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec import Meta

from aioengine.cli.command import add_flags, read_flags
from aioengine.config import EngineConfig
from aioengine.sampling_params import SamplingParams


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A field of each kind."""

    size: Annotated[int, Meta(ge=1, description="how large")] = 5
    share: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    is_fast: Annotated[bool, Meta(description="or slow")] = False
    color: Literal["red", "green"] = "red"
    words: str | Annotated[tuple[Annotated[str, Meta(max_length=3)], ...], Meta(max_length=2, description="some")] = ()
    ids: Annotated[tuple[int, ...], Meta(description="numbers")] | None = None
    bias: Annotated[dict[Annotated[int, Meta(ge=0)], float], Meta(description="by id")] | None = None
    names: dict[str, int] | None = None
    hooks: tuple[Any, ...] = ()
    anything: Any = None


def run(*arguments: str) -> tuple[Result, dict[str, Any]]:
    """The outcome of a command with the flags of Settings, and what was given to it."""
    seen: dict[str, Any] = {}

    @click.command()
    @click.option("--other", default="x")
    @add_flags(Settings, absent="the usual, {}")
    def command(**flags: Any) -> None:
        seen.update(read_flags(Settings, flags))

    return CliRunner().invoke(command, arguments), seen


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {}),
        (("--size", "7", "--other", "y"), {"size": 7}),
        (("--share", "0.5"), {"share": 0.5}),
        (("--is-fast",), {"is_fast": True}),
        (("--no-is-fast",), {"is_fast": False}),
        (("--color", "green"), {"color": "green"}),
        (("--words", "a", "--words", "b c"), {"words": ("a", "b c")}),
        (("--ids", "1", "--ids", "-2"), {"ids": (1, -2)}),
        (("--bias", "50256=-100"), {"bias": {50256: -100.0}}),
        (("--bias", "5=0.5", "--bias", "7=1e1"), {"bias": {5: 0.5, 7: 10.0}}),
        (("--bias=5=1",), {"bias": {5: 1.0}}),
        (("--names", "a=1", "--names", "=2"), {"names": {"a": 1, "": 2}}),
    ],
    ids=str,
)
def test_a_flag_says_what_its_field_holds(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    result, seen = run(*arguments)
    assert result.exit_code == 0, result.output
    assert seen == expected
    assert Settings(**seen)


@pytest.mark.parametrize(
    ("arguments", "flag", "message"),
    [
        (("--size", "0"), "--size", "expected `int` >= 1"),
        (("--size", "many"), "--size", "not a valid integer"),
        (("--share", "nan"), "--share", "nan"),
        (("--color", "blue"), "--color", "none of the choices"),
        (("--words", "a", "--words", "long"), "--words", "length <= 3"),
        (("--words", "a") * 3, "--words", "at most 2"),
        (("--ids", "x"), "--ids", "not a valid integer"),
        (("--bias", "5"), "--bias", "'5' is not of the form INTEGER=FLOAT"),
        (("--bias", "x=1"), "--bias", "'x' is not a valid integer"),
        (("--bias", "5="), "--bias", "'' is not a valid float"),
        (("--bias", "5=1=2"), "--bias", "'1=2' is not a valid float"),
        (("--bias", "5=inf"), "--bias", "not a finite number"),
        (("--bias", "-5=1"), "--bias", "expected `int` >= 0"),
        (("--bias", "5=1", "--bias", "05=2"), "--bias", "5 is given twice"),
    ],
    ids=str,
)
def test_what_a_field_cannot_take_is_a_usage_error_that_names_the_flag(
    arguments: tuple[str, ...], flag: str, message: str
) -> None:
    result, seen = run(*arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}'" in result.output
    assert message in result.output
    assert seen == {}


@pytest.mark.parametrize("flag", ["--hooks", "--anything"])
def test_what_no_text_can_say_has_no_flag(flag: str) -> None:
    result, _ = run(flag, "1")
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_the_help_tells_forms_defaults_and_what_may_be_repeated() -> None:
    result, _ = run("--help")
    text = " ".join(result.output.split())
    assert "--size INTEGER how large [default: the usual, 5]" in text
    assert "--is-fast / --no-is-fast or slow [default: the usual, False]" in text
    assert "--words TEXT some (may be given more than once)" in text
    assert "--ids INTEGER numbers (may be given more than once)" in text
    assert "--bias INTEGER=FLOAT by id (may be given more than once)" in text
    assert "--names TEXT=INTEGER (may be given more than once)" in text


@pytest.mark.parametrize("struct_type", [SamplingParams, EngineConfig])
def test_every_field_but_those_of_this_process_has_a_flag_with_a_help_text(struct_type: type[msgspec.Struct]) -> None:
    @click.command()
    @add_flags(struct_type)
    def command(**_: Any) -> None: ...

    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    assert set(struct_type.__struct_fields__) - set(options) <= {
        "structured",  # has flags of its own: --json-schema and others
        "logits_processors",
        "extra_args",
    }
    assert all(option.help for option in options.values())


def test_a_chat_template_is_a_text_or_a_file_of_one(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages }}\n")
    assert read_flags(EngineConfig, {"chat_template": str(file)}) == {"chat_template": "{{ messages }}\n"}
    assert read_flags(EngineConfig, {"chat_template": "{{ messages }}"}) == {"chat_template": "{{ messages }}"}
    for missing in (str(tmp_path / "none.jinja"), str(tmp_path)):
        with pytest.raises(click.UsageError, match=r"--chat-template .* no file that can be read"):
            read_flags(EngineConfig, {"chat_template": missing})
