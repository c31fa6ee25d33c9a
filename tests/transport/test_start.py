"""Engines that start in processes of their own, or fail and report the reason. Real processes."""

import hmac
import os
import re
import shutil
from pathlib import Path

import pytest
from nightly import nightly

from aioengine import Engine, ProcessOptions
from aioengine.errors import AioEngineError, ConfigError, EngineDead, ModelLoadError
from aioengine.models.folder import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("no_stray_process", "runtime", "quiet_log")

DEVICE = "transport.life_scripts.devices"


async def test_a_child_that_is_turned_away_logs_the_reason_and_ends(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: False)  # as if the token were another one
    with pytest.raises(EngineDead, match=r"EngineDead: this engine was turned away: the token is another one"):
        await Engine.start(process=ProcessOptions(executor=f"{DEVICE}:told"))
    assert os.listdir(runtime) == []


# Last words


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [
        ("not_loading", ModelLoadError, "shard 3 of 7 is damaged"),
        *nightly(("raising", EngineDead, "ZeroDivisionError: no device to divide by")),
        *nightly(("exiting", EngineDead, r"engine 0 \(pid \d+\) exited with code 3.*")),
        ("speaking", EngineDead, r"engine 0 \(pid \d+\) exited with code 1; its last words: the driver is too old .*"),
        ("crashing", EngineDead, r"engine 0 .* was killed by SIGSEGV; its last words: Fatal Python error: Segm.*"),
        *nightly(
            (
                "cramped",
                ConfigError,
                "the KV cache has 2 blocks of 16 tokens, and one sequence of max_model_len=2048 may need 128: .*",
            )
        ),
        ("not_there", ConfigError, f"executor='{DEVICE}:not_there' cannot be imported .* has no attribute 'not_there'"),
    ],
)
async def test_a_child_that_cannot_start_says_why(
    device: str, error: type[AioEngineError], said: str, runtime: Path
) -> None:
    with pytest.raises(error) as caught:
        await Engine.start(process=ProcessOptions(executor=f"{DEVICE}:{device}"))
    assert type(caught.value) is error
    assert re.fullmatch(said, str(caught.value)), str(caught.value)
    assert os.listdir(runtime) == []


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("transport.life_scripts.bad_plugin", "ValueError: this plugin was made for another version"),
        *nightly(("no_such_plugin", "ModuleNotFoundError: No module named 'no_such_plugin'")),
    ],
)
async def test_a_plugin_that_cannot_be_imported(plugin: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await Engine.start(process=ProcessOptions(executor=f"{DEVICE}:told", plugins=(plugin,)))
    assert str(caught.value) == f"{plugin} cannot be imported in the engine's process: {said}"


@pytest.fixture
def model_without_weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


async def test_a_folder_without_a_model_is_found_out_before_there_is_a_child(tmp_path: Path, runtime: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no folder .*/nothing"):
        await Engine.start(tmp_path / "nothing", process=True)
    assert os.listdir(runtime) == []


@pytest.mark.nightly
async def test_what_torch_finds_wrong_in_the_child_is_told_here(model_without_weights: Path, runtime: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"safetensors"):
        await Engine.start(model_without_weights, process=True)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes"):
        await Engine.start(process=True, kv_cache_memory_bytes=1)
    assert not [name for name in os.listdir(runtime) if name.startswith("aioengine")]  # torch has its own there
