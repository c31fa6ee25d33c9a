# ruff: noqa: E501 -- a template reads best on one line
"""Conversations with tools, with forced shapes and with thoughts, as messages of the OpenAI form.

Two fields of an assistant's message are for the corpus alone: ``reasoning_content``, which the last message of a thinking
chat has, and ``values``, the spans of a content of which the rest is not learned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from demo_model.chats import (
    NOT_MY_WORLD,
    SYSTEM_NEUTRAL,
    Message,
    errand,
    make_chat,
    outside,
    small_talk,
    typed,
    user_name,
)
from demo_model.questions import Pair, animal_facts, arithmetic, as_json, describe_animal, small_facts
from demo_model.shapes import LAYOUTS, asked_for, pieces, shaped
from demo_model.thoughts import think
from demo_model.tools import SERVANTS, Tool, Use, answer_form, calculator, facts_form
from demo_model.world import Dice, make_name


class Chat(NamedTuple):
    """What a request holds: messages, tools, and whether the last answer is thought about."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    is_thinking: bool = False


def _user(question: str) -> Message:
    return {"role": "user", "content": question}


def _say(answer: str, thought: str) -> Message:
    return {"role": "assistant", "content": answer, "reasoning_content": thought}


def _call(calls: list[tuple[str, dict[str, Any]]], thought: str) -> Message:
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": None, "tool_calls": functions, "reasoning_content": thought}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text}


def _without_tools(dice: Dice, taken: set[str]) -> list[Pair]:
    """Questions that none of the tools is for, and what is said then, as without any tool."""
    has_sums = any(kind.startswith("sum") for kind in taken)
    while True:
        roll = dice.between(1, 100)
        if roll <= 36:
            return small_talk(dice, "plain")
        if roll <= 52 and "search" not in taken:
            [(question, answer)] = outside(dice, "plain")
            if not (
                any(kind.split()[-1] in question for kind in taken) or (has_sums and any(c.isdigit() for c in question))
            ):
                return [(question, answer)]
        elif roll <= 64:
            return small_facts(dice, "plain")
        elif roll <= 80 and "animal" not in taken:
            return (describe_animal if dice.chance(0.3) else animal_facts)(dice, "plain")
        elif roll <= 92 and not has_sums:
            return arithmetic(dice, "plain")
        elif roll <= 95:
            return user_name(dice, "plain")
        elif roll > 95 and not taken - {"time", "animal"} and not has_sums:
            question = errand(dice)
            if "time" not in taken or " time" not in question:
                return [(question, NOT_MY_WORLD)]


def _joined(dice: Dice, uses: list[Use]) -> str:
    """Several questions in one message."""
    questions = [use.question for use in uses]
    if any(":" in question for question in questions[:-1]) or dice.chance(0.35):
        return " ".join(question if question[-1] in ".?!" else question + "." for question in questions)
    parts = [questions[0], *(question[0].lower() + question[1:] for question in questions[1:])]
    parts = [part.rstrip(".?!") for part in parts]
    return (
        ", ".join(parts[:-1])
        + dice.pick((" and ", " and ", ", and "))
        + parts[-1]
        + ("?" if ":" not in parts[-1] else "")
    )


def _turn(dice: Dice, servants: list[Tool], num_calls: int) -> list[Message]:
    """A question or several in one, the calls, the results and the answer."""
    chosen = [dice.pick(servants) for _ in range(num_calls)]
    uses = [tool.ask(dice) for tool in chosen]
    question = uses[0].question if num_calls == 1 else _joined(dice, uses)
    names = " and ".join(dict.fromkeys(tool.name for tool in chosen))
    about = " and ".join(dict.fromkeys(use.about for use in uses))
    if dice.chance(0.03):
        error = dice.pick(("Error: it broke", as_json({"error": "timeout"}), "error", as_json({"error": "not found"})))
        told, answer = [_result(error) for _ in uses], "I am sorry, that did not work."
    else:
        told, answer = [_result(use.result) for use in uses], " ".join(use.answer for use in uses)
    return [
        _user(typed(dice, question)),
        _call(
            [(tool.name, use.arguments) for tool, use in zip(chosen, uses, strict=True)],
            f"The user asks for {about}. I call {names}.",
        ),
        *told,
        _say(answer, "The tool has answered. I say what it says."),
    ]


def _final_turn(dice: Dice, final: Tool, servants: list[Tool]) -> list[Message]:
    """A question that ends with the call of a final tool, perhaps after the call of another one."""
    if servants:
        servant = dice.pick(servants)
        use = servant.ask(dice)
        assert final.finish is not None
        arguments = final.finish(use.answer, use.value)
        thought = f"The tool has answered. I give the answer with {final.name}."
        called = [
            _call([(servant.name, use.arguments)], f"The user asks for {use.about}. I call {servant.name}."),
            _result(use.result),
        ]
    else:
        use, called, thought = final.ask(dice), [], f"The answer goes into {final.name}."
        arguments = use.arguments
    ended = "ok" if servants else use.result
    return [_user(typed(dice, use.question)), *called, _call([(final.name, arguments)], thought), _result(ended)]


def _some_tools(dice: Dice, count: int, others: list[Tool]) -> list[Tool]:
    """``count`` servants; no two tools, ``others`` included, have a name in common or take the same questions."""
    chosen: list[Tool] = []
    while len(chosen) < count:
        tool = dice.pick(SERVANTS)(dice)
        if all(tool.name != other.name and not tool.takes & other.takes for other in (*chosen, *others)):
            chosen.append(tool)
    return chosen


def make_tool_chat(dice: Dice) -> Chat:
    """One to five turns with one to four tools, of which some are for none of them."""
    roll = dice.between(1, 100)
    messages: list[Message] = []
    if roll <= 66:
        servants = _some_tools(dice, dice.pick((1, 1, 1, 1, 2, 2, 2, 2, 3, 4)), [])
        tools = servants
        for _ in range(dice.between(1, 5)):
            kind = dice.between(1, 100)
            if kind <= 36:
                messages += _plain_turn(dice, tools)
            else:
                messages += _turn(dice, servants, 1 if kind <= 78 else 2 if kind <= 96 else 3)
    elif roll <= 86:
        final = (answer_form if dice.chance(0.2) else facts_form)(dice)
        idle = _some_tools(dice, dice.pick((0, 0, 0, 1)), [final])
        tools = dice.sample([final, *idle], 1 + len(idle))
        for _ in range(dice.between(1, 5)):
            if messages and messages[-1]["role"] == "tool" and dice.chance(0.4):
                messages.append(_say("Done.", "The tool has answered. That is all."))
            if "answer" not in final.takes and dice.chance(0.1):
                messages += _plain_turn(dice, tools)
            else:
                messages += _final_turn(dice, final, [])
    else:
        while (final := (answer_form if dice.chance(0.7) else facts_form)(dice)).finish is None:
            pass
        # A final tool takes any question, so what another one is for is asked of that one.
        servants = _some_tools(dice, dice.pick((1, 1, 2)), [])
        if "answer" not in final.takes or any(tool.name == final.name for tool in servants):
            while (servants := [calculator(dice)])[0].name == final.name:
                pass
        tools = dice.sample([final, *servants], 1 + len(servants))
        for _ in range(dice.between(1, 3)):
            messages += _final_turn(dice, final, servants)
    if messages[-1]["role"] == "tool":
        messages.pop() if dice.chance(0.6) else messages.append(_say("Done.", "The tool has answered. That is all."))
    opening = dice.between(1, 100)
    if opening <= 35:
        messages.insert(0, {"role": "system", "content": dice.pick(SYSTEM_NEUTRAL)})
    elif opening <= 42:
        told = dice.spin(
            "[Use the tools.|You have tools.|Call a tool if you need one.|You are an assistant with tools.|Use a tool for sums.]"
        )
        messages.insert(0, {"role": "system", "content": told})
    elif opening <= 46:
        messages.insert(0, {"role": "system", "content": f"You are {make_name(dice, dice.chance(0.5), True)}."})
    return Chat(*_perhaps_thinking(dice, messages, [tool.definition for tool in tools]))


def _plain_turn(dice: Dice, tools: list[Tool]) -> list[Message]:
    taken = {kind for tool in tools for kind in tool.takes}
    messages = []
    for question, answer in _without_tools(dice, taken):
        messages += [_user(typed(dice, question)), _say(answer, "No tool is for that. I answer myself.")]
    return messages


def _perhaps_thinking(
    dice: Dice, messages: list[Message], tools: list[dict[str, Any]]
) -> tuple[list[Message], list[dict[str, Any]], bool]:
    """Let one chat in four end with a thought, at one of the last answers; drop all other thoughts."""
    is_thinking = dice.chance(0.25)
    if is_thinking:
        last = dice.pick([index for index, message in enumerate(messages) if message["role"] == "assistant"][-3:])
        messages = messages[: last + 1]
    kept = messages[-1].get("reasoning_content") if is_thinking else None
    messages = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    if kept:
        messages[-1]["reasoning_content"] = kept
    return messages, tools, is_thinking


def make_thinking_chat(dice: Dice) -> Chat:
    """A thought and its answer, perhaps after a few turns whose thoughts are gone."""
    messages: list[Message] = []
    if dice.chance(0.3):
        messages = make_chat(dice, max_pairs=2)
        if any(
            "JSON" in m["content"] or m["content"].startswith(("Be ", "Keep", "Answer"))
            for m in messages[:1]
            if m["role"] == "system"
        ):
            messages = []
    elif dice.chance(0.3):
        messages = [{"role": "system", "content": dice.pick(SYSTEM_NEUTRAL)}]
    thought = think(dice)
    messages += [_user(typed(dice, thought.question)), _say(thought.answer, thought.thought)]
    return Chat(messages, [], is_thinking=True)


def make_shaped_chat(dice: Dice) -> Chat:
    """Answers as JSON: in most chats a grammar forces the keys, in the others the prompt tells them."""
    messages: list[Message] = []
    if dice.chance(0.3):
        system, wanted = asked_for(dice)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [_user(wanted.question), {"role": "assistant", "content": as_json(wanted.value)}]
        for _ in range(0 if system else dice.between(0, 2)):
            system = "?"
            while system:
                system, wanted = asked_for(dice)
            messages += [_user(wanted.question), {"role": "assistant", "content": as_json(wanted.value)}]
        return Chat(messages, [])
    if dice.chance(0.4):
        messages = [{"role": "system", "content": dice.pick(SYSTEM_NEUTRAL)}]
    for _ in range(dice.pick((1, 2, 3, 4, 5))):
        wanted = shaped(dice)
        content, values = "", []
        for text, is_value in pieces(wanted.value, dice.pick(LAYOUTS)):
            if is_value and text:
                values.append((len(content), len(content) + len(text)))
            content += text
        # A name keeps its capital.
        question = wanted.question if wanted.question.split()[0] in content else typed(dice, wanted.question)
        messages += [_user(question), {"role": "assistant", "content": content, "values": values}]
    return Chat(messages, [])
