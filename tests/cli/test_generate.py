"""The command as a user runs it: a process of its own, real signals, real pipes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import DEADLINE_S, CallMain, Terminal, run, shell

import aioengine


@pytest.mark.nightly
def test_the_same_seed_tells_the_same_story_as_text_and_in_json_with_what_no_text_would_show() -> None:
    arguments = ("generate", "Once upon a time", "--seed", "1", "--max-tokens", "40")
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > len("Once upon a time") + 40
    assert "KV cache" in done.stderr
    assert "blocks of 16 tokens" in done.stderr
    output = json.loads(run(*arguments, "--logprobs", "2", "--json").stdout)
    assert done.stdout == f"Once upon a time{output['outputs'][0]['text']}\n"
    assert len(output["outputs"][0]["logprobs"]) == output["metrics"]["num_generation_tokens"] == 40


def test_a_model_that_ends_at_once_is_said_to() -> None:
    done = run("generate", "What is 8 + 7?", "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, "What is 8 + 7?\n")
    assert "the model ended at once" in done.stderr


@pytest.mark.nightly
def test_choices_are_shown_one_after_the_other_each_under_its_number() -> None:
    done = run("generate", "Once upon a time", "--n", "3", "--seed", "1", "--max-tokens", "20", "--stats")
    assert done.returncode == 0, done.stderr
    pattern = "".join(rf"--- choice {number} of 3\n(Once upon a time.*)\n" for number in (1, 2, 3))
    shown = re.fullmatch(pattern, done.stdout)
    assert shown is not None, done.stdout
    assert len(set(shown.groups())) == 3
    assert "output tokens: 60, ended by length × 3" in done.stderr


def test_a_start_imports_no_large_package_but_torch() -> None:
    heavy = {
        "transformers", "huggingface_hub", "sympy", "torch._dynamo", "torch._inductor", "triton", "jinja2", "rich",
        "prompt_toolkit", "aiohttp", "starlette", "uvicorn",
    }  # fmt: skip
    code = (
        "import sys; from aioengine.cli.commands import cli\n"
        "cli(['generate', 'Once', '--max-tokens', '3'], standalone_mode=False)\n"
        f"sys.exit(' '.join({heavy} & set(sys.modules)) or 'torch' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_runs_without_its_standard_files(closed: str) -> None:
    code = f"exec {sys.executable} -m aioengine generate Once --max-tokens 3 {closed}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once") == (">&-" not in closed.split())


@pytest.mark.nightly
def test_a_prompt_can_come_from_stdin_and_a_chat_answers_without_echo() -> None:
    done = run("generate", "-", "--chat", "--temperature", "0", "--stats", stdin="Hello!")
    assert done.returncode == 0, done.stderr
    assert "Hello!<|im" not in done.stdout
    assert done.stdout.strip()
    assert "ended by stop" in done.stderr
    assert "tokens/s" in done.stderr


ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "owl"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.mark.nightly
def test_a_text_has_the_shape_that_was_asked_for_and_is_shown_alone(tmp_path: Path) -> None:
    schema = json.dumps(ANIMAL)
    file = tmp_path / "schema.json"
    file.write_text(schema)
    for given, stdin in ((schema, ""), (str(file), ""), ("-", schema)):
        done = run("generate", "An animal:", "--json-schema", given, "--seed", "1", stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["kind"] in ("fox", "owl")
    done = run("generate", "An animal:", "--regex", "(fox|owl){2}", "--seed", "1")
    assert re.fullmatch("(fox|owl){2}\n", done.stdout), done.stderr
    done = run("generate", "-", "--chat", "--choice", "a fox", "--choice", "an owl", stdin="An animal!")
    assert done.stdout in ("a fox\n", "an owl\n"), done.stderr


def test_a_shape_that_cannot_be_is_said(call_main: CallMain, tmp_path: Path) -> None:
    for args, says in (
        (["--json-schema", "{"], "no JSON object"),
        (["--json-schema", str(tmp_path / "none.json")], "No such file"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice are several shapes"),
        (["--regex", ""], "structured"),
        (["--regex", "(", "--model", "none/such"], "unclosed group"),
        (["--json-schema", '{"type": "array", "uniqueItems": true}'], "uniqueItems"),
    ):
        code, _, stderr = call_main("generate", "x", *args)
        assert code == 2, stderr
        assert says in stderr
        assert "Traceback" not in stderr
    code, _, stderr = call_main("generate", "-", "--json-schema", "-")
    assert (code, "stdin holds one thing" in stderr) == (2, True)
    code, _, stderr = call_main("generate", "x", "--regex", "[ab]{50}", "--max-tokens", "5")
    assert (code, "the answer was cut" in stderr) == (2, True)


def test_a_model_is_named_by_an_argument_or_an_option(call_main: CallMain, tmp_path: Path) -> None:
    model = str(tmp_path / "none")
    for arguments in (
        *(("generate", model, "x"), ("generate", "--model", model, "x"), ("generate", model, "x", "--model", model)),
        *(("chat", model), ("chat", "--model", model), ("info", model), ("info", "--model", model)),
        *(("bench", "latency", model), ("bench", "throughput", "--model", model), ("serve", model, "--port", "0")),
    ):
        code, _, stderr = call_main(*arguments)
        assert (code, model in stderr) == (1, True), (arguments, stderr)
    for arguments in (("generate", "a", "x"), ("chat", "a"), ("info", "a"), ("bench", "latency", "a")):
        code, _, stderr = call_main(*arguments, "--model", "b")
        assert (code, "names the model 'a', and --model 'b'" in stderr) == (2, True), stderr
    code, _, stderr = call_main("generate", "Once", "upon", "a", "time")
    assert (code, "in quotes" in stderr) == (2, True)
    code, _, stderr = call_main("generate", "Once", "upon")
    assert (code, "'Once'" in stderr, "a word of the PROMPT?" in stderr) == (1, True, True), stderr
    code, _, stderr = call_main("generate", str(tmp_path), "upon")
    assert (code, str(tmp_path) in stderr, "a word of the PROMPT?" in stderr) == (1, True, False), stderr


def test_another_library_s_name_of_a_flag_is_answered_with_ours(call_main: CallMain) -> None:
    for arguments, ours in (
        (("serve", "--n-ctx", "5"), "--max-model-len"),
        (("generate", "x", "--num-predict", "5"), "--max-tokens"),
        (("serve", "--hots", "x"), "--host"),
    ):
        code, _, stderr = call_main(*arguments)
        assert (code, ours in stderr) == (2, True), stderr


def test_ctrl_c_during_the_imports_ends_a_command_quietly() -> None:
    for module in ("signal", "click", "aioengine.config", "msgspec"):
        program = f"""
import os, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Interrupt())
from aioengine.cli import main
main()
"""
        done = subprocess.run(
            [sys.executable, "-c", program, "info"], capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", ""), module


@pytest.mark.nightly
def test_ctrl_c_ends_it_quietly_with_the_shells_code(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("generate", "Once upon a time", "--ignore-eos", "--max-model-len", "1000")
    terminal.wait_for("Once upon a time.{20}")  # it is generating by now
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ends() == 130, terminal.shown
    assert "Traceback" not in terminal.shown
    assert "Warning" not in terminal.shown


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("generate", "x", "--temperature", "3"), 2, "temperature=3.0: expected `float` <= 2.0"),
        (("generate", "x", "--top-k", "many"), 2, "Invalid value for '--top-k'"),
        (("generate", "x", "--max-num-batched-tokens", "1"), 2, "raise the first or lower the second"),
        (("generate", ""), 2, "the prompt is empty"),
        (
            ("generate", "x", "--dtype", "fp16"),
            2,
            "'fp16': none of the choices; choose one of 'auto', 'bfloat16', 'float16', 'float32'",
        ),
        (("generate", "x", "--model", "/nowhere/at/all"), 1, "/nowhere/at/all"),
        (("generate", "x", "--kv-cache-memory-bytes", "10"), 2, "bytes"),
        (("nonsense",), 2, "No such command"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_an_error_is_one_readable_line_and_a_code(
    call_main: CallMain, args: tuple[str, ...], code: int, says: str
) -> None:
    ended, stdout, stderr = call_main(*args)
    assert ended == code, stderr
    assert says in stderr
    assert "Traceback" not in stderr
    assert not stdout


@pytest.mark.nightly
def test_a_closed_pipe_is_no_accident() -> None:
    done = shell("aioengine generate 'Once upon a time' --ignore-eos --max-tokens 200 | head -c 5")
    assert done.stdout == "Once "
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.nightly
def test_what_cannot_be_written_or_read_is_one_line_too() -> None:
    done = shell("aioengine generate x --max-tokens 3 > /dev/full")
    assert (done.returncode, "No space left" in done.stderr, "Traceback" in done.stderr) == (1, True, False)
    done = run("generate", "-", stdin=b"abc\xff")
    assert (done.returncode, "prompt is not UTF-8" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


@pytest.mark.nightly
def test_an_emoji_goes_in_and_out_whatever_the_locale_is() -> None:
    done = run("generate", "🙂 hi", "--max-tokens", "3", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert "hi" in done.stdout


def test_the_version_is_the_packages(call_main: CallMain) -> None:
    assert aioengine.__version__ in call_main("--version")[1]


def test_a_local_folder_without_a_tokenizer_says_what_to_do(call_main: CallMain, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 64,
        "max_position_embeddings": 64, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, stderr = call_main("generate", "hello", "--model", str(tmp_path), "--load-format", "dummy")
    assert code == 2, stderr
    assert "no tokenizer; give the prompt as token ids" in stderr


@pytest.mark.parametrize(
    "flags",
    [["--logprobs", "2"], ["--logprobs-mode", "raw"], ["--prompt-logprobs", "1"], ["--no-detokenize"]],
    ids=" ".join,
)
def test_what_a_text_cannot_show_is_refused_before_the_model_is_loaded(call_main: CallMain, flags: list[str]) -> None:
    code, _, stderr = call_main("generate", "Once", *flags)
    assert code == 2
    assert "--json" in stderr
    assert "weights" not in stderr
