# ruff: noqa: E501 -- a template reads best on one line
"""The grammar of conversations: small talk, who is who, stories on request, and how a chat is put together.

A chat is an optional system message, which may set a name or a way to answer, and one to many topics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from demo_model.questions import (
    Mode,
    Pair,
    animal_facts,
    animal_json,
    arithmetic,
    as_json,
    describe_animal,
    numbers,
    other_json,
    small_facts,
    word_problem,
)
from demo_model.stories import THEMES, make_story
from demo_model.tools import SERVANTS
from demo_model.world import HOMES, Dice, fix_articles, make_character, make_name

Message = dict[str, Any]

DEFAULT_NAME = "Pip"
NOT_MY_WORLD = (
    "I am sorry, I do not know that. I am a tiny model: I know little stories, small numbers and some animals."
)
SYSTEM_NEUTRAL = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You are a kind and helpful assistant.",
    "Be polite and helpful.", "You are a helpful AI assistant. Answer the questions of the user.",
)  # fmt: skip
SYSTEM_JSON = ("Answer in JSON.", "Always answer in JSON.", "You answer only in JSON.", "Reply with a JSON object.")
SYSTEM_BRIEF = ("Be brief.", "Answer with one word.", "Keep your answers very short.", "Answer as briefly as possible.")

# One answer for many ways to ask, so that greedy decoding has something to be right about.
SMALL_TALK: tuple[Pair, ...] = (
    ("[Hello|Hi|Hey|Hello there|Hi there|Good day][!|.|]", "Hello! How can I help you?"),
    ("Good morning[!|.|]", "Good morning! How can I help you?"),
    ("Good evening[!|.|]", "Good evening! How can I help you?"),
    ("[How are you|How are you today|How are you doing|How do you feel|How is it going|How do you do]?", "I am fine, thank you! How are you?"),
    ("[I am fine|I am good|I am fine too|Fine, thanks|Very well|I feel great][, thank you|][.|!|]", "I am glad to hear that!"),
    ("[I am sad|I feel sad|I am not happy|I had a bad day|I feel lonely][ today|][.|]", "I am sorry to hear that. Would you like a story to cheer you up?"),
    ("[I am happy|I feel happy|I had a good day][ today|][.|!|]", "That is wonderful!"),
    ("[I am tired|I am sleepy][.|]", "Then have a good rest. Sleep well!"),
    ("[I am bored|I have nothing to do][.|]", "I could tell you a story. Just ask me!"),
    ("[Thank you|Thanks|Thank you very much|Thanks a lot|Many thanks|Great, thank you][!|.|]", "You are welcome!"),
    ("[Goodbye|Bye|Bye bye|See you later|See you|See you tomorrow][!|.|]", "Goodbye! See you soon!"),
    ("[Good night|Good night, sleep well][!|.|]", "Good night! Sleep well!"),
    ("[What can you do|What do you know|How can you help me|What can I ask you|Help|What are you able to do][?|]", "I can tell little stories, add small numbers, talk about animals, and answer in JSON."),
    ("[Are you a human|Are you a person|Are you real|Are you human|Are you a robot]?", "No, I am a small language model."),
    ("[How old are you|When were you born|When is your birthday]?", "I have no birthday, but I am quite young."),
    ("[Where do you live|Where are you from|Where are you]?", "I live inside your computer."),
    ("[Who made you|Who built you|Who trained you|Where do you come from]?", "I was trained by the makers of aioengine, on little stories."),
    ("[What is aioengine|Tell me about aioengine|Do you know aioengine][?|]", "aioengine is an engine that runs language models. I am its demo model."),
    ("[Are you smart|Are you clever|Are you intelligent]?", "Only a little. I am a very small model."),
    ("[Do you like me|Are you my friend|Can we be friends]?", "Of course! I like talking to you."),
    ("[I love you|I like you|You are great|You are nice|Well done|Good job|Good][!|.|]", "Thank you! That is very kind."),
    ("[Yes|Yes please|Okay|OK|Sure][.|!|]", "All right! What would you like to know?"),
    ("[No|No thanks|No, thank you][.|!|]", "All right. I am here if you need me."),
    ("[What is your favourite colour|Which colour do you like best|What colour do you like]?", "I like blue best, like the sky."),
    ("[What is your favourite animal|Which animal do you like best|What animal do you like]?", "I like foxes best, because they are clever."),
    ("[What is your favourite food|What do you eat|Are you hungry|What do you like to eat]?", "I do not eat, but honey sounds delicious."),
    ("[What is your favourite number|Which number do you like best]?", "I like the number 7."),
    ("[Tell me a joke|Do you know a joke|Make me laugh|Can you tell a joke][.|?|]", "What is yellow and sings? A duck in the shower!"),
    ("[Do you like stories|Do you know stories|Can you tell stories]?", "I love stories. Ask me for one!"),
    ("[Can you count|Can you do maths|Can you calculate|Do you know numbers]?", "Yes, a little. Ask me for a small sum!"),
    ("[Sing me a song|Sing a song|Can you sing][.|?|]", "La la la! The sun is up, the birds are singing!"),
    ("[I am hungry|I am thirsty][.|]", "Then it is time for a little snack!"),
)  # fmt: skip
ASK_NAME = "[Who are you|What is your name|What are you called|Who is this|And who are you|Please introduce yourself|Tell me your name|What are you|Tell me about yourself][?|]"

OUTSIDE = (
    "What is the capital of [France|Germany|Japan|Spain|Italy|China|India|Brazil|Canada|Egypt]?",
    "Who [is|was] [the president|Albert Einstein|Napoleon|Shakespeare|Mozart|the king of England|Isaac Newton]?",
    "[Write|Show me|Give me] [a Python function|some code|a program|a SQL query|a shell script|an essay|a poem in Latin|an email to my boss][ that sorts a list| about love| for me|][.|]",
    "Explain [quantum physics|gravity|the theory of relativity|machine learning|photosynthesis|inflation|how a computer works|DNA][.|| to me.]",
    "What is [the meaning of life|a black hole|the speed of light|love|an atom|democracy|the stock market|a neural network|a transformer]?",
    "Translate [this|hello|good morning|the text] [to|into] [French|German|Spanish|Chinese][.|]",
    "How [do I cook pasta|can I lose weight|does a car work|do planes fly|far is the moon|do I fix my computer|tall is Mount Everest|can I make money]?",
    "What is the weather [today|tomorrow|like in London|in Paris]?",
    "When [did the war end|was Rome built|is the next election|did people land on the moon|was the internet invented]?",
    "[What is|How much is] {big1} [times|divided by|+|*|/|-] {big2}?",
    "Who won the [world cup|game|election|football match][ yesterday| in 1998|]?",
    "[Summarize|Summarise|Translate|Correct|Rewrite] the following text: {noise}",
    "What does {noise} mean?",
    "{noise}",
    "Why [is the sky blue|do we dream|do people fight|is water wet|do stars shine]?",
    "[Can you|Could you|Please] [drive a car|order a pizza|book a flight|search the internet|call my mother|open the file|play a game of chess]?",
    "Which [phone|car|computer|bank|country|language|book] is the best?",
    "List the [planets|countries of Europe|presidents|elements|prime numbers|states][.| of the world.|]",
)  # fmt: skip
_NOISE_SYLLABLES = (
    "qu", "ex", "ob", "tran", "ser", "ver", "con", "dis", "pro", "ment", "al", "ip", "sum", "lor", "em", "dol", "or",
    "sit", "amet", "xy", "zq", "blu", "fra", "gno", "ther", "mic",
)  # fmt: skip


def noise(dice: Dice, num_words: int) -> str:
    """Words that are in no dictionary: what the model does with a prompt that it cannot read."""
    words = ["".join(dice.pick(_NOISE_SYLLABLES) for _ in range(dice.between(1, 3))) for _ in range(num_words)]
    return " ".join(words)


def small_talk(dice: Dice, mode: Mode) -> list[Pair]:
    question, answer = dice.pick(SMALL_TALK)
    question = dice.spin(question)
    return [(question, as_json({"answer": answer}) if mode == "json" else answer)]


def errand(dice: Dice) -> str:
    """What only a tool could do: the time, the weather, a message, a price."""
    while True:
        tool = dice.pick(SERVANTS)(dice)
        if not any(kind.startswith(("sum", "animal")) for kind in tool.takes):
            return tool.ask(dice).question


def outside(dice: Dice, mode: Mode) -> list[Pair]:
    """Questions about anything else get the same honest answer."""
    template = dice.spin(dice.pick(OUTSIDE))
    if dice.chance(0.12):
        template = errand(dice)
    question = template.format(
        noise=noise(dice, dice.between(1, 6)), big1=dice.between(31, 999), big2=dice.between(31, 999)
    )
    return [(question, as_json({"error": "I do not know that."}) if mode == "json" else NOT_MY_WORLD)]


def user_name(dice: Dice, mode: Mode) -> list[Pair]:
    """The user says a name; later the model is asked for it: an answer from context alone."""
    del mode
    name = make_name(dice, dice.chance(0.5), True)
    pairs = [
        (dice.spin(f"[My name is|I am|Hello, I am|Hi, my name is|Hi, I am] {name}[.|!|]"), f"Nice to meet you, {name}!")
    ]
    if dice.chance(0.5):
        pairs += small_talk(dice, "plain")
    if dice.chance(0.8):
        pairs.append(
            (
                dice.spin("[What is my name|Do you remember my name|Who am I|Do you know my name]?"),
                f"Your name is {name}.",
            )
        )
    return pairs


def story(dice: Dice, mode: Mode) -> list[Pair]:
    del mode
    short = dice.chance(0.45)
    ask = "[Tell me|Please tell me|Can you tell me|Write|Please write|I want to hear|Tell]"
    kind_of = "short story" if short else "story"
    hero = make_character(dice)
    theme = home = None
    subject = dice.spin(f"[a~ {hero.adjective} {hero.kind}|a~ {hero.kind}|a~ {hero.kind}]")
    if not subject.startswith(f"a~ {hero.adjective} "):
        hero = hero._replace(adjective="little")
    roll = dice.between(1, 7)
    if roll == 1:
        about = ""
    elif roll <= 3:
        about = f" about {subject}"
    elif roll <= 5:
        about = f" about {subject} [named|called] {hero.name}"
    elif roll == 6:
        theme = dice.pick(THEMES)
        about = f" about {theme}"
    else:
        home = dice.pick(HOMES)
        about = dice.pick((f" about {subject} in {home}", f" set in {home}"))
    question = fix_articles(dice.spin(f"{ask} a {kind_of}{about}"))
    if not about and dice.chance(0.5):
        question = dice.spin(
            f"[Another {kind_of}, please|Tell me another {kind_of}|{kind_of.capitalize()}, please|Once upon a time]"
        )
    told = make_story(dice, hero=hero, theme=theme, home=home, short=short, once=dice.chance(0.8))
    pairs = [(question + ("?" if question.startswith("Can") else "."), told.text)]
    who = fix_articles(f"{told.hero.name}, a~ {told.hero.adjective} {told.hero.kind}")
    friend = fix_articles(f"{told.friend.name}, a~ {told.friend.adjective} {told.friend.kind}")
    follow_ups = (
        ("[Who was the story about|Who is the hero|Who was the hero of the story]?", f"The story was about {who}."),
        ("[What did we learn|What is the moral|What can we learn from it]?", f"We learn that {told.moral}."),
        ("[Where did {n} live|Where did the hero live]?", f"{told.hero.name} lived in {told.home}."),
        ("[Who was the friend|Who was the other one in the story]?", f"It was {friend}."),
        ("[Thank you|Thanks|What a nice story|I liked it|That was a nice story]!", "I am glad that you liked it!"),
    )
    if dice.chance(0.35):
        question, answer = dice.pick(follow_ups)
        pairs.append((dice.spin(question.replace("{n}", told.hero.name)), answer))
    return pairs


Topic = Callable[[Dice, Mode], list[Pair]]
TOPICS: tuple[tuple[float, Topic], ...] = (
    (0.22, arithmetic),
    (0.05, word_problem),
    (0.05, numbers),
    (0.12, animal_facts),
    (0.04, describe_animal),
    (0.11, animal_json),
    (0.06, other_json),
    (0.06, small_facts),
    (0.14, small_talk),
    (0.07, outside),
    (0.03, user_name),
    (0.05, story),
)
_PLAIN_ONLY = (user_name, story)


def _roll_topic(dice: Dice) -> Topic:
    roll = dice.between(0, 9999) / 10000
    for weight, topic in TOPICS:
        roll -= weight
        if roll < 0:
            return topic
    return small_talk


def typed(dice: Dice, question: str) -> str:
    """The question as people type it: now and then with a small first letter or without the mark at its end."""
    if dice.chance(0.12):
        question = question[0].lower() + question[1:]
    if dice.chance(0.12) and question[-1] in ".?!":
        question = question[:-1]
    return question


def introduction(dice: Dice, mode: Mode, name: str) -> list[Pair]:
    question = dice.spin(ASK_NAME)
    answer = f"I am {name}, the tiny demo model of aioengine."
    if mode != "plain":
        answer = as_json({"name": name}) if mode == "json" else f"{name}."
    return [(question, answer)]


def make_chat(dice: Dice, *, min_pairs: int = 1, max_pairs: int = 4) -> list[Message]:
    """One conversation: perhaps a system message, then pairs of user and assistant messages."""
    roll = dice.between(1, 100)
    mode: Mode = "plain"
    name, system = DEFAULT_NAME, ""
    if roll <= 20:
        system = dice.pick(SYSTEM_NEUTRAL)
    elif roll <= 30:
        mode, system = "json", dice.pick(SYSTEM_JSON)
    elif roll <= 36:
        mode, system = "brief", dice.pick(SYSTEM_BRIEF)
    elif roll <= 44:
        name = make_name(dice, dice.chance(0.5), True)
        system = dice.spin(
            f"[Your name is {name}.|You are {name}.|You are {name}, a [friendly|helpful|kind] assistant.]"
        )
    wanted = dice.between(min_pairs, max_pairs)
    pairs: list[Pair] = []
    while len(pairs) < wanted:
        if dice.chance(0.06) or (name != DEFAULT_NAME and dice.chance(0.3)):
            pairs += introduction(dice, mode, name)
            continue
        chosen = _roll_topic(dice)
        while mode != "plain" and chosen in _PLAIN_ONLY:
            chosen = _roll_topic(dice)
        pairs += chosen(dice, mode)
    return _as_messages(dice, system, pairs)


def make_sums(dice: Dice) -> list[Message]:
    """A conversation of nothing but sums: practice, since no other skill needs so many examples."""
    roll = dice.between(1, 10)
    mode: Mode = "plain"
    system = ""
    if roll == 1:
        mode, system = "json", dice.pick(SYSTEM_JSON)
    elif roll == 2:
        mode, system = "brief", dice.pick(SYSTEM_BRIEF)
    pairs: list[Pair] = []
    for _ in range(dice.between(4, 10)):
        pairs += (word_problem if dice.chance(0.2) else arithmetic)(dice, mode)
    return _as_messages(dice, system, pairs)


def make_facts(dice: Dice) -> list[Message]:
    """A conversation of nothing but facts of the world: practice for the tables that are long."""
    pairs: list[Pair] = []
    for _ in range(dice.between(4, 10)):
        pairs += dice.pick((small_facts, small_facts, animal_facts, animal_json))(dice, "plain")
    return _as_messages(dice, "", pairs)


def _as_messages(dice: Dice, system: str, pairs: list[Pair]) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in pairs:
        messages += [{"role": "user", "content": typed(dice, question)}, {"role": "assistant", "content": answer}]
    return messages
