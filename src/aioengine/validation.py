"""Checking the fields of a struct when it is made: msgspec validates what it decodes, not what is constructed."""

from __future__ import annotations

import difflib
import functools
import importlib
import math
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sized
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec
import numpy as np
from msgspec import inspect

from aioengine.errors import ConfigError, InvalidRequest

T = TypeVar("T")
if TYPE_CHECKING:

    class Bytes(Generic[T]):
        """The type of a field that takes a number of bytes, or a text that `parse_size` reads, and holds the number."""

        def __get__(self, instance: object, owner: object = None) -> T: ...
        def __set__(self, instance: object, value: T | str) -> None: ...

else:
    Bytes = Annotated[T, None]

COLLECTIONS = (list, tuple, set, frozenset, dict)
SIZED = (str, bytes, bytearray, *COLLECTIONS)
MAX_SHOWN_CHARS = 60
MAX_SHOWN_ITEMS = 8
MAX_SHOWN_ITEMS_CHARS = 240
MAX_SHOWN_BITS = 128
MAX_NAME_CHARS = 100
"""Limit of an unknown keyword that is compared with the known ones: comparing takes the product of the lengths."""


class _Rule(NamedTuple):
    """The checks of a field, read from its annotation once.

    Attributes:
        default: an object that needs no check.
        max_chars, max_items: of a text or a collection; inf without a limit, and where the field takes none.
        choices: the allowed values; empty: any.
        takes_items: whether it may be a collection.
        is_looked_through: whether it may hold floats or texts, and nothing but plain types.
    """

    name: str
    hint: Any
    default: Any
    max_chars: float
    max_items: float
    choices: list[Any]
    takes_items: bool
    is_looked_through: bool


def invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=name)


@functools.cache
def field_types(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    """The resolved annotation of each field, with its ``msgspec.Meta`` bounds."""
    hints = get_type_hints(struct_type, include_extras=True)
    return {name: hints[name] for name in struct_type.__struct_fields__}


def check_fields(struct: msgspec.Struct, error: Callable[[str, str], Exception]) -> None:
    """Check each field against its annotation and bounds, and normalise it.

    An int for a float becomes a float, a list for a tuple a tuple, numpy's scalars and one-dimensional arrays what
    they hold, a subclass of ``str`` a ``str``. No float may be infinite or NaN, also inside collections. What is too
    long is refused by its length, before anything looks at what it holds. A default is taken as it is.

    Args:
        struct: a frozen struct, in its ``__post_init__``.
        error: makes the exception from (field name, message).
    Raises:
        what ``error`` makes, for the first field that is wrong.
    """
    for name, rule in _rules(type(struct)).items():
        value = getattr(struct, name)
        if value is rule.default:
            continue
        checked = _checked(value, rule, error)
        if checked is not value:
            msgspec.structs.force_setattr(struct, name, checked)


def check_field(
    struct_type: type[msgspec.Struct], name: str, value: Any, error: Callable[[str, str], Exception]
) -> Any:
    """Check one field, as `check_fields`, for a value that is not in a struct yet; returns it normalised.

    Raises:
        what ``error`` makes from (field name, message).
    """
    return _checked(value, _rules(struct_type)[name], error)


def check_known_fields(
    struct_type: type[msgspec.Struct], names: Iterable[str], error: Callable[[str, str], Exception]
) -> None:
    """Refuse keywords that ``struct_type`` does not have, with the nearest name that it does.

    Raises:
        what ``error`` makes from (name, message), for the first unknown name.
    """
    known = struct_type.__struct_fields__
    for name in names:
        if name not in known:
            advice = [ELSEWHERE[one] for one in (name, *OTHER_NAMES.get(name, ())) if one in ELSEWHERE]
            near = "" if name in ELSEWHERE else nearest(name, known)
            hint = near or f"; {advice[0] if advice else 'known: ' + ', '.join(known)}"
            raise error(name, f"unknown parameter {shorten(name)}{hint}")


_NAMES_OF_OTHERS = {
    "max_tokens max_output_tokens": "max_new_tokens max_completion_tokens max_length max_gen_len num_predict n_predict",
    "min_tokens": "min_new_tokens min_length",
    "repetition_penalty": "repeat_penalty rep_pen",
    "stop": "stop_sequences stop_strings stop_words",
    "stop_token_ids": "eos_token_id eos_token_ids",
    "n": "num_return_sequences num_completions best_of",
    "temperature": "temp do_sample",
    "seed": "random_seed manual_seed",
    "structured response_format": "response_format json_schema output_schema format grammar guided_json guided_regex "
    "guided_choice guided_grammar",
    "max_model_len": "n_ctx num_ctx ctx_size context_length context_size max_seq_len max_seq_length",
    "device": "device_map n_gpu_layers num_gpu main_gpu",
    "dtype": "torch_dtype precision",
    "quantization": "load_in_4bit load_in_8bit quantization_config",
    "num_threads": "n_threads num_thread threads",
    "max_num_batched_tokens": "n_batch num_batch",
    "max_num_seqs": "max_batch_size n_parallel num_parallel",
    "model": "model_name model_id pretrained_model_name_or_path",
    "gpu_memory_utilization": "mem_fraction_static gpu_memory_fraction",
}
OTHER_NAMES = {name: ours.split() for ours, names in _NAMES_OF_OTHERS.items() for name in names.split()}
"""Names that other libraries have for a parameter, with ours: the one counts that is known where it is given."""
OF_REQUESTS = "it is of a request: give it to generate, stream or chat, or in SamplingParams"
ELSEWHERE = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "max_tokens", "stop", "n", "structured"), OF_REQUESTS),
    "tools": "they are of a request: give them to LLM.chat, or to Engine's generate or stream",
    "max_model_len": "it is of the engine: give max_model_len to Engine or LLM",
    "do_sample": "temperature=0 is greedy, any other temperature draws",
    "output_type": "it is for generate(prompt, output_type=...), whose output has it in .parsed",
    "streamer": "write `async with engine.stream(...) as stream:`, or without asyncio `for delta in llm.stream(...)`",
    "verbose": "set the level of the logger 'aioengine'",
}
"""Names that are unknown where they are given, with what to do instead."""


OR_ELSE = {"quantization": "; that of a checkpoint is read from its files: leave quantization out"}
"""Hints behind a refusal of a field's value."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that may have been meant, to be put behind a message; empty if none comes near."""
    near = [ours for ours in OTHER_NAMES.get(name, ()) if ours in known]
    if not near and len(name) <= MAX_NAME_CHARS:
        near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


UNITS = "KMGT"
SIZE = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,15}})?)\s*([{UNITS}]?)(i?B|)", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that a person writes as 4GiB, 4G (both 4·2³⁰), 512MB (512·10⁶) or a plain number.

    Raises:
        ValueError: it is no size; the message shows the form.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise _Refused("it is no size: give bytes as a number, or with a unit, such as 4GiB, 512MB or 2G")
    number, unit, of_ten = found[1], found[2].upper(), found[3].upper() == "B"
    return int(Decimal(number) * (1000 if of_ten else 1024) ** (UNITS.index(unit) + 1 if unit else 0))


IMPORT_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
"""A pattern of what users name by its place, ``module:attribute``, for a process that has it not at hand."""


def import_path_of(value: Any) -> str:
    """Where a class or a function is found again.

    Raises:
        ConfigError: it is local to a function.
    """
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', repr(value))}"
    if re.fullmatch(IMPORT_PATH, path) is None:
        raise ConfigError(f"{path} cannot be found by its name: define it at the top of a module")
    return path


def load_by_path(path: str, setting: str) -> Any:
    """Import the value at ``module:attribute``; ``setting`` names the setting in the error.

    Raises:
        ConfigError: there is no such thing, or its module cannot be imported.
    """
    module, _, attribute = path.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # a module of the user's own may raise anything
        raise ConfigError(
            f"{setting}={path!r} cannot be imported in the engine's process: {type(error).__name__}: {error}"
        ) from error


class _ShortRepr(reprlib.Repr):
    """Python's own, but that what is long is shown by its length, and whatever raises by its type."""

    def repr1(self, x: Any, level: int) -> str:
        kind = type(x).__name__
        try:
            if isinstance(x, int) and x.bit_length() > MAX_SHOWN_BITS:  # Python refuses to print very long ones
                return f"<{kind} of {x.bit_length()} bits>"
            limit = MAX_SHOWN_CHARS if isinstance(x, str | bytes | bytearray) else MAX_SHOWN_ITEMS
            if isinstance(x, Sized) and (len(x) > limit or (level <= 0 and isinstance(x, COLLECTIONS))):
                return f"<{kind} of {len(x)}>"
            text = super().repr1(x, level) if isinstance(x, COLLECTIONS) else repr(x)
        except Exception:  # a class of the caller's own may raise anything, and so does an array without a dimension
            return f"<{kind}>"
        limit = MAX_SHOWN_ITEMS_CHARS if isinstance(x, COLLECTIONS) else MAX_SHOWN_CHARS
        return text if len(text) <= limit else text[: limit - 3] + "..."


def shorten(value: object) -> str:
    """A value as a message can show it: on one line, not long, whatever the value is."""
    return _short_repr.repr(value)


_short_repr = _ShortRepr()
_short_repr.maxlevel = 2


def typed(value: object) -> str:
    """The name of a value's type, with its article: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


# Checking one value


class _Refused(ValueError):
    """A value is refused for a reason that msgspec does not check."""


def _checked(value: Any, rule: _Rule, error: Callable[[str, str], Exception]) -> Any:
    try:
        return _check(value, rule)
    except (msgspec.ValidationError, _Refused) as exc:
        choices = f"; choose one of {', '.join(map(repr, rule.choices))}" if rule.choices else ""
        message = _in_python(str(exc), value) + choices + OR_ELSE.get(rule.name, "")
        raise error(rule.name, f"{rule.name}={shorten(value)}: {message}") from None


def _check(value: Any, rule: _Rule) -> Any:
    """The value as its field holds it.

    Raises:
        msgspec.ValidationError, _Refused
    """
    value = _plain(value)
    if isinstance(value, str) and rule.name.endswith("_bytes"):
        value = parse_size(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # no message between processes holds more
        raise _Refused("a signed 64-bit integer is needed")
    if isinstance(value, SIZED) or (isinstance(value, np.ndarray) and value.ndim == 1):
        limit, unit = (rule.max_chars, "characters") if isinstance(value, str) else (rule.max_items, "items")
        if len(value) > limit:
            raise _Refused(f"it has {len(value):,} {unit}, and at most {limit:,} are allowed; give fewer")
    if isinstance(value, np.ndarray) and value.ndim == 1 and rule.takes_items:
        value = value.tolist()
    try:
        checked = _convert(value, rule)
    except msgspec.ValidationError as exc:
        if "got `numpy." not in str(exc):
            raise
        if isinstance(value, dict):
            value = {_plain(key): _plain(item) for key, item in value.items()}
        elif isinstance(value, list | tuple | set | frozenset):
            value = [*map(_plain, value)]
        checked = _convert(value, rule)
    return _look_through(checked) if rule.is_looked_through else checked


def _convert(value: Any, rule: _Rule) -> Any:
    try:
        return msgspec.convert(value, rule.hint, strict=True)
    except msgspec.ValidationError:
        raise
    except Exception as exc:  # a mapping of the caller's own class may raise anything
        raise _Refused(f"it cannot be read: {type(exc).__name__}") from None


def _plain(item: Any) -> Any:
    return item.item() if isinstance(item, np.generic) else item


def _look_through(value: Any) -> Any:
    """The value with texts of the exact type ``str``; a subclass may be anything, an Enum's member for one.

    Raises:
        _Refused: it holds a float that is no finite number; NaN passes every comparison that a bound makes.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _Refused(f"{value} is not a finite number; give one")
        return value
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if isinstance(value, tuple | list):
        return type(value)(map(_look_through, value))
    if isinstance(value, dict):
        return {_look_through(key): _look_through(item) for key, item in value.items()}
    return value


# Reading annotations


@functools.cache
def _rules(struct_type: type[msgspec.Struct]) -> dict[str, _Rule]:
    described: Any = inspect.type_info(struct_type)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct_type)}
    hints, rules = field_types(struct_type), {}
    for field in described.fields:
        kinds = list(_alternatives(field.type))
        collections = [kind for kind in kinds if isinstance(kind, inspect.CollectionType | inspect.DictType)]
        leaves = set(map(type, _alternatives(field.type, inside=True)))
        has_texts_or_floats = not leaves.isdisjoint({inspect.FloatType, inspect.StrType})
        rules[field.name] = _Rule(
            name=field.name,
            hint=hints[field.name],
            default=defaults[field.name],
            max_chars=_max_length([kind for kind in kinds if isinstance(kind, inspect.StrType)]),
            max_items=_max_length(collections),
            choices=[value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values],
            takes_items=bool(collections),
            is_looked_through=has_texts_or_floats and inspect.AnyType not in leaves,
        )
    return rules


def _max_length(kinds: list[Any]) -> float:
    return max((math.inf if kind.max_length is None else kind.max_length for kind in kinds), default=math.inf)


def _alternatives(kind: inspect.Type, *, inside: bool = False) -> Iterator[inspect.Type]:
    """Each type that a value may have; with ``inside``, the types of items in place of those of collections."""
    match kind:
        case inspect.Metadata():
            members = [kind.type]
        case inspect.UnionType():
            members = [*kind.types]
        case inspect.CollectionType() if inside:
            members = [kind.item_type]
        case inspect.DictType() if inside:
            members = [kind.key_type, kind.value_type]
        case _:
            yield kind
            return
    for member in members:
        yield from _alternatives(member, inside=inside)


# Messages


def _in_python(message: str, value: Any) -> str:
    """Translate a message of msgspec's from JSON's words to Python's: ``Expected `array`, got `null` - at `$[0]` ``."""
    if message.startswith("Invalid enum value"):  # and all of the value, however long
        return "none of the choices"
    for json_name, name in (("null", "None"), ("array", "list"), ("object", "dict")):
        message = re.sub(rf"(?<=[` ]){json_name}(?=[` ])", name, message)
    name = "None" if value is None else type(value).__name__
    message = re.sub(r"got `[^`]*`$", lambda _: f"got `{name}`", message)
    message = re.sub(r" - at `\$\[(\d+)\]`", r" (item \1)", message)
    message = message.replace(" - at `key` in `$`", " (a key)").replace(" - at `$[...]`", " (a value)")
    return message[0].lower() + message[1:]


def is_utf8(text: str) -> bool:
    """Whether a text has a UTF-8 form; an unpaired surrogate has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
