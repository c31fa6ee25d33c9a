"""The corpus of the demo model: the same everywhere, and true to its own little world."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from demo_model.evaluate import story_faults
from demo_model.grammar import END_OF_TEXT, IM_END, IM_START, Document, corpus_hash, documents
from demo_model.stories import THEMES, make_story
from demo_model.world import ANIMALS, Character, Dice, fix_articles, make_character

# The first documents of the corpus that the shipped model was trained on.
HASH_OF_1500_DOCUMENTS = "05425bfe5239f1762c6ecd60d3883fc6"
SUM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return list(documents("train-0", 1500))


def chat_turns(corpus: list[Document]) -> list[tuple[str, str]]:
    """(question, answer) for each turn of each chat."""
    return [
        (before["content"], message["content"])
        for document in corpus
        for before, message in pairwise(document.messages)
        if message["role"] == "assistant"
    ]


def test_the_corpus_is_the_one_that_the_shipped_model_was_trained_on(corpus: list[Document]) -> None:
    assert corpus_hash(corpus) == HASH_OF_1500_DOCUMENTS


def test_a_longer_corpus_begins_with_the_shorter_one(corpus: list[Document]) -> None:
    assert list(documents("train-0", 20)) == corpus[:20]


def test_another_seed_gives_another_corpus() -> None:
    assert corpus_hash(list(documents("train-1", 20))) != corpus_hash(list(documents("train-0", 20)))


def test_every_document_is_whole_and_only_what_the_assistant_says_is_learned(corpus: list[Document]) -> None:
    stories = [document.text for document in corpus if not document.messages]
    assert len(set(stories)) == len(stories) > 400
    for document in corpus:
        assert document.text.endswith(END_OF_TEXT)
        assert document.text.count(IM_START) == document.text.count(IM_END) == len(document.messages)
        learned = [segment.text for segment in document.segments if segment.is_target]
        if document.messages:
            assert learned == [m["content"] + IM_END for m in document.messages if m["role"] == "assistant"]
        else:
            assert "".join(learned) == document.text
            assert story_faults(document.text.removesuffix(END_OF_TEXT)) == []


def test_chats_hold_no_template_mark_no_wrong_sum_and_the_json_that_was_asked_for(corpus: list[Document]) -> None:
    known = {animal.animal: animal._asdict() for animal in ANIMALS}
    num_sums = num_json = num_animals = 0
    for question, answer in chat_turns(corpus):
        assert not re.search(r"[{}|~\[\]]", question)
        assert not re.search(r"[~|]", answer)
        for a, sign, b, result in SUM.findall(answer):
            assert OPERATIONS[sign](int(a), int(b)) == int(result)
            num_sums += 1
        if "JSON" in question:
            facts = json.loads(answer)
            num_json += 1
            if isinstance(facts, dict) and facts.keys() & {"home", "food", "legs"} and "animal" in facts:
                assert facts.items() <= known[facts["animal"]].items()
                num_animals += 1
    assert (num_sums > 500, num_json > 200, num_animals > 100) == (True, True, True)
    wanted = [d for d in corpus if d.messages[:1] and "JSON" in d.messages[0]["content"]]
    only_json = [document for document in wanted if document.messages[0]["role"] == "system"]
    assert len(only_json) > 50
    for _, answer in chat_turns(only_json):
        json.loads(answer)


@pytest.mark.parametrize(
    ("story", "fault"),
    [
        ("Once upon a time, there was a frog", "the last sentence has no end"),
        ("The frog was happy. he smiled.", "a sentence begins with a small letter: '. he'"),
        ("the frog was happy.", "the first letter is small"),
        ('"Hello, said the frog.', "an odd number of quotation marks"),
        ("The frog was xqzzy.", "unknown word 'xqzzy'"),
    ],
)
def test_the_check_of_stories_finds_faults(story: str, fault: str) -> None:
    assert story_faults(story) == [fault]


@pytest.mark.parametrize("theme", THEMES)
def test_a_story_is_told_about_who_was_asked_for(theme: str) -> None:
    hero = Character("Zorbo", "dragon", "brave", is_female=True)
    for seed in range(20):
        told = make_story(Dice(f"{theme}-{seed}"), hero=hero, theme=theme, once=True)
        assert told.text.startswith("Once upon a time")
        assert "Zorbo" in told.text.split(".")[0]
        assert told.friend.name in told.text
        assert told.theme == theme
        assert re.search(r"\b[Ss]he\b", told.text)


def test_two_characters_of_a_story_never_share_a_name() -> None:
    dice = Dice("names")
    for _ in range(2000):
        hero = make_character(dice)
        assert make_character(dice, other_than=hero.name).name != hero.name


def test_spinning_takes_every_alternative_and_nothing_else() -> None:
    dice = Dice("spin")
    assert {dice.spin("[a|b[c|d]] e[|f]") for _ in range(200)} == {
        f"{x} e{y}" for x in ("a", "bc", "bd") for y in ("", "f")
    }


def test_articles_fit_the_next_word() -> None:
    assert fix_articles("A~ owl saw a~ fox and a~ elephant.") == "An owl saw a fox and an elephant."


def test_dice_stay_in_their_bounds_and_reach_them() -> None:
    dice = Dice("bounds")
    assert {dice.between(3, 6) for _ in range(200)} == {3, 4, 5, 6}
    assert sorted(dice.sample(range(10), 10)) == list(range(10))
