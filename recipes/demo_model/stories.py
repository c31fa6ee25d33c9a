# ruff: noqa: E501 -- a template reads best on one line
"""The grammar of little stories: an opening, a plot of beats, a moral, an ending.

A plot is a tuple of beats. A beat is a template, or ``(probability, template)`` for one that may be left out. Templates use
``[one|another]`` for alternatives, ``a~`` for the article that fits the next word, ``{n}``, ``{he}`` … for the hero and
``{fn}``, ``{fhe}`` … for the friend.
"""

from __future__ import annotations

from typing import NamedTuple

from demo_model.world import (
    COLOURS,
    FLAWS,
    FOODS,
    HOBBIES,
    HOMES,
    PLACES,
    THINGS,
    TRAITS,
    WEATHERS,
    Character,
    Dice,
    fix_articles,
    make_character,
)

Beat = str | tuple[float, str]


class Plot(NamedTuple):
    """What happens, what it is about (for requests), and what one may learn from it."""

    theme: str
    beats: tuple[Beat, ...]
    morals: tuple[str, ...]


class Story(NamedTuple):
    """A finished story, and what questions about it need."""

    text: str
    hero: Character
    friend: Character
    theme: str
    moral: str
    home: str


OPENINGS = (
    "Once upon a time, there was a~ {adj} {kind} named {n}. {He} lived in {home}.",
    "Once upon a time, there was a~ {adj} {kind} [called|whose name was] {n}. {n} lived in {home}.",
    "Once upon a time, a~ {adj} {kind} named {n} lived in {home}.",
    "Once upon a time, in {home}, there lived a~ {adj} {kind} [named|called] {n}.",
    "Once upon a time there was a~ {adj} {kind} [named|called] {n} who lived in {home}.",
    "Once upon a time {n} the {kind} lived in {home}.",
    "There was once a~ {adj} {kind} named {n}, and {he} lived in {home}.",
    "In {home}, there lived a~ {adj} {kind} [named|called] {n}.",
    "{n} was a~ {adj} {kind} who lived in {home}.",
    "Long ago, a~ {adj} {kind} named {n} lived in {home}.",
    "A~ {adj} {kind} named {n} lived in {home}.",
    "The {adj} {kind} {n} lived in {home}.",
)
# The opening that a reader will type is the one that the model must know best.
ONCE_UPON_A_TIME = OPENINGS[:6]

CHARACTER_BEATS: tuple[Beat, ...] = (
    (0.5, "{n} [loved|liked] {hobby}[| and {hobby2}][| more than anything else]."),
    (0.4, "{He} was [very|always] {trait}, but [sometimes {he} was|{he} was also] a little {flaw}."),
    (0.3, "Everyone [in the neighbourhood|there] knew {n}, because {he} was so {trait}."),
)

PLOTS = (
    Plot(
        "a lost thing",
        (
            "One [day|morning|afternoon], {n} could not find {his} {colour} {thing}.",
            (0.5, '"Oh no! Where is my {thing}?" [cried|said|asked] {n}.'),
            "{He} looked [under the bed|behind the door|in every room|under the table], but it was not there.",
            (0.7, "Then {he} looked near {place}, but there was [only a~ [old|wet|broken] [shoe|box|branch]|nothing but {colour2} flowers]."),
            "{n} [sat down and began to cry|felt very sad|did not know what to do].",
            "[Just then|After a while|Soon], {fa} named {fn} came by. \"[Why are you so sad|What is wrong|Can I help you]?\" asked {fn}.",
            '"I lost my {thing}," said {n}.',
            '"[Do not worry|Do not be sad]! [We will find it together|I will help you look]," said {fn}.',
            "They [searched|looked] [high and low|for a long time|everywhere], and at last {fn} [saw|found] the {colour} {thing} [in the tall grass|behind a big stone|at {place2}|under a pile of leaves].",
            '{n} was so happy that {he} [jumped up and down|laughed out loud|hugged {fn}]. "Thank you[, {fn}|, my friend|]!" {he} said.',
            (0.5, "From that day on, {n} [always kept the {thing} in a safe place|took good care of the {thing}]."),
        ),
        ("it is easier to find things together", "a friend who helps is worth more than any {thing}", "it is good to ask for help"),
    ),
    Plot(
        "making friends",
        (
            "{n} [was often lonely|had no one to play with|wished for a friend].",
            "One [sunny|quiet|rainy|windy] [day|afternoon], {he} went to {place}[ all alone| with {his} {colour} {thing}|].",
            "There {he} [met|saw] {fa} named {fn}, who was [sitting|standing] [under a tree|by the path|on a stone].",
            (0.6, "At first, {n} was too shy to [speak|say hello]."),
            "Then {he} took a deep breath and said, \"Hello! My name is {n}. [Do you want to play|May I sit with you|Would you like to be my friend]?\"",
            '{fn} smiled. "[Yes, please|I would love to|Of course]!" {fhe} said. "I was [lonely|bored] too."',
            "They [played hide and seek|told each other stories|ran around|built a little house of sticks|threw the {thing} to each other|played with the {thing}] [all day|until the sun went down|for hours].",
            (0.5, "When they were hungry, they [shared|ate] {food}[ together|]."),
            "In the evening, {fn} said, \"[Will you come back tomorrow|Can we play again tomorrow|Shall we meet again]?\" \"[Yes|Of course]!\" said {n}.",
            "After that, {n} and {fn} [met every day|were best friends|were never lonely again].",
        ),
        ("a friend may be waiting where you least expect it", "saying hello can be the start of a friendship", "it takes a little courage to make a friend"),
    ),
    Plot(
        "sharing",
        (
            "One [day|morning|evening], {n} had {food} [for lunch|in {his} bag|all to {himself}].",
            (0.6, '"This will be [so good|delicious|the best meal ever]," {he} thought.'),
            "On the way to {place}, {he} met {fa} named {fn}, who looked [hungry|tired and hungry|thin and sad].",
            '"I have not eaten [all day|since yesterday]," said {fn}[ in a quiet voice|].',
            (0.7, "{n} looked at {his} food. [There was not very much of it|{He} was hungry too|It smelled so good]."),
            "But {he} [thought for a moment|remembered what {his} [mother|grandmother|father] had told {him}] and said, \"[Here, take half|We can share|Please eat with me].\"",
            "They sat down [together|side by side|in the grass] and ate. [It tasted better than ever|The food was warm and good|Soon nothing was left, not even a crumb].",
            '"You are [very kind|a true friend|so kind]," said {fn}. "[One day I will help you too|I will never forget this]."',
            (0.6, "The next week, {n} [was hungry|forgot {his} lunch], and {fn} came with {food2}. This time, {fn} shared with {him}."),
        ),
        ("sharing makes everything taste better", "kindness always comes back", "when you share, you have a friend and a meal"),
    ),
    Plot(
        "being brave",
        (
            "{n} was afraid of [the dark|thunder|deep water|the big hill|loud noises].",
            "One [night|evening], [there was a big storm|the wind was howling|all the lights went out], and {n} [hid under the blanket|could not sleep|began to shake].",
            "[Then|Suddenly], {he} heard a [small|strange|soft] sound outside. [It came from|It was somewhere near] {place}.",
            '"[Help|Please help me|Is anyone there]!" [cried|called] a [tiny|weak] voice.',
            "{n} was [scared|afraid], but {he} [took {his} {thing}|lit a small lamp|put on {his} coat] and went out[ into the night|].",
            "There {he} found {fa} named {fn}, [stuck in the mud|lost in the dark|caught in a thorny bush|sitting alone in the rain].",
            '"[Do not be afraid|Hold on], I am here," said {n}[, and {his} voice did not shake at all|].',
            "{He} [pulled|helped] {fn} out and took {fhim} home. They drank [hot chocolate|warm milk|hot tea] and [listened to the wind|sat by the fire|told funny stories].",
            '"You are the bravest {kind} I know," said {fn}.',
            (0.6, "{n} smiled. {He} was not [so afraid|afraid] any more."),
        ),
        ("being brave means helping even when you are scared", "fear gets small when you help someone", "even someone small can be very brave"),
    ),
    Plot(
        "never giving up",
        (
            "[More than anything|Most of all], {n} wanted to learn how to [swim|dance|whistle|ride a bicycle|play the flute|climb the big oak tree].",
            "[On Monday|The first time], {he} tried and tried, but it did not work at all. [{He} fell down|{He} bumped {his} nose|Everyone laughed].",
            (0.6, '"I will never [learn it|be able to do it]," said {n}[ sadly|].'),
            "[Then|But] {his} friend {fnk} said, \"[Nobody can do it the first time|Try again tomorrow|You only need to practise]. [I will help you|I believe in you].\"",
            "So {n} practised every [day|morning|evening], [in the sun and in the rain|even when {he} was tired|until {his} legs hurt].",
            (0.6, "Each day it went a little better. [First it was bad, then it was fine|{fn} clapped every time]."),
            "[At last|After two weeks|One bright morning], {he} did it! \"[Look|Look at me], {fn}! I can do it!\" [shouted|cried] {n}.",
            "{fn} [cheered|clapped|laughed for joy], and they had {food} to celebrate.",
        ),
        ("if you keep trying, you can learn almost anything", "practice makes hard things easy", "a good friend believes in you"),
    ),
    Plot(
        "a rescue",
        (
            "One [day|morning], {n} was walking [near|to] {place} when {he} heard someone [crying|call for help].",
            "It was {fa} named {fn}. {fHis} [foot|leg] was [stuck between two stones|caught in a rope|stuck in the mud].",
            '"Please help me," said {fn}. "[I have been here all night|I cannot get out]."',
            "{n} pulled [and pulled|as hard as {he} could], but [{he} was not strong enough|nothing moved].",
            "Then {he} had [an idea|a clever idea]. {He} [ran home and came back with a long rope|used a stick to move the stone|called all the neighbours].",
            "[One, two, three|Slowly, slowly], and [at last|suddenly] {fn} was free!",
            '"You saved me," said {fn}. "[How can I ever thank you|What can I give you]?"',
            '"[Just be my friend|You do not need to give me anything]," [said {n}|answered {n}].',
            (0.7, "Some days later, {n} [fell into the water|lost {his} way in the fog], and it was {fn} who [pulled {him} out|showed {him} the way home]."),
        ),
        ("when you help others, they will help you", "a clever idea can do more than strong arms", "no good deed is ever lost"),
    ),
    Plot(
        "a gift",
        (
            "[Tomorrow was|It was almost] the birthday of {his} best friend, {fa} named {fn}.",
            "{n} wanted to give {fhim} something [special|nice|beautiful], but {he} had no money.",
            (0.5, '"What can I do?" {he} [asked {himself}|wondered].'),
            "{He} walked to {place} and found [some {colour} flowers|a smooth {colour} stone|a pretty {colour} feather|a piece of {colour} ribbon].",
            "[All evening|The whole night], {n} [worked|cut and glued and painted]. In the end, there was a~ [small|lovely|funny] {thing}, made by hand.",
            "The next day, {fn} got many big presents. {n} was [worried|a little ashamed], because {his} present was so small.",
            "But when {fn} opened it, {fhis} eyes [were shining|grew wide]. \"[You made this for me|Did you make this yourself]? [I love it|It is the best present of all]!\"",
            "{n} [was very proud|blushed and smiled|felt warm inside]. They danced and ate {food}.",
        ),
        ("a gift from the heart is the best gift", "it is the thought that counts", "a present does not need to cost money"),
    ),
    Plot(
        "telling the truth",
        (
            "One [day|afternoon], {n} was playing [with {his} ball|inside the house] when, crash! The {colour} {fragile} of {his} [grandmother|mother|father|teacher] fell down and broke.",
            "Nobody had seen it. {n} [hid the pieces under the bed|quickly hid the pieces] and ran to {place}.",
            "There {he} met {his} friend {fnk}. But {n} could not [laugh|play|enjoy the game]. {His} tummy hurt.",
            '"What is wrong?" asked {fn}. So {n} told {fhim} everything.',
            '"[You must tell the truth|It is better to say it]," said {fn}. "[I will come with you|You will feel better then]."',
            "[Slowly|With a red face], {n} went home and said, \"I broke the {fragile}. I am very sorry.\"",
            "For a moment it was [quiet|very quiet]. Then {n} got a big hug. \"Thank you for telling [me|me the truth]. [We can mend it together|It was only a {fragile}].\"",
            (0.5, "They mended it with glue[, and {n} painted a little {colour2} star on it|], and {n} slept well that night."),
        ),
        ("the truth makes your heart light", "it is brave to say sorry", "everyone makes mistakes, and honest people mend them"),
    ),
    Plot(
        "a treasure",
        (
            "One [day|rainy day], {n} found [an old map in a bottle|a map inside an old book|a strange map] near {place}.",
            "There was a big red cross on it. \"[A treasure|It must be a treasure]!\" [said|whispered|cried] {n}.",
            "{He} [called|asked] {his} friend {fnk} to come along, and they packed {food} and a~ {colour} {thing}.",
            "First they [crossed the river|climbed over a tall fence|walked through the dark woods]. Then they came to {place2}.",
            (0.6, "It was a long way, and {fn} [grew tired|wanted to go home]. \"Only a little more,\" said {n}."),
            "At the red cross, they [dug a deep hole|moved a heavy stone|looked inside a hollow tree] and found a~ [wooden|rusty|small] box.",
            "Inside there was no gold. There was [a~ {colour2} {thing2} and a letter|only a letter]. It said, \"[The treasure is the friend who came with you|The real treasure is the way you walked together].\"",
            "{n} and {fn} looked at each other and laughed. [Then they ate {food} and went home|They walked home hand in hand, singing all the way].",
        ),
        ("a good friend is the greatest treasure", "the best part of a journey is the company", "not every treasure is made of gold"),
    ),
    Plot(
        "patience",
        (
            "In [spring|April|May], {n} planted a [tiny|small|brown] seed near {place}.",
            "{He} [gave it water|watered it] every [day|morning], but nothing [happened|came up].",
            '"It [does not|will not] grow," said {n}. "[I am tired of waiting|What a lazy seed]!"',
            "{His} friend {fn}, {fa}, [laughed|smiled]. \"[Good things need time|A seed works in secret]. [Wait a little|Have patience].\"",
            "So {n} waited. [It rained, and the sun shone, and it rained again|Days went by, and then weeks].",
            (0.6, "While {he} was waiting, {he} [learned a new song|made a~ {colour} {thing}|read a thick book]."),
            "Then, one morning, there was a small green [leaf|tip] in the ground! [It grew and grew|Every day it was a little taller].",
            "In summer, it was a~ [{colour} flower, as tall as a house|bush full of sweet berries|sunflower with a~ {colour} heart], and everyone came to see it.",
            "{n} gave the first [seed|flower|leaf] to {fn}. \"[You were right|Thank you for waiting with me],\" {he} said.",
        ),
        ("good things need time", "patience is rewarded in the end", "you cannot hurry a flower"),
    ),
    Plot(
        "finding the way home",
        (
            "One [day|afternoon], {n} went to {place} and [followed a {colour} butterfly|walked further than ever before|forgot the time].",
            "When {he} looked around, {he} did not know [where {he} was|the way home]. It was getting [dark|late and cold].",
            (0.5, '"[Hello|Is anybody here]?" {n} called, but [only the wind answered|nobody answered].'),
            "Then [two bright eyes looked out of a bush|there was a soft noise behind {him}]. It was {fa} named {fn}.",
            '"Are you lost?" asked {fn}. "Where do you live?" "In {home}," said {n}.',
            '"I know that place. [Follow the bright star|Come with me|Take my hand]," said {fn}, and they [set off|started walking].',
            "They [walked past {place2}|crossed a little bridge|went over a hill], and {fn} [sang a song|told funny jokes] so that {n} was not afraid.",
            "At last {n} saw [a light in the window|smoke above the roof|the door of {his} home]. \"We are here!\" {he} [shouted|cried].",
            "{His} family [hugged {him}|was so glad], and {fn} got {food} and a warm place by the fire.",
        ),
        ("there is always someone who knows the way", "it is good to have a friend in the dark", "it is wise not to go too far alone"),
    ),
    Plot(
        "a race",
        (
            "Once a year, there was a [big|great] race from {place} to {place2}.",
            "{fnk} was the fastest runner of all. \"[Nobody can beat me|I will win again|You are too slow, {n}],\" said {fn}[ and laughed|].",
            '{n} was not fast, but {he} [did not give up easily|wanted to try]. "I will do my best," {he} said.',
            "The race began. {fn} ran [like the wind|so fast that nobody could see {fhim}], and {n} was [far behind|the very last].",
            "Halfway, {fn} [lay down in the shade and fell asleep|stopped to eat {food}|stopped to look at {fhis} own face in the water].",
            "{n} went on, [step by step|slowly and steadily], [without looking back|past the trees and over the stones].",
            "When {fn} [woke up|saw {him}], it was too late. {n} [crossed the line first|had won the race]!",
            'Everyone cheered, and {n} got a~ {colour} {thing} as a prize. "[You did well|I was too proud]," said {fn}, and they [shook hands|became good friends].',
        ),
        ("slow and steady wins the race", "it is not kind to laugh at someone who is slow", "doing your best is what counts"),
    ),
    Plot(
        "a new idea",
        (
            "Every [winter|summer|year], the people of the place had the same problem: [the bridge was broken|the well was dry|the bells did not ring|it was too dark in the evening].",
            '"Nothing can be done," said the [mayor|old people|king|queen].',
            "But {n} [thought about it all night|sat at {place} and thought]. {He} had a~ {colour} {thing}, {food}, and a head full of ideas.",
            "In the morning, {he} asked {fnk} for help. \"[It sounds crazy|That will never work],\" said {fn}, \"but [let us try|I like it]!\"",
            "They [built|worked] [all day|for three days|from morning to night]. [People came and shook their heads|Some people laughed|Soon others came to help].",
            "And then it [was ready|worked]! [Everyone clapped|There was music and dancing|The people could not believe their eyes].",
            "\"How did you do it?\" asked the [mayor|king|queen|teacher]. \"[We just tried|I had a good helper|We asked a new question],\" said {n}.",
        ),
        ("a small idea can change a lot", "you never know until you try", "two heads are better than one"),
    ),
)  # fmt: skip
THEMES = tuple(plot.theme for plot in PLOTS)

ENDINGS = (
    "And so {n} learned that {moral}.",
    "{n} had learned that {moral}.",
    "That night, {n} [fell asleep with a smile|slept very well]. {He} knew now that {moral}.",
    "And they all lived happily ever after.",
    "The end.",
    "And if you [go|ever go] to {place}, you may [still see them there|hear them laughing].",
    "[Since then|To this day], {n} tells everyone that {moral}.",
    '{n} and {fn} were happy, and {his} [mother|father|grandmother] said, "You see, {moral}."',
    "It was the best day of {his} life.",
)


def make_story(
    dice: Dice,
    *,
    hero: Character | None = None,
    friend: Character | None = None,
    theme: str | None = None,
    home: str | None = None,
    short: bool = False,
    once: bool | None = None,
) -> Story:
    """Tell one story; whatever is not given is rolled.

    Args:
        short: leave out every beat that may be left out, and the lines that introduce the character.
        once: whether it must begin with "Once upon a time"; None leaves that to the dice.
    """
    hero = hero or make_character(dice)
    friend = friend or make_character(dice, other_than=hero.name)
    chosen = [plot for plot in PLOTS if plot.theme == theme] if theme else PLOTS
    plot = dice.pick(chosen)
    home = home or dice.pick(HOMES)
    place, place2 = dice.sample(PLACES, 2)
    thing, thing2 = dice.sample(THINGS, 2)
    colour, colour2 = dice.sample(COLOURS, 2)
    food, food2 = dice.sample(FOODS, 2)
    hobby, hobby2 = dice.sample(HOBBIES, 2)
    fields = hero.fields() | friend.fields("f")
    fields |= {"place": place, "place2": place2, "thing": thing, "thing2": thing2, "colour": colour, "colour2": colour2}
    fields |= {
        "food": food,
        "food2": food2,
        "hobby": hobby,
        "hobby2": hobby2,
        "home": home,
        "weather": dice.pick(WEATHERS),
    }
    fields |= {
        "trait": dice.pick(TRAITS),
        "flaw": dice.pick(FLAWS),
        "himself": "herself" if hero.is_female else "himself",
    }
    fields["fragile"] = dice.pick(("cup", "vase", "lamp", "plate", "teapot", "clock", "bowl", "mirror"))
    # "Victor the boy" would be odd; "Victor the owl" is right.
    fields["fnk"] = friend.name if friend.kind in ("girl", "boy") else f"{friend.name} the {friend.kind}"
    fields |= {"fa": f"a~ {friend.adjective} {friend.kind}", "fHis": friend.fields()["His"]}
    moral = dice.pick(plot.morals).format(**fields)
    fields["moral"] = moral

    def told(beats: tuple[Beat, ...]) -> list[str]:
        keep = 0.0 if short else 1.0
        return [
            dice.spin(beat if isinstance(beat, str) else beat[1])
            for beat in beats
            if isinstance(beat, str) or dice.chance(beat[0] * keep)
        ]

    is_once = dice.chance(0.7) if once is None else once
    lines = [dice.spin(dice.pick(ONCE_UPON_A_TIME if is_once else OPENINGS))]
    if not short:
        lines += told(CHARACTER_BEATS)
        if dice.chance(0.2):
            lines.append("{weather}.")
    lines += told(plot.beats)
    lines.append(dice.spin(dice.pick(ENDINGS)))
    text = fix_articles(_in_paragraphs(dice, lines).format(**fields))
    return Story(text, hero, friend, plot.theme, moral, home)


def _in_paragraphs(dice: Dice, lines: list[str]) -> str:
    """Join the lines with spaces, or now and then with a blank line between opening, middle and end."""
    if len(lines) < 8 or dice.chance(0.6):
        return " ".join(lines)
    first, last = dice.between(2, 3), len(lines) - dice.between(1, 3)
    return "\n\n".join(" ".join(part) for part in (lines[:first], lines[first:last], lines[last:]))
