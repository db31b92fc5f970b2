"""Short passages of fixed-form sentences and questions about one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from services.engine.checkpoints.nano.conversation import Message
from services.engine.checkpoints.nano.words import (
    CITIES,
    COLORS,
    FIRST_NAMES,
    FOODS,
    JOBS,
    ROOMS,
    THINGS,
    Split,
    draw,
    is_held_out,
    name,
)


@dataclass(frozen=True, slots=True)
class Relation:
    """A sentence form with the question for its object and the question for its subject."""

    kind: str
    sentence: str
    ask_object: str
    ask_subject: str
    subject: Callable[[Random], str]
    object: Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence of a passage."""

    relation: Relation
    subject: str
    object: str

    @property
    def sentence(self) -> str:
        return self.relation.sentence.format(s=self.subject, o=self.object)


def _key(fact: Fact) -> tuple[object, ...]:
    return "passage", fact.relation.kind, fact.subject, fact.object


def _person(rng: Random) -> str:
    return name(rng, FIRST_NAMES)


def _thing(rng: Random) -> str:
    return f"{rng.choice(COLORS)} {rng.choice(THINGS)}"


RELATIONS = (
    Relation("home", "{s} lives in {o}.", "Where does {s} live?", "Who lives in {o}?", _person,
             lambda rng: name(rng, CITIES)),
    Relation("owns", "{s} owns a {o}.", "What does {s} own?", "Who owns the {o}?", _person, _thing),
    Relation("likes", "{s} likes {o}.", "What does {s} like?", "Who likes {o}?", _person,
             lambda rng: rng.choice(FOODS)),
    Relation("job", "{s} works as a {o}.", "What is the job of {s}?", "Who works as a {o}?",
             _person, lambda rng: rng.choice(JOBS)),
    Relation("from", "{s} comes from {o}.", "Where does {s} come from?", "Who comes from {o}?",
             _person, lambda rng: name(rng, CITIES)),
    Relation("age", "{s} is {o} years old.", "How old is {s}?", "Who is {o} years old?", _person,
             lambda rng: str(rng.randint(10, 99))),
    Relation("place", "The {s} is in the {o}.", "Where is the {s}?", "What is in the {o}?", _thing,
             lambda rng: rng.choice(ROOMS)),
    Relation("color", "The {s} is {o}.", "What color is the {s}?", "What is {o}?",
             lambda rng: rng.choice(THINGS), lambda rng: rng.choice(COLORS)),
)  # fmt: skip

_FRAMES = (
    "{passage}\n{question}",
    "{passage}\n\n{question}",
    "{passage} {question}",
    "Read this: {passage}\n{question}",
    "Passage: {passage}\nQuestion: {question}",
    "Text: {passage}\n\nQuestion: {question}",
    "Here is a text.\n{passage}\nAnswer this: {question}",
)


def _fact(rng: Random) -> Fact:
    relation = rng.choice(RELATIONS)
    return Fact(relation, relation.subject(rng), relation.object(rng))


def _passage(rng: Random, asked: Fact, sentences: int) -> list[Fact]:
    """Return facts with `asked` among them; no other fact answers a question about it."""
    facts = [asked]
    while len(facts) < sentences:
        fact = _fact(rng)
        if rng.random() < 0.3:  # something else about a subject that the passage has already
            other = rng.choice(facts)
            if other.relation.subject is fact.relation.subject:
                fact = Fact(fact.relation, other.subject, fact.object)
        clash = any(
            f.relation is fact.relation and (f.subject == fact.subject or f.object == fact.object)
            for f in facts
        )
        if not clash:
            facts.append(fact)
    rng.shuffle(facts)
    return facts


def _ask(rng: Random, fact: Fact) -> tuple[str, Message]:
    relation = fact.relation
    reverse = relation.kind != "color" and rng.random() < 0.35
    form = relation.ask_subject if reverse else relation.ask_object
    question = form.format(s=fact.subject, o=fact.object)
    the = "The " if relation.kind == "place" and reverse else ""
    value = f"{the}{fact.subject if reverse else fact.object}"
    answer = Message("assistant", f"{value}.", reasoning=f"The text says: {fact.sentence}")
    return question, answer


def sentence_count(rng: Random) -> int:
    """Return how many sentences a passage has: mostly 2 to 5, sometimes up to 60."""
    if rng.random() < 0.7:
        return rng.randint(2, 5)
    return rng.choice((8, 12, 16, 24, 32, 40, 48, 60))


def passage_exchange(rng: Random, split: Split, sentences: int) -> list[Message]:
    """Return one passage with a question about one of its facts, and at times a second question.

    The fact asked about decides the side of the split.
    """
    asked = draw(split, lambda: _fact(rng), _key)
    facts = _passage(rng, asked, sentences)
    question, answer = _ask(rng, asked)
    text = " ".join(fact.sentence for fact in facts)
    first = rng.choice(_FRAMES).format(passage=text, question=question)
    messages = [Message("user", first), answer]
    if split is Split.TRAIN and rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            fact = rng.choice(facts)
            if not is_held_out(*_key(fact)):
                again, reply = _ask(rng, fact)
                messages += [Message("user", again), reply]
    return messages
