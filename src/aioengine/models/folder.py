"""The place of a model's files, and the content of its small JSON files. Needs no torch."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.models.formats.gguf_families import config_of, generation_config_of
from aioengine.models.formats.gguf_file import SHARD_NAME, GgufFile, all_shards
from aioengine.models.no_model import check_begin, why_incomplete
from aioengine.sampling_params import SamplingParams
from aioengine.validation import shorten

DEMO_MODEL = Path(__file__).parent / "demo"
"""The folder of the bundled model: config, tokenizer, safetensors and its card."""

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
SAFE_FILES = ("*.safetensors",)
PICKLED_FILES = ("pytorch_model*.bin",)
"""Downloaded where there are none of the others: many repositories have both."""

WEIGHT_FILES = (*SAFE_FILES, *PICKLED_FILES)
GGUF_SUFFIX = ".gguf"
MAX_JSON_BYTES = 32 * 2**20
"""The most bytes of a JSON file that is read here: four times the largest index."""

MAX_LABELS = 2**16
"""The most labels of a classifier, ``num_labels`` in config.json: transformers makes a dict of them."""

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine, in the layout that transformers saves, or in a GGUF file.

    Attributes:
        path: the folder, or the GGUF file.
        config: config.json, or what it would be.
        generation_config: generation_config.json; empty where there is none.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @classmethod
    def resolve(
        cls,
        model: str | None,
        *,
        revision: str | None = None,
        with_weights: bool = True,
        with_code: bool = False,
        may_download: bool = True,
    ) -> ModelFolder:
        """Find ``model``, downloading it where it is a hub id and the cache lacks files. Blocks: not for an event loop.

        Without a network (or with ``HF_HUB_OFFLINE=1``) the hub's cache on this machine is used as it is.

        Args:
            model: a folder, a GGUF file, a hub id (``org/name``, or ``org/name:model.gguf`` for a file of it), or None
                for the bundled demo model.
            revision: branch, tag or commit; for a hub id only.
            with_weights: False leaves the weights where they are, for ``load_format="dummy"``.
            with_code: the modules that come with it, too.
            may_download: False takes what is here alone.
        Raises:
            ModelLoadError: it is nowhere to be found, or its JSON is missing or broken.
        """
        patterns = [*SMALL_FILES, *(SAFE_FILES if with_weights else ()), *(("*.py",) if with_code else ())]
        return cls.read(_locate(model, revision, patterns, may_download))

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """The model in an existing folder, or in a GGUF file.

        A folder whose only weights are a GGUF file stands for that file.

        Raises:
            ModelLoadError: config.json is missing, or a JSON file is broken, or one of the files is no regular one; or
                as `GgufFile.read`.
        """
        file = find_gguf(path)
        if file is not None:
            header = GgufFile.read(file)
            return cls(path=file, config=config_of(header), generation_config=generation_config_of(header))
        check_files(path)
        if not (path / "config.json").is_file():
            why = why_incomplete(
                path,
                f"{path} is not a model that transformers saved. Of a hub model in GGUF files give the name of one, as "
                "org/name:model.gguf",
            )
            raise ModelLoadError(f"{path / 'config.json'} is missing: {why}")
        generation_config = path / "generation_config.json"
        return cls(
            path=path,
            config=read_config(path),
            generation_config=read_json(generation_config) if generation_config.is_file() else {},
        )

    def source_of(self, name: str) -> Path:
        """Where the content of a JSON file comes from, for messages."""
        return self.path if is_gguf(self.path) else self.path / name

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: generation_config.json's, else config.json's, and the tokenizer's EOS.

        A folder's tokenizer often names the end of a turn, and its configs the end of a text. Reads files: not on the
        event loop.

        Raises:
            ModelLoadError: they are not token ids.
        """
        name, value = "generation_config.json", self.generation_config.get("eos_token_id")
        if value is None:
            name, value = "config.json", self.config.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if len(ids) > 1024 or not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
            raise ModelLoadError(
                f"{self.source_of(name)}: eos_token_id={shorten(value)} is neither a token id nor a list of them"
            )
        of_tokenizer = None if is_gguf(self.path) else tokenizer_eos_id(self.path)
        num_tokens = self.config.get("vocab_size")
        if of_tokenizer is not None and (type(num_tokens) is not int or of_tokenizer < num_tokens):
            ids = [*ids, of_tokenizer]
        return tuple(dict.fromkeys(ids))

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that generation_config.json has, too.

        ``do_sample`` is not read: transformers leaves it false in most files, also in those of models that are
        not meant to be greedy.

        Raises:
            ModelLoadError: a value is out of its range.
        """
        given = {
            key: self.generation_config[key] for key in SAMPLING_KEYS if self.generation_config.get(key) is not None
        }
        try:
            params = SamplingParams(**given)
        except InvalidRequest as error:
            raise ModelLoadError(f"{self.source_of('generation_config.json')}: {error}") from None
        return {key: getattr(params, key) for key in given}


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, as `find_gguf` gives it, and of no folder."""
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that is the model: ``path``, or the only one in a folder without other weights; else None.

    Raises:
        ModelLoadError: it is no regular file, or there are several models.
    """
    if is_gguf(path):
        _check_file(path, None)
        return path
    if not path.is_dir() or any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
        return None
    parts = {file: SHARD_NAME.fullmatch(file.name) for file in path.glob(f"*{GGUF_SUFFIX}")}
    # A projector of images stands beside some models.
    files = sorted(file for file, part in parts.items() if not part or int(part["number"]) == 1)
    files = [file for file in files if not file.name.startswith("mmproj")]
    if len(files) > 1:
        raise ModelLoadError(f"{path} has {len(files)} models: give one of its files, such as {files[0]}")
    return find_gguf(files[0]) if files else None


def has_weights(path: Path) -> bool:
    """Whether there are files of weights in a folder, of whatever format; a GGUF file has some."""
    return path.is_file() or any(
        file.suffix in (".safetensors", ".bin", ".pt", ".pth", GGUF_SUFFIX) for file in path.iterdir()
    )


def check_files(folder: Path) -> None:
    """See that a model's files can be read to their end: a pipe or a device in place of one would block for ever.

    Links are followed: in the hub's cache every file is one.

    Raises:
        ModelLoadError: one is no regular file, or is larger than any such file.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror or error}") from error
    for path in paths:
        if any(path.match(pattern) for pattern in SMALL_FILES):
            _check_file(path, 256 * 2**20)  # ten times the largest tokenizer.json
        elif any(path.match(pattern) for pattern in WEIGHT_FILES):
            _check_file(path, None)


def _check_file(path: Path, max_bytes: int | None) -> None:
    try:
        status = path.stat()
    except OSError as error:  # also a link to nothing, or to itself
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        raise ModelLoadError(f"{path} is no regular file, but a {kinds.get(stat.S_IFMT(status.st_mode), 'device')}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelLoadError(f"{path} has {status.st_size} bytes; at most {max_bytes} are read")
    check_begin(path)


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, with the quantization_config that early GPTQ tools wrote into a file of its own.

    Raises:
        ModelLoadError: as `read_json`.
    """
    config, beside = read_json(folder / "config.json"), folder / "quantize_config.json"
    if "quantization_config" in config or not beside.is_file():
        return config
    return {**config, "quantization_config": {"quant_method": "gptq", **read_json(beside)}}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelLoadError: the file cannot be read, is too large or too deep, or holds something else.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path} has more than {MAX_JSON_BYTES} bytes, which no such file has")
        content = json.loads(path.read_bytes())
        json.dumps(content, ensure_ascii=False).encode()  # of a lone surrogate no message could be printed
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise ModelLoadError(f"{path} has a lone surrogate, which is no character") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path} is not JSON of a model: its lists and objects are too deep") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(content).__name__}; an object is needed")
    return content


def _locate(model: str | None, revision: str | None, patterns: list[str], may_download: bool) -> Path:
    if model is None:
        return DEMO_MODEL
    path = Path(model).expanduser()
    if model == DEMO_MODEL.name and not path.exists():
        return DEMO_MODEL
    if path.exists():
        if revision is not None:
            raise ModelLoadError(f"revision={revision!r} is for hub models, and {path} is here")
        if not path.is_dir() and not is_gguf(path):
            raise ModelLoadError(
                f"{path} is a file; give the folder that holds config.json and the weights, or a .gguf file"
            )
        return path
    name, _, file = model.partition(":")
    if path.is_absolute() or model.startswith((".", "~")) or name.count("/") > 1 or is_gguf(Path(name)):
        raise ModelLoadError(f"there is no {'file' if is_gguf(path) else 'folder'} {path}")
    if file and not is_gguf(Path(file)):
        raise ModelLoadError(f"{model!r}: a file of a hub model must be a .gguf")
    if file:
        return _from_hub(name, revision, [str(all_shards(Path(file)))], may_download) / file
    folder = _from_hub(name, revision, patterns, may_download)
    if set(SAFE_FILES) <= set(patterns) and not any(next(folder.glob(pattern), None) for pattern in SAFE_FILES):
        folder = _from_hub(name, revision, [*patterns, *PICKLED_FILES], may_download)
    return folder


def _from_hub(model: str, revision: str | None, patterns: list[str], may_download: bool) -> Path:
    """The folder of a snapshot that has the files of these patterns."""
    import huggingface_hub
    from huggingface_hub import constants

    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["original/*", "consolidated*"],  # the same weights again, in their author's own layout
            local_files_only=not may_download,
        )
    # The hub's client raises its own errors, those of its HTTP library, ValueError and OSError; all mean the same here.
    except Exception as error:
        wanted = model if revision is None else f"{model} at revision {revision}"
        why = "it could not be downloaded: check the name and the network, log in for a gated model, or give a folder"
        why = f"{why}. The hub's client reports: {' '.join(str(error).split()) or repr(error)}"
        if not may_download:
            get = f"hf download {model}" + (f" --revision {revision}" if revision is not None else "")
            why = f"nothing is downloaded for this: `{get}` brings it there"
        elif constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE forbids to ask the hub: check the name, unset that, or give the path of a folder"
        raise ModelLoadError(
            f"{wanted!r} is neither a folder here nor in the hub's cache ({constants.HF_HUB_CACHE}), and {why}"
        ) from error
    return Path(folder)


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Token(msgspec.Struct):
    content: str = ""
    id: TokenId = 0


class _File(msgspec.Struct):
    """The parts of a tokenizer's files that are read."""

    eos_token: str | _Token | None = None
    added_tokens: list[_Token] = []
    added_tokens_decoder: dict[TokenId, _Token] = {}


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of ``eos_token`` in tokenizer_config.json; None if the files name none, or it is no added token of theirs.

    Damaged files count as missing: the tokenizer that is loaded from them reports what is wrong. Takes some 0.1 s for a
    tokenizer.json of 30 MB.
    """
    content, ids = None, dict[str, int]()
    for name in ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json"):  # the last one counts most
        try:
            file = msgspec.json.decode((folder / name).read_bytes(), type=_File)
        except (OSError, ValueError, RecursionError):
            continue
        content = (file.eos_token.content if isinstance(file.eos_token, _Token) else file.eos_token) or content
        ids |= {token.content: token.id for token in file.added_tokens}
        ids |= {token.content: token_id for token_id, token in file.added_tokens_decoder.items()}
    return ids.get(content) if content else None
