"""A model's tokenizer: prompts to token ids, chats to prompts, and the table that turns output ids into text."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, overload

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.text.chat_input import check_messages, copy_messages, take_template_kwargs
from aioengine.text.chat_template import render_template
from aioengine.text.loading import NAMED_TOKENS, LoadedTokenizer, failures_as, load_tokenizer
from aioengine.text.template_files import DEFAULT, WITH_TOOLS
from aioengine.text.template_limits import TemplateLimits
from aioengine.text.token_table import TokenTable, WindowTable, build_slow_token_tables, build_token_tables, decoding
from aioengine.tool_calls.calls import read_tools, told_tools
from aioengine.validation import invalid, is_utf8, shorten
from aioengine.vllm_names import NOT_YET, Neutral, without_neutral

# A longer text goes through the library's batch call, which lets go of the GIL; the single call holds it throughout,
# and a prompt of a megabyte then stops every thread for more than a second. Up to here that is under a millisecond.
MAX_CHARS_HOLDING_GIL = 1000

_ONE_RESULT = "the result is a list of ids or a text"
NEUTRAL_OF_TEMPLATES = {
    "truncation": Neutral((None, False), "cut the ids yourself"),
    "documents": Neutral((None,), NOT_YET),
    **dict.fromkeys(("return_dict", "padding"), Neutral((None, False), _ONE_RESULT)),
    **dict.fromkeys(("return_tensors", "max_length"), Neutral((None,), _ONE_RESULT)),
}
"""Arguments of transformers' `apply_chat_template` that this one has not."""

TRIAL_TEXT = "Hello, 12 w\u00f6rlds! \u3042\n"
"""What a tokenizer panics at for any text it does for this one, when it is loaded."""


class Tokenizer:
    """The tokenizer of one model folder, with the names and defaults of transformers'.

    Any thread may call it, also while others do. Its methods hold an event loop for as long as they take; for long
    texts there are `Engine.tokenize` and `detokenize`.

    Attributes:
        backend: what is behind it: a `tokenizers.Tokenizer`, or transformers' own Python one where there is no other.
        chat_templates: the model's, Jinja texts by name.
        template_limits: of the time and the sizes of a chat's rendering.
    """

    def __init__(self, loaded: LoadedTokenizer) -> None:
        """Use `load` instead. Takes about 2 µs a vocabulary entry."""
        self._fast = loaded.backend
        self._slow = loaded.slow
        self._named_tokens = loaded.named_tokens
        self._chat_bos_id = loaded.chat_bos_id
        self.backend: Any = loaded.backend if loaded.backend is not None else loaded.slow
        self.chat_templates = loaded.chat_templates
        self.template_limits = TemplateLimits()
        if self._fast is not None:
            self._tables = build_token_tables(self._fast, max_ids=loaded.max_ids)
        else:
            self._tables = build_slow_token_tables(self._slow, max_ids=loaded.max_ids)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load from a local folder what AutoTokenizer would; takes 0.1 s to seconds: not on the event loop.

        Raises:
            ModelLoadError: there is no tokenizer, its files are damaged, or it panics at a plain text; the message
                names the file.
        """
        loaded = load_tokenizer(Path(folder))
        with failures_as(lambda problem: ModelLoadError(f"{folder}: the tokenizer does not work: {problem}")):
            try:
                tokenizer = cls(loaded)
            except ModelLoadError as error:
                raise ModelLoadError(f"{folder}: {error}") from error
            try:
                ids = tokenizer._encode(TRIAL_TEXT, add_special_tokens=True)
            except Exception:  # it may have no token for something that is in it
                ids = []
            tokenizer.decode([*ids, *range(2)])
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, by default with those that the model's tokenizer adds, such as a BOS.

        Raises:
            InvalidRequest: the text is not a string that UTF-8 can express, or the tokenizer fails at it: it has no
                token for something in it and none for the unknown, or its library panics.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt text must be a str, not {type(text).__name__}", param="prompt")
        try:
            with failures_as(_cannot_encode):
                return self._encode(text, add_special_tokens=add_special_tokens)
        except InvalidRequest as error:
            if is_utf8(text):
                raise
            raise InvalidRequest(
                "the prompt has a lone surrogate, which is no character and has no UTF-8 form; remove it",
                param="prompt",
            ) from error

    def encode_chat(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """The token ids of a rendered chat, whose template writes the special tokens.

        Args:
            add_special_tokens: as in `encode`. Absent: a BOS alone, where the model's GGUF file says that each text
                begins with one and the template has not written it.
        Raises:
            InvalidRequest: as `encode`.
        """
        ids, bos_id = self.encode(text, add_special_tokens=bool(add_special_tokens)), self._chat_bos_id
        if bos_id is None or add_special_tokens is not None or ids[:1] == [bos_id]:
            return ids
        return [bos_id, *ids]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._slow is not None:
            return list(self._slow.encode(text, add_special_tokens=add_special_tokens))
        if len(text) <= MAX_CHARS_HOLDING_GIL:
            encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids  # a new list; one more copy would hold the GIL for 10 ns an id
        return ids

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The sequences of ids that would write one of the words: each once, none empty.

        A word is encoded as it begins a text and as it follows a space, since most vocabularies have other tokens for
        the two; a word that has no tokens cannot be written. Takes as long as encoding the words twice.

        Raises:
            InvalidRequest: a word cannot be encoded.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, " " + bare):
                try:
                    ids = self.encode(text, add_special_tokens=False)
                except InvalidRequest as error:
                    problem = str(error) if is_utf8(word) else "a text with a lone surrogate"
                    raise InvalidRequest(
                        f"bad_words holds a word that cannot be encoded: {problem}", param="bad_words"
                    ) from error
                sequences[tuple(ids)] = None
        sequences.pop((), None)
        return tuple(sequences)

    def decode(self, token_ids: int | Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of one or more ids; special tokens are in it, unlike in outputs.

        Ids that the vocabulary does not have are left out.

        Raises:
            InvalidRequest: the tokenizer's library fails.
        """
        ids = [token_ids] if isinstance(token_ids, int) else [int(token_id) for token_id in token_ids]
        if self._fast is not None:
            return decoding(self._fast.decode)(ids, skip_special_tokens=skip_special_tokens)
        table = self.token_table(skip_special_tokens=skip_special_tokens)
        assert isinstance(table, WindowTable)
        return table.decode([i for i in ids if i < len(table.kinds)])

    def render_chat(self, messages: object, /, *, chat_template: str | None = None, **variables: Any) -> str:
        """The prompt text that the model's chat template makes of the messages, as `copy_messages` gives them.

        The first call of a process takes up to a second: not on the event loop. The keywords are those of
        `render_template`, as `take_template_kwargs` gives them; absent, ``add_generation_prompt`` is True.

        Args:
            chat_template: as in `find_template`.

        Raises:
            InvalidRequest: malformed messages, no template, or the template does not take these messages.
            ModelLoadError: the model's template does not parse.
        """
        checked = check_messages(messages)
        template = self.find_template(chat_template, has_tools=bool(variables.get("tools")))
        keywords = {"add_generation_prompt": True, **self._named_tokens, **variables}
        try:
            return render_template(template, checked, self.template_limits, **keywords)
        except InvalidRequest as error:
            if error.param != "chat_template" or template not in self.chat_templates.values():
                raise
            told = f"the model's {error.message}; give another (chat_template, --chat-template)"
            raise ModelLoadError(told) from error

    @property
    def chat_template(self) -> str | None:
        """The model's template for chats without tools; None where it has none. Setting it replaces all of them."""
        return self.chat_templates.get(DEFAULT)

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        self.chat_templates = {DEFAULT: template}

    def find_template(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """The template of a chat, as transformers takes it: by its name, or by whether there are tools.

        Args:
            chat_template: the name of one of the model's, or a Jinja text to use in place of them.
        Raises:
            InvalidRequest: there is none, or none of that name.
        """
        if chat_template is not None and not isinstance(chat_template, str):
            raise invalid("chat_template", f"chat_template={shorten(chat_template)}: a name or a Jinja text is needed")
        templates = self.chat_templates
        name = chat_template or (WITH_TOOLS if has_tools and WITH_TOOLS in templates else DEFAULT)
        if name in templates:
            return templates[name]
        if "{" in name:
            return name
        if not templates:
            raise InvalidRequest(
                "this model has no chat template: give the prompt as one text or as token ids, "
                "or put a chat_template.jinja into the model's folder",
                param="prompt" if chat_template is None else "chat_template",
            )
        told = f"this model has no chat template {shorten(name)}: give a Jinja text, or one of these names"
        raise invalid("chat_template", f"{told}: {', '.join(map(shorten, sorted(templates)))}")

    @overload
    def apply_chat_template(
        self, conversation: Any, *, tokenize: Literal[True] = ..., **variables: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(self, conversation: Any, *, tokenize: Literal[False], **variables: Any) -> str: ...

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        tools: Any = None,
        **variables: Any,
    ) -> list[int] | str:
        """The prompt of a chat, as `Engine.generate` makes it but for the default of ``add_generation_prompt``.

        The first call of a process takes up to a second.

        Args:
            tokenize: give token ids; else the text.
            add_generation_prompt: end with what begins an answer.
            chat_template: as in `find_template`.
            tools: as in `Engine.generate`.
            variables: for the template, among them ``continue_final_message``; as ``chat_template_kwargs``. Further
                arguments of transformers' are taken where they ask for nothing (``tools=None``).
        Raises:
            InvalidRequest: there is no template, or it does not take these messages.
        """
        variables = without_neutral(NEUTRAL_OF_TEMPLATES, variables, invalid)
        kwargs = {"add_generation_prompt": add_generation_prompt, **variables}
        taken = take_template_kwargs(kwargs, is_chat=True)
        told = list(told_tools(tools, read_tools(tools))) or None
        text = self.render_chat(copy_messages(conversation), chat_template=chat_template, tools=told, **taken)
        return self.encode_chat(text) if tokenize else text

    def get_vocab(self) -> dict[str, int]:
        """Each token's id."""
        return dict(self.backend.get_vocab())

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str | None]:
        """The tokens as the vocabulary writes them; None for an id that it has not."""
        name = getattr(self.backend, "id_to_token", None) or self.backend.convert_ids_to_tokens
        return [name(int(token_id)) for token_id in token_ids]

    def __len__(self) -> int:
        return self.vocab_size

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self

    def token_table(self, *, skip_special_tokens: bool = True) -> TokenTable | WindowTable:
        """What a detokenizer needs to give the texts of `decode`; made at loading, free here."""
        return self._tables.without_special if skip_special_tokens else self._tables.with_special

    def info(self) -> dict[str, Any]:
        """Its class, named tokens, vocabulary size and chat template, named as in tokenizer_config.json."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast" if self._slow is None else type(self._slow).__name__,
            "vocab_size": self.vocab_size,
            "chat_template": self.chat_template,
            **{name: self._named_tokens.get(name) for name in NAMED_TOKENS},
        }

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id. The model's vocabulary may be larger (padding) or have holes."""
        table = self._tables.with_special
        return len(table.pieces) if isinstance(table, TokenTable) else len(table.kinds)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Contents of the tokens that decoding may skip, by id."""
        if self._fast is None:
            ids = self._slow.all_special_ids
            return dict(zip(ids, self._slow.convert_ids_to_tokens(ids), strict=True))
        tokens = self._fast.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in tokens.items() if token.special}

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The ids of tokens that stand beside the vocabulary's own, special or not, by their contents."""
        if self._fast is None:
            return {content: token_id for token_id, content in self.special_tokens.items()}
        return {token.content: token_id for token_id, token in self._fast.get_added_tokens_decoder().items()}

    @cached_property
    def joined_special_tokens(self) -> dict[int, str]:
        """The special tokens' contents by id, for a detokenizer that puts nothing between them.

        Empty where that changes nothing, because the decoder puts nothing there either.
        """
        table, contents = self._tables.with_special, self.special_tokens
        if isinstance(table, TokenTable) and all(table.pieces[i] == text for i, text in contents.items()):
            return {}
        return contents

    @cached_property
    def bos_token_id(self) -> int | None:
        """None where there is none."""
        return self._named_id("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """The tokenizer's EOS. The list of ids at which generation ends is in generation_config.json, if anywhere."""
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        if token is None:
            return None
        to_id = self._slow.convert_tokens_to_ids if self._fast is None else self._fast.token_to_id
        token_id = to_id(token)
        return None if token_id is None else int(token_id)


def _cannot_encode(problem: str) -> InvalidRequest:
    return invalid("prompt", f"the model's tokenizer cannot encode this text: {problem}")
