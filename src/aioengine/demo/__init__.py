"""The bundled demo model: a tiny Llama that tells little stories and chats about a closed world.

`model_path` is all that the engine needs. `aioengine.demo.train` makes the model from nothing and
`aioengine.demo.evaluate` measures it; importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The folder of the bundled model: config, tokenizer, safetensors and its card, as a Hugging Face folder."""
    return Path(__file__).parent / "model"
