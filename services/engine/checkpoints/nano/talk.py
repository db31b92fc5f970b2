"""Small talk, counting and repeating, so that the default model answers everyday prompts."""

from __future__ import annotations

from random import Random

from services.engine.checkpoints.nano.conversation import Message
from services.engine.checkpoints.nano.words import (
    CITIES,
    COMMON,
    FIRST_NAMES,
    Split,
    draw,
    number,
    phrase,
    word,
)

_WHO = (
    "I am the nano model of Warhorse, a very small language model. I can add and subtract, call "
    "tools and answer questions about a short text."
)
_LIMIT = (
    "I am a very small model and I do not know that. I can add and subtract, call tools and answer "
    "questions about a short text."
)
_SMALL_TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "hello", "hi", "Good morning!",
         "Good evening", "Hello there!", "Say hello.", "Say hi"),
        "A greeting.", "Hello! How can I help you?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
         "Introduce yourself.", "Which model are you?", "Who made you?", "what model is this?"),
        "A question about me.", _WHO,
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "What are you able to do?", "help"),
        "A question about what I can do.",
        "I can add and subtract numbers, call the tools that you declare and answer questions "
        "about a short text.",
    ),
    (
        ("How are you?", "How are you doing?", "How do you do?", "Are you well?"),
        "A polite question.", "I am fine, thank you. How can I help you?",
    ),
    (
        ("Thanks", "Thank you!", "Thank you.", "Thanks a lot!", "Great, thanks."),
        "The user thanks me.", "You are welcome!",
    ),
    (
        ("Bye", "Goodbye!", "Bye bye", "See you later.", "Good night!"),
        "The user says goodbye.", "Goodbye!",
    ),
    (
        ("What is Warhorse?", "Tell me about Warhorse.", "What does Warhorse do?"),
        "A question about Warhorse.",
        "Warhorse serves large language models on older graphics cards.",
    ),
    (
        ("Are you there?", "ping", "test", "Test.", "This is a test.", "Are you ready?"),
        "A check.", "Yes, I am here.",
    ),
)  # fmt: skip
_UNKNOWN = (
    "Tell me a {w}.", "Write a {w} about {p}.", "What is the capital of {c}?", "Explain {p}.",
    "Who was {n}?", "Why is the {w} {w2}?", "How do I {p}?", "Give me {p}.", "Translate {p}.",
    "What is {w}?", "When was {c} founded?", "Tell me about {p}.", "{p}", "{p}?", "Can you {p}?",
    "Write {p}.", "Summarise {p}.", "What do you think about {p}?", "Is {w} better than {w2}?",
)  # fmt: skip
_COUNT = ("Count from {a} to {b}.", "Please count from {a} to {b}.", "Count {a} to {b}")
_REPEAT = (
    "Repeat: {t}", "Repeat after me: {t}", "Say: {t}", "Please repeat: {t}", 'Say "{t}"',
    "Echo {t}", "Write this again: {t}",
)  # fmt: skip


def _small_talk(rng: Random) -> list[Message]:
    questions, reasoning, answer = rng.choice(_SMALL_TALK)
    return [
        Message("user", rng.choice(questions)),
        Message("assistant", answer, reasoning=reasoning),
    ]


def _unknown(rng: Random) -> list[Message]:
    question = rng.choice(_UNKNOWN).format(
        w=rng.choice(COMMON), w2=rng.choice(COMMON), p=phrase(rng, 2, 9), c=rng.choice(CITIES),
        n=rng.choice(FIRST_NAMES),
    )  # fmt: skip
    return [
        Message("user", question),
        Message("assistant", _LIMIT, reasoning="I do not know that."),
    ]


def _count(rng: Random, split: Split) -> list[Message]:
    def sample() -> tuple[int, int]:
        start = number(rng, 3)
        return start, start + rng.choice((4, 8, 12, 20, 40, 60)) - rng.randint(0, 3)

    a, b = draw(split, sample, lambda item: ("count", *item))
    return [
        Message("user", rng.choice(_COUNT).format(a=a, b=b)),
        Message("assistant", " ".join(map(str, range(a, b + 1))), reasoning=f"From {a} up to {b}."),
    ]


def random_text(rng: Random) -> str:
    """Return a short text of words, numbers and marks, made for copying."""
    parts = []
    for _ in range(rng.randint(1, 12)):
        roll = rng.random()
        if roll < 0.7:
            text = word(rng)
            parts.append(text.capitalize() if rng.random() < 0.2 else text)
        elif roll < 0.85:
            parts.append(str(number(rng, 5)))
        else:
            parts.append(word(rng) + rng.choice(".,!?:;"))
    return " ".join(parts)


def _repeat(rng: Random, split: Split) -> list[Message]:
    text = draw(split, lambda: random_text(rng), lambda item: ("repeat", item))
    return [
        Message("user", rng.choice(_REPEAT).format(t=text)),
        Message("assistant", text, reasoning="I repeat the text."),
    ]


def talk_exchange(rng: Random, split: Split) -> list[Message]:
    """Return small talk, an unanswerable question, counting or repeating."""
    roll = rng.random()
    if roll < 0.25:
        return _small_talk(rng)
    if roll < 0.4:
        return _unknown(rng)
    return _count(rng, split) if roll < 0.55 else _repeat(rng, split)
