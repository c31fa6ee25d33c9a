"""A model of the LM evaluation harness (lm_eval) that runs on this engine, by the name ``aioengine``.

    python -m aioengine.integrations.lm_eval run --model aioengine --model_args pretrained=FOLDER --tasks ...

is the harness's own command with this model in its list; in a program importing this module is enough. Contexts,
continuations, windows and stop strings follow the harness's ``hf`` model, whose numbers these equal where both have the
same ``max_length``: by default this one's is a token less.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aioengine.blocking.llm import LLM
from aioengine.errors import ConfigError, InvalidRequest
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError("the evaluation harness is not installed: pip install 'aioengine[lm_eval]'") from error

logger = logging.getLogger("aioengine")

TOKENS_AT_ONCE = 2**18
"""Tokens of the prompts whose outputs are held together; each with its log-probability takes some 350 bytes. The
engine's own batches are far smaller."""

DEFAULT_DEVICE = "cuda:0"
"""The harness's command gives this where the user gave none, on every machine."""

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""The texts of context and continuation, for the harness's cache, and their tokens."""


@register_model("aioengine")
class EngineLM(TemplateLM):  # type: ignore[misc]
    """The harness's view of an `LLM`. The engine makes the batches; the harness's ``batch_size`` has no meaning.

    Args:
        pretrained: as ``model`` of `LLM`.
        max_length: tokens of context and continuation together; absent: all that the engine takes, one less than the
            model's own length.
        max_gen_toks: of an answer where a task does not say.
        add_bos_token: whether texts are encoded with the tokenizer's special tokens; absent: as the tokenizer does.
        prefix_token_id: what an empty context is replaced by; absent: BOS, or EOS where there is none.
        chat_template_args: variables for the chat template.
        device: as of `LLM`; ``cuda:0`` is taken for the engine's own choice.
        config: other arguments of `LLM`, such as ``dtype``, ``quantization`` or ``max_num_seqs``.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        if device not in (None, DEFAULT_DEVICE):
            config["device"] = device
        self.llm = LLM(pretrained, **config)
        self.tokenizer = self.llm.get_tokenizer()
        longest = self.llm._host.engine.info.max_model_len - 1  # a prompt leaves room for a token of output
        if max_length is not None and not 1 <= max_length <= longest:
            raise ConfigError(
                f"max_length={max_length}: 1 to {longest} is needed, for a max_model_len of {longest + 1}"
            )
        self.max_length = max_length or longest
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._template_args = dict(chat_template_args or {})

    # What the harness asks of a tokenizer

    @property
    def eot_token_id(self) -> int:
        token_id = self.tokenizer.eos_token_id
        if token_id is None:
            raise ConfigError("this model's tokenizer has no EOS token; give prefix_token_id")
        return int(token_id)

    @property
    def prefix_token_id(self) -> int:
        chosen = self._prefix_token_id if self._prefix_token_id is not None else self.tokenizer.bos_token_id
        return self.eot_token_id if chosen is None else int(chosen)

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.engine_config.model or "demo").replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template_args,
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        if add_special_tokens is None:  # a text that begins with a BOS gets no second one
            has_prefix = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = not has_prefix and self._add_bos_token is not False
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    # Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Each continuation's log-likelihood, and whether greedy sampling would have given it."""
        windows = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        num_cut = sum(len(window) < len(one[1]) + len(one[2]) for window, one in zip(windows, requests, strict=True))
        if num_cut:
            logger.warning("%d contexts are cut from the left, to max_length=%d", num_cut, self.max_length)
        calls = []
        for window, (_, _, continuation) in zip(windows, requests, strict=True):
            if not 1 <= len(continuation) < len(window):
                raise InvalidRequest(
                    f"a continuation of {len(continuation)} tokens cannot be scored: 1 to max_length="
                    f"{self.max_length} are needed, after one of context at least",
                    param="continuation",
                )
            # The last token is not computed: its probability is the output's. One token alone leaves the prompt free to
            # come from the prefix cache, as the other answers to a question do.
            calls.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=1,
                    detokenize=False,
                    logprobs=0,
                    logprob_token_ids=[window[-1]],
                    prompt_logprobs=0 if len(continuation) > 1 else None,
                )
            )
        answers = []
        prompts = [window[:-1] for window in windows]
        for number, output in self._generate(prompts, calls, disable_tqdm):
            texts, _, continuation = requests[number]
            answers.append(_score(windows[number], len(continuation), output))
            if texts is not None:  # a window of a rolling one has none
                self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Each text's log-likelihood, token by token after as much context as fits."""
        scored: list[Scored] = []
        ends = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            scored += [(None, *make_disjoint_window(window)) for window in windows]
            ends.append(len(scored))
        scores = self._loglikelihood_tokens(scored, disable_tqdm=disable_tqdm)
        totals = [sum(score for score, _ in scores[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (request.args[0],), total)
        return totals

    # Generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each context's answer, without the stop string that ended it."""
        prompts, calls, all_until = [], [], []
        for request in requests:
            context, given = request.args
            sampling: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until = [text for text in sampling.pop("until") if text]
            max_tokens = sampling.pop("max_gen_toks")
            if not max_tokens < self.max_length:
                raise InvalidRequest(
                    f"max_gen_toks={max_tokens} leaves no room for a context in max_length={self.max_length}",
                    param="max_gen_toks",
                )
            prompts.append(self.tok_encode(context)[-(self.max_length - max_tokens) :])
            calls.append(self._params_of(sampling, until, max_tokens))
            all_until.append(until)
        answers = []
        for number, output in self._generate(prompts, calls, disable_tqdm):
            answers.append(postprocess_generated_text(output.text, all_until[number], None))
            self.cache_hook.add_partial("generate_until", requests[number].args, answers[-1])
        return answers

    def _params_of(self, sampling: dict[str, Any], until: list[str], max_tokens: int) -> SamplingParams:
        """How an answer is sampled. A stop string that is a special token is in no text, and stops as a token."""
        if not sampling.pop("do_sample"):
            sampling["temperature"] = 0.0
        if sampling.get("num_beams") == 1:
            del sampling["num_beams"]
        special = {}
        for text in until:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1 and not self.tokenizer.decode(ids, skip_special_tokens=True):
                special[text] = ids[0]
        return SamplingParams(
            max_tokens=max_tokens,
            stop=[text for text in until if text not in special],
            stop_token_ids=[self.eot_token_id, *special.values()],
            **{"temperature": 0.0, **sampling},
        )

    def _generate(
        self, prompts: list[list[int]], calls: list[SamplingParams], disable_tqdm: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """The outputs in order, with their numbers; held for `TOKENS_AT_ONCE` together."""
        begin = 0
        while begin < len(prompts):
            end, num_tokens = begin + 1, len(prompts[begin])
            while end < len(prompts) and num_tokens + len(prompts[end]) <= TOKENS_AT_ONCE:
                num_tokens += len(prompts[end])
                end += 1
            outputs = self.llm.generate(prompts[begin:end], calls[begin:end], use_tqdm=not disable_tqdm)
            yield from enumerate(outputs, begin)
            begin = end


def _score(window: list[int], num_scored: int, output: RequestOutput) -> tuple[float, bool]:
    """The log-probability of the window's last tokens, and whether each was the likeliest.

    Args:
        output: of the window without its last token.
    """
    last = (output.outputs[0].logprobs or [])[-1]
    lines = [*(output.prompt_logprobs or [None] * (len(window) - 1)), last][-num_scored:]
    entries = [line[token_id] for token_id, line in zip(window[-num_scored:], lines, strict=True) if line is not None]
    assert len(entries) == num_scored
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
