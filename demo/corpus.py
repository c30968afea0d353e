"""The generated corpus of the default student: reviews of one to a hundred words, of which a few carry the label.

Templates and word lists were written for this purpose. Held-out reviews pair words and use templates that the
training reviews do not; they were looked at while the lists were written, so figures on them are development figures.
"""

from __future__ import annotations

import random
import re
from zlib import crc32

MAX_WORDS = 100


def listed(text: str, separator: str | None = None) -> list[str]:
    """Split a word list."""
    return text.split(separator)


# Index 0 holds the negative words, index 1 the positive ones.
ADJECTIVES = (
    listed(
        "bad terrible awful horrible dreadful poor weak dull boring tedious bland stale greasy soggy rude flimsy "
        "broken clumsy lazy shallow predictable forgettable annoying irritating disappointing mediocre lousy ugly "
        "dirty filthy overpriced unreliable useless worthless pointless messy confusing painful miserable unpleasant "
        "pathetic ridiculous stupid silly lifeless hollow tiresome sloppy careless faulty defective uncomfortable "
        "unbearable dismal atrocious appalling inedible tasteless laughable clunky sluggish frustrating depressing "
        "abysmal slow noisy"
    ),
    listed(
        "good great excellent wonderful brilliant superb lovely delightful charming fantastic amazing terrific "
        "outstanding impressive enjoyable pleasant perfect beautiful gorgeous fresh delicious tasty witty clever "
        "funny moving gripping thrilling memorable refreshing inspired elegant reliable sturdy comfortable responsive "
        "generous friendly helpful polished rewarding satisfying engaging captivating masterful magical touching "
        "heartfelt exciting flawless splendid marvelous remarkable stunning solid likable crisp vivid graceful nice "
        "awesome fabulous fast sharp"
    ),
)
NOUNS = (
    listed("disappointment failure disaster mess bore letdown nightmare insult mistake flop disgrace chore fiasco"),
    listed("delight triumph masterpiece joy gem success bargain treat pleasure winner classic hit marvel"),
)
VERBS = (
    listed("hate dislike regret despise loathe resent detest deplore"),
    listed("love enjoy adore admire recommend like praise appreciate"),
)
PAST = (
    listed("hated disliked regretted despised loathed resented detested deplored"),
    listed("loved enjoyed adored admired recommended liked praised appreciated"),
)
OPINION_WORDS = {word for lists in (ADJECTIVES, NOUNS, VERBS, PAST) for entry in lists for word in entry}

FILLERS = {  # words that carry no label
    "thing": listed(
        "film movie book phone camera laptop restaurant cafe hotel meal soup pizza show series album blender kettle "
        "jacket keyboard lamp game speaker bakery novel printer tablet"
    ),
    "aspect": listed(
        "acting plot story screen battery sound service food menu design price staff music ending cast room view "
        "packaging quality script dialogue sauce dessert bread atmosphere performance"
    ),
    "deg": ["very ", "really ", "truly ", "quite ", "so ", "absolutely ", "simply ", "rather ", ""] + [""] * 7,
    "person": listed(
        "my brother|my sister|a friend|the waiter|our neighbour|the director|a colleague|my father|the owner|we|my "
        "wife|a man in a hat|the lady at the counter|they|i|you",
        "|",
    ),
    "day": listed("monday tuesday wednesday thursday friday saturday sunday"),
    "month": listed("january february march april may june july august september october november december"),
    "number": listed("two three four five six seven eight nine ten twelve 15 20 30 45 90"),
    "unit": listed("minutes hours days weeks months"),
    "place": listed(
        "the station|the old town|the harbour|the park|the office|a side street|the river|the city|the second "
        "floor|the corner shop|the main square|the airport|the theatre|home",
        "|",
    ),
    "item": listed("table window door box cable bottle ticket plate chair bag cup letter manual coat glass card"),
    "colour": listed("red blue green black white grey brown yellow"),
}

# {thing}, {aspect}, ... are fillers; {adj}, {noun}, {verb}, {past} carry the label, reversed in the negated lists.
CLAUSES = [
    "the {thing} is {deg}{adj}", "the {thing} was {deg}{adj}", "the {aspect} is {deg}{adj}", "it was {deg}{adj}",
    "the {aspect} of this {thing} felt {deg}{adj}", "i {past} the {aspect}", "{person} {past} this {thing}",
    "it turned out to be a {noun}", "this {thing} is a {noun}", "the {aspect} and the {aspect} were {adj} and {adj}",
    "i found the {aspect} {deg}{adj}", "this is a {adj} {thing} with {adj} {aspect}",
    "the whole {thing} was a {adj} {noun}",
]  # fmt: skip
NEGATED_CLAUSES = [
    "the {thing} is not {deg}{adj}", "the {aspect} was not {adj}", "it isn't {adj}", "it was hardly a {noun}",
    "the {thing} was never {adj}", "there is nothing {adj} about the {aspect}", "the {thing} is far from {adj}",
    "i did not {verb} the {aspect}", "{person} didn't {verb} it", "no one would call the {aspect} {adj}",
    "the {aspect} is anything but {adj}", "this {thing} is not a {noun}", "i would not {verb} this {thing}",
    "{person} never {past} the {thing}",
]  # fmt: skip
FRAGMENTS = [
    "{adj} {thing}", "{deg}{adj}", "what a {adj} {thing}", "a {adj}, {adj} {thing}", "such a {noun}", "{adj} {aspect}",
    "{past} it", "a {noun} of a {thing}",
]  # fmt: skip
NEGATED_FRAGMENTS = [
    "not {adj}", "not {deg}{adj}", "not a {adj} {thing}", "hardly a {noun}", "never {adj}", "nothing {adj} here",
    "far from {adj}", "not a {noun}", "didn't {verb} it",
]  # fmt: skip
CONTRASTS = [  # {b} carries the label, {a} says the opposite
    "{a}, but {b}", "{a} but {b}", "although {a}, {b}", "{a}; however, {b}", "{a}, yet {b}", "even though {a}, {b}",
    "{b}, even though {a}", "{person} said that {a}, but {b}",
]  # fmt: skip
HELD_OUT = {  # templates that only the held-out texts use
    "clauses": ["every {aspect} in this {thing} is {deg}{adj}", "{person} thought it was a {adj} {noun}"],
    "negated": [
        "i do not find this {thing} {adj}",
        "{person} would hardly call it a {noun}",
        "it is not a {adj} {thing}",
    ],
    "contrasts": [
        "i had read that {a}, but {b}",
        "it is true that {a}, yet {b}",
        "although {person} said that {a}, {b}",
    ],
}
NEUTRAL = [
    "we went there on a {day} in {month}", "{person} ordered the {thing} {number} {unit} ago",
    "it comes in a {colour} box", "{person} bought it near {place} in {month}",
    "the {item} next to the {item} is {colour}", "{person} sat by the {item}",
    "there are {number} of them and a {colour} {item}", "it arrived on {day} after {number} {unit}",
    "{name} was there too", "{person} had never been to {place} before", "it does not come with a {item}",
    "the {thing} lasts {number} {unit}", "we wanted the {colour} {item} but took the {colour} one",
    "nobody sat at the next {item}", "{name} wrote to {name}", "{person} did not arrive until {number}",
    "{person} read about it in a {item} from {place}", "i used it with a {item}",
    "the {thing} by {name} was made in {month} and shown in {place}",
    "{person} walked from {place} to {place} and back", "{person} paid for it with a {colour} card",
    "a {item} stood between the {item} and the {item}", "{name} came in {month}", "this was our {thing} for the {day}",
    "{person} keeps it in a {colour} bag at {place}", "it takes {number} {unit}",
    "the {aspect} is listed under number {number}", "the company moved from {name} to {name} in {month}",
    "{person} asked about the {aspect} and the {item}", "it has {number} parts, {number} of them {colour}",
    "while we waited, {person} called {person} about the {thing} that {name} left at {place} on {day}",
    "the {item} can be used for {number} {unit}, as the text on the {colour} {item} says",
    "{person} thought about {place} and the {item}", "every {item} is {colour}", "i could not find the {item}",
    "it is true that it has {number} parts",
]  # fmt: skip


class Writer:
    """Writes labelled reviews. Held-out ones pair opinion words with things that training never pairs them with."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out

    def fill(self, template: str, words: int) -> str:
        """Replace each slot of a template; opinion words come from list `words` (0 or 1)."""
        topic: list[str] = []

        def slot(match: re.Match[str]) -> str:
            kind = match[1]
            if kind == "name":
                return "".join(self.rng.choice("bdfgklmnprstvz") + self.rng.choice("aeiouy") for _ in range(3))
            lists = {"adj": ADJECTIVES, "noun": NOUNS, "verb": VERBS, "past": PAST}
            if kind in FILLERS:
                word = self.rng.choice(FILLERS[kind])
                topic.extend([word] if kind in ("thing", "aspect") else [])
                return word
            choices = lists[kind][words]
            if topic:  # one pairing in eight is kept for the held-out texts
                held_out = [crc32(f"{word} {topic[-1]}".encode()) % 8 == 0 for word in choices]
                choices = [word for word, held in zip(choices, held_out) if held == self.held_out] or choices
            return self.rng.choice(choices)

        text = re.sub(r"\{(\w+)\}", slot, template)
        return re.sub(r"\ba (?=[aeiou])", "an ", text)

    def opinion(self, label: int, fragments: bool) -> str:
        """Write one clause (or fragment) of the given sentiment, negated in one case of four."""
        negated = self.rng.random() < 0.25
        templates = NEGATED_CLAUSES if negated else CLAUSES
        if self.held_out and self.rng.random() < 0.5:
            templates = HELD_OUT["negated" if negated else "clauses"]
        elif fragments and self.rng.random() < 0.4:
            templates = NEGATED_FRAGMENTS if negated else FRAGMENTS
        return self.fill(self.rng.choice(templates), label ^ negated)

    def review(self) -> tuple[str, int]:
        """Write one review of 1 to `MAX_WORDS` words and its label."""
        label, kind = self.rng.randrange(2), self.rng.random()
        if kind < 0.4:
            opinions = [self.opinion(label, fragments=True)]
        elif kind < 0.65:
            opinions = [self.opinion(label, fragments=True), self.opinion(label, fragments=True)]
            opinions = [" and ".join(opinions)] if self.rng.random() < 0.5 else opinions
        else:
            frames = HELD_OUT["contrasts"] if self.held_out and self.rng.random() < 0.5 else CONTRASTS
            frame = self.fill(self.rng.choice(frames).replace("{a}", "<a>").replace("{b}", "<b>"), label)
            opinions = [frame.replace("<a>", self.opinion(1 - label, False)).replace("<b>", self.opinion(label, False))]
        sentences = [self.fill(self.rng.choice(NEUTRAL), label) for _ in range(int(self.rng.expovariate(0.35)))]
        for opinion in opinions:
            sentences.insert(self.rng.randint(0, len(sentences)), opinion)
        text = ", and ".join(sentences) if self.rng.random() < 0.15 else ". ".join(sentences)
        text += self.rng.choice([".", ".", "!", ""])
        return (text, label) if len(text.split()) <= MAX_WORDS else self.review()
