"""`LLM`: prompts in, outputs out, in order; what fails ends the rest; what is shown meanwhile."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np
import pytest
from blocking.conftest import ENDLESS, press_ctrl_c
from openai.types.chat import ChatCompletionMessage
from rich.progress import Progress

from aioengine import (
    LLM,
    Engine,
    EngineClosed,
    InvalidRequest,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StepFailed,
    Stream,
)

IDS = [5, 6, 7]
CHAT = [{"role": "user", "content": "Hello"}]

Open = Callable[..., LLM]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# What comes out


def test_outputs_come_in_the_order_of_the_prompts(open_llm: Open) -> None:
    llm = open_llm(max_num_seqs=4)
    prompts = [[5, 6, number] for number in range(40)]
    params = [SamplingParams(seed=number, max_tokens=1 + (number * 7) % 11) for number in range(40)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(ids) for ids in token_ids(outputs)] == [1 + (number * 7) % 11 for number in range(40)]
    assert all(output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 40


@pytest.mark.parametrize(
    "prompts",
    [
        *("Once upon a time", IDS, tuple(IDS), np.array(IDS), [np.int64(5), np.int64(6)]),
        *({"prompt": "Once upon a time"}, {"prompt_token_ids": IDS}, CHAT),
    ],
    ids=repr,
)
def test_one_prompt_brings_a_list_of_one(open_llm: Open, prompts: Any) -> None:
    llm = open_llm()
    [alone] = llm.generate(prompts, seed=1, max_tokens=4)
    one, two = llm.generate([prompts, prompts], seed=1, max_tokens=4)
    assert token_ids([alone]) == token_ids([one]) == token_ids([two])


def test_it_is_not_copied(open_llm: Open) -> None:
    llm = open_llm()
    for copied in (copy.copy, copy.deepcopy, lambda one: one.__reduce_ex__(2)):
        with pytest.raises(TypeError, match="LLM cannot be copied"):
            copied(llm)


def test_a_chat_is_one_conversation_or_several_and_no_prompts_bring_no_outputs(open_llm: Open) -> None:
    llm = open_llm()
    assert llm.generate([], show_progress=True) == llm.chat([]) == []
    [alone] = llm.chat(CHAT, SamplingParams(seed=1, max_tokens=4))
    one, two = llm.chat([CHAT, CHAT], seed=1, max_tokens=4)
    assert token_ids([alone]) == token_ids([one]) == token_ids([two])
    objects = [ChatCompletionMessage.model_construct(**message) for message in CHAT]
    assert token_ids(llm.chat(objects, seed=1, max_tokens=4)) == token_ids([one])
    assert token_ids(llm.chat([objects, CHAT], seed=1, max_tokens=4)) == token_ids([one, two])
    assert "Hello" in (alone.prompt or "")


def test_a_chat_goes_on_with_its_last_message(open_llm: Open) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "A fox and"}]
    llm = open_llm()
    [begun] = llm.chat(chat, max_tokens=1)
    [continued] = llm.chat(chat, max_tokens=1, add_generation_prompt=False, continue_final_message=True)
    [named] = llm.chat(chat, max_tokens=1, continue_final_message=True, chat_template_kwargs={"enable_thinking": False})
    assert begun.prompt != continued.prompt == named.prompt
    assert (continued.prompt or "").endswith("A fox and")
    with pytest.raises(InvalidRequest, match="give one of them"):
        llm.chat(chat, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="a mapping"):
        llm.chat(chat, continue_final_message=True, chat_template_kwargs=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(CHAT, chat_template_kwargs={"tools": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_script_of_vllms_runs_as_it_stands(device: Any) -> None:
    llm = LLM(executor=device, tensor_parallel_size=1, trust_remote_code=False, swap_space=4, seed=0, quantization=None)
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4, stop=None, structured_outputs=None, best_of=1)
    one, two = llm.generate([prompt, {"prompt_token_ids": tokenizer.encode(prompt)}], params, lora_request=None)
    assert one.prompt_token_ids == two.prompt_token_ids
    assert tokenizer.decode(one.outputs[0].token_ids, skip_special_tokens=True) == one.outputs[0].text
    [chatted] = llm.chat(CHAT, params, use_tqdm=False, chat_template=None, tools=None, lora_request=None)
    assert chatted.prompt == prompt
    with pytest.raises(InvalidRequest, match="unknown parameter 'max_tokns'"):
        llm.generate(prompt, params, max_tokns=3)
    for name in ("request_id", "params", "max_unread_tokens"):
        with pytest.raises(InvalidRequest, match=f"unknown parameter '{name}'"):
            llm.chat(CHAT, **{name: None})
    llm.close()


def test_choices_and_salts_and_keywords_reach_the_engine(open_llm: Open) -> None:
    llm = open_llm()
    prompt = list(range(100, 140))
    assert len(llm.generate(prompt, n=3, max_tokens=2)[0].outputs) == 3
    cached = [llm.generate(prompt, max_tokens=1, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "a", "b")]
    assert cached == [0, 32, 0]


def test_smaller_priorities_go_first(open_llm: Open, device: Any) -> None:
    llm = open_llm(device, max_num_seqs=1, max_waiting=1)
    params = [SamplingParams(seed=seed, max_tokens=2) for seed in range(6)]
    llm.generate([IDS] * 6, params, priority=[5, 4, 3, 2, 1, 0])
    assert device.seeds() == [5, 4, 3, 2, 1, 0]


def test_many_prompts_are_never_all_in_the_engine(open_llm: Open, device: Any) -> None:
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))

    device.on_sample = count
    llm = open_llm(device, max_num_seqs=8, max_waiting=8)
    outputs = llm.generate([[5, 6, 7 + number] for number in range(2000)], max_tokens=1)
    assert [output.prompt_token_ids[-1] for output in outputs] == list(range(7, 2007))
    assert most < 8 + 8 + 5


# What is refused, and what fails


@pytest.mark.parametrize(
    ("param", "call"),
    [
        ("sampling_params", {"sampling_params": [SamplingParams()]}),
        ("priority", {"priority": [1, 2, 3]}),
        ("params", {"sampling_params": {"max_tokens": 3}}),
        ("params", {"sampling_params": SamplingParams(), "max_tokens": 3}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_token", {"max_token": 3}),
        ("priority", {"priority": [0, "high"]}),
    ],
)
def test_a_bad_argument_is_refused(open_llm: Open, param: str, call: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_llm().generate([IDS, IDS], **call)
    assert caught.value.param == param


@pytest.mark.parametrize("messages", ["Hello", [[]], ["Hello"], {"role": "user"}, [[IDS]], 7], ids=repr)
def test_what_is_no_conversation_is_refused(open_llm: Open, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="conversation"):
        open_llm().chat(messages)


@pytest.mark.parametrize("bad", [[99999], "", {"prompt": "a", "multi_modal_data": {"image": 1}}, None], ids=repr)
def test_a_bad_prompt_costs_nothing_and_is_named(open_llm: Open, device: Any, bad: Any) -> None:
    llm = open_llm(device)
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([IDS] * 7 + [bad])
    assert caught.value.__notes__ == ["prompt 7 of 8, counted from 0"]
    assert not device.plans


def test_when_one_fails_the_rest_is_aborted(open_llm: Open, device: Any) -> None:
    llm = open_llm(device, max_num_seqs=4, max_waiting=4)
    device.make_row_fail(3, 2, ValueError("broken row"))
    with pytest.raises(StepFailed) as caught:
        llm.generate([IDS] * 50, max_tokens=20)
    assert caught.value.__notes__ == ["prompt 2 of 50, counted from 0"]
    assert len(device.plans) < 8
    assert llm.stats().running == llm.stats().waiting == 0
    assert len(llm.generate([IDS] * 3, max_tokens=2)) == 3


def test_an_error_is_free_as_soon_as_the_caller_drops_it(open_llm: Open, device: Any) -> None:
    llm = open_llm(device)
    device.make_row_fail(1, 0, ValueError("broken row"))
    gc.disable()
    try:
        with pytest.raises(StepFailed) as caught:
            llm.generate(IDS, max_tokens=20)
        error = weakref.ref(caught.value)
        del caught
        llm.stats()  # the call before this one has left the loop
        assert error() is None
    finally:
        gc.enable()


def test_ctrl_c_aborts_them_all_and_the_next_call_works(open_llm: Open, patient_device: Any) -> None:
    llm = open_llm(patient_device, max_num_seqs=4, max_waiting=4)
    patient_device.interrupt_at(30)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([IDS] * 50, max_tokens=ENDLESS)
    assert llm.stats().running == llm.stats().waiting == 0
    assert len(llm.generate([IDS] * 3, max_tokens=2)) == 3


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_first(
    open_llm: Open, patient_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Stream.finish
    goes_on = asyncio.Event()
    is_hanging = True

    async def hang_when_cancelled(stream: Stream) -> RequestOutput:
        try:
            return await finish(stream)
        finally:
            if is_hanging:
                press_ctrl_c()
                with anyio.CancelScope(shield=True):
                    await goes_on.wait()

    async def go_on(engine: Engine) -> None:
        goes_on.set()

    monkeypatch.setattr(Stream, "finish", hang_when_cancelled)
    patient_device.interrupt_at(3)
    llm = open_llm(patient_device)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(IDS, max_tokens=ENDLESS)
    is_hanging = False
    assert llm.stats().running == 1
    assert len(llm.generate([IDS] * 3, max_tokens=2)) == 3
    llm._host.run(go_on)


def test_a_sleeping_engine_says_so_instead_of_waiting_for_ever(open_llm: Open) -> None:
    llm = open_llm()
    llm.sleep(0)
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.generate(IDS)
    llm.wake_up()
    assert len(llm.generate(IDS, max_tokens=2)) == 1


# What is shown


def test_the_bar_tells_requests_and_tokens_and_is_shown_where_it_is_asked_for(
    open_llm: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = open_llm()
    llm.generate([IDS] * 3, max_tokens=2)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(InvalidRequest):
        llm.generate([99999], show_progress=True)
    assert capsys.readouterr().err == ""
    llm.generate([IDS] * 3, max_tokens=2, show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "tokens/s" in shown.err
    assert " 0 tokens/s" not in shown.err


def test_the_bar_is_refreshed_while_they_run_and_ends_as_it_was(
    open_llm: Open, device: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aioengine.blocking.llm.REFRESH_INTERVAL_S", 0.0)
    seen: list[tuple[float, float]] = []
    refresh = Progress.refresh

    def note(bar: Progress) -> None:
        seen.append((bar.tasks[0].completed, bar.tasks[0].fields["rate"]))
        refresh(bar)

    monkeypatch.setattr(Progress, "refresh", note)
    device.make_row_fail(1300, 0, ValueError("broken row"))
    llm = open_llm(device, max_num_seqs=2)
    llm.generate([IDS] * 12, max_tokens=200, show_progress=True)
    done = [num_done for num_done, _ in seen]
    assert done == sorted(done)
    assert {0, 12} <= set(done)
    assert len(seen) > 3, "how often is the machine's affair"
    assert seen[-1][1] > 0
    capsys.readouterr()
    with pytest.raises(StepFailed):
        llm.generate([IDS] * 3, max_tokens=200, show_progress=True)
    assert "0/3" in capsys.readouterr().err


# The real model


def test_all_ways_bring_the_same_from_the_demo_model() -> None:
    prompts = ["Once upon a time", "The dog", "One day a girl"]
    params = [SamplingParams(seed=number, max_tokens=12, n=2) for number in range(3)]

    async def generate_all() -> list[RequestOutput]:
        async with Engine() as engine:
            return await asyncio.gather(*map(engine.generate, prompts, params))

    with LLM() as llm:
        by_llm = llm.generate(prompts, params)
        chat = llm.chat(CHAT, temperature=0.0, max_tokens=8)
    by_engine: dict[str, RequestOutput] = {}
    with LLMEngine() as engine:
        for number, (prompt, of_prompt) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(number), prompt, of_prompt)
        while engine.has_unfinished_requests():
            by_engine.update((output.request_id, output) for output in engine.step())
        assert engine.check_health().status == "ALIVE"
    expected = [output.outputs for output in asyncio.run(generate_all())]
    assert [output.outputs for output in by_llm] == expected
    assert [by_engine[str(number)].outputs for number in range(3)] == expected
    assert chat[0].text.startswith("Hello")


@pytest.mark.parametrize(
    ("method", "given", "hint"),
    [
        ("generate", {"stream": True}, r"without asyncio `for delta in llm\.stream"),
        ("stream", {"timeout": 3}, r"without asyncio leave `for delta in llm\.stream"),
        ("chat", {"stream_interval": 2}, r"give it to stream"),
        ("generate", {"tokenization_kwargs": {"a": 1}}, "get_tokenizer"),
        ("stream", {"tokenization_kwargs": {"a": 1}}, "get_tokenizer"),
    ],
)
def test_hints_name_calls_that_need_no_asyncio(open_llm: Open, method: str, given: dict[str, Any], hint: str) -> None:
    llm = open_llm()
    prompt = [{"role": "user", "content": "Hi"}] if method == "chat" else IDS
    with pytest.raises(InvalidRequest, match=hint):
        getattr(llm, method)(prompt, **given)
    with pytest.raises(InvalidRequest, match=r"LLM\.generate"):
        llm.stream(["one prompt", "and another one"])


def test_a_stream_is_read_in_a_loop_and_leaving_it_aborts(open_llm: Open, patient_device: Any) -> None:
    llm = open_llm(patient_device)
    [whole] = llm.generate(IDS, seed=1, max_tokens=20, ignore_eos=True)
    deltas = list(llm.stream(IDS, SamplingParams(seed=1, max_tokens=20, ignore_eos=True)))
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].finish_reason == "length"
    for _ in llm.stream(IDS, max_tokens=ENDLESS, ignore_eos=True):
        break
    assert llm.stats().finished["abort"] == 1
    with pytest.raises(InvalidRequest, match="max_tokens"):
        llm.stream(IDS, max_tokens=0)
    with llm.stream(IDS, max_tokens=ENDLESS, ignore_eos=True) as stream:
        next(stream)
        assert llm.stats().finished["abort"] == 1
    assert llm.stats().finished["abort"] == 2
    llm.stream(IDS).close()
    with llm.stream(IDS, max_tokens=ENDLESS, ignore_eos=True) as stream, ThreadPoolExecutor(1) as threads:
        next(stream)
        reading = threads.submit(list, stream)
        stream.close()
        stream.close()
        reading.result(10)
    assert next(stream, None) is None

    async def drop_it() -> None:  # in a thread with a loop, which must not wait
        nonlocal stream
        del stream

    stream = llm.stream(IDS, max_tokens=ENDLESS, ignore_eos=True)
    next(stream)
    asyncio.run(drop_it())
    assert llm.stats().finished["abort"] == 4
    left = llm.stream(IDS, max_tokens=ENDLESS, ignore_eos=True)
    next(left)
    llm.close()
    with pytest.raises(EngineClosed):
        next(left)
    seen = weakref.ref(left)
    del left
    gc.collect()
    assert seen() is None, "a closed engine keeps nothing"
