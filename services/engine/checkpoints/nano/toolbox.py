# ruff: noqa: SIM905 (word lists read better as text)
"""Tool declarations, everyday and made up, with questions that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from services.engine.checkpoints.nano.words import (
    CITIES,
    FIRST_NAMES,
    THINGS,
    name,
    number,
    phrase,
    pseudo_word,
    word,
)

Value = str | int | bool
Draw = Callable[[Random], Value]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: JSON type, description and how a value is drawn.

    `values` are the only ones allowed. A parameter that is not `asked` is declared, but no question
    gives it a value, so that a call must leave it out.
    """

    name: str
    type: str
    about: str
    draw: Draw
    values: tuple[str, ...] = ()
    asked: bool = True

    def schema(self, rng: Random, described: bool) -> dict[str, Any]:
        """Return its JSON schema."""
        out: dict[str, Any] = {"type": self.type}
        if described:
            out["description"] = self.about
        if self.values and rng.random() < 0.7:
            out["enum"] = list(self.values)
        return out


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with the question forms that use it; a form may leave parameters out."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]

    def declaration(self, rng: Random) -> dict[str, Any]:
        """Return the OpenAI tool object; optional fields and their order vary."""
        described = rng.random() < 0.7
        properties = {p.name: p.schema(rng, described) for p in self.parameters}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.8:
            schema["required"] = [p.name for p in self.parameters if p.asked]
        if rng.random() < 0.15:
            schema["additionalProperties"] = False
        function: dict[str, Any] = {"name": self.name}
        if self.about and rng.random() < 0.9:
            function["description"] = self.about
        function["parameters"] = schema
        return {"type": "function", "function": function}


def _city(rng: Random) -> str:
    return name(rng, CITIES)


def _person(rng: Random) -> str:
    return name(rng, FIRST_NAMES)


def _mail(rng: Random) -> str:
    return f"{_person(rng).lower()}@{pseudo_word(rng)}.{rng.choice(('com', 'org', 'net'))}"


def _text(rng: Random) -> str:
    return phrase(rng, 1, 5)


def _small(rng: Random) -> int:
    return rng.randint(1, 20)


def _integer(rng: Random) -> int:
    return number(rng, 4)


def _boolean(rng: Random) -> bool:
    return rng.random() < 0.5


def _choice(title: str, about: str, *values: str) -> Parameter:
    return Parameter(title, "string", about, lambda rng: rng.choice(values), values)


EVERYDAY = (
    Tool("get_weather", "Get the weather of a city.",
         (Parameter("city", "string", "Name of the city", _city),),
         ("What is the weather in {city}?", "How is the weather in {city}?",
          "What's the weather like in {city}?", "Weather in {city}?", "Is it raining in {city}?",
          "Tell me the weather in {city}.", "What is the weather in {city} today?")),
    Tool("get_weather", "Get the weather forecast.",
         (Parameter("city", "string", "City", _city),
          _choice("unit", "celsius or fahrenheit", "celsius", "fahrenheit")),
         ("What is the weather in {city} in {unit}?", "Weather in {city}, in {unit}, please.")),
    Tool("get_weather", "Get the current weather.",
         (Parameter("location", "string", "The location", _city),),
         ("What is the weather in {location}?", "What's the weather like in {location}?",
          "How is the weather in {location}?")),
    Tool("get_temperature", "Get the temperature of a city.",
         (Parameter("city", "string", "City", _city), Parameter("days", "integer", "Days", _small)),
         ("What is the temperature in {city} in {days} days?",
          "Temperature of {city} {days} days from now?")),
    Tool("get_time", "Get the current time in a city.",
         (Parameter("city", "string", "City", _city),),
         ("What time is it in {city}?", "Tell me the time in {city}.", "Current time in {city}?")),
    Tool("add", "Add two numbers.",
         (Parameter("a", "integer", "First number", _integer),
          Parameter("b", "integer", "Second number", _integer)),
         ("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool.",
          "Call add for {a} and {b}.")),
    Tool("search", "Search the web.", (Parameter("query", "string", "What to search for", _text),),
         ("Search for {query}", "Search the web for {query}", "Look up {query}", "Find {query}")),
    Tool("send_email", "Send an email.",
         (Parameter("to", "string", "Address", _mail),
          Parameter("subject", "string", "Subject line", _text)),
         ("Send an email to {to} with subject {subject}", "Email {to} about {subject}",
          "Write an email to {to}, subject: {subject}")),
    Tool("set_alarm", "Set an alarm.",
         (Parameter("hour", "integer", "Hour", lambda rng: rng.randint(0, 23)),
          Parameter("minute", "integer", "Minute", lambda rng: rng.randint(0, 59))),
         ("Set an alarm for hour {hour} minute {minute}.", "Wake me at {hour}:{minute}.",
          "Set an alarm at {hour}:{minute}.")),
    Tool("turn_on", "Turn a device on.",
         (Parameter("device", "string", "Device", lambda rng: rng.choice(THINGS)),),
         ("Turn on the {device}.", "Switch on the {device}.", "Please turn on the {device}.")),
    Tool("set_light", "Switch a light.",
         (_choice("room", "Room", "kitchen", "hall", "office", "garage", "attic"),
          Parameter("on", "boolean", "On or off", _boolean)),
         ("Set the light in the {room} to {on}.", "Light in the {room}: {on}.")),
    Tool("book_table", "Book a table in a restaurant.",
         (Parameter("restaurant", "string", "Restaurant", _person),
          Parameter("people", "integer", "Number of people", _small)),
         ("Book a table for {people} people at {restaurant}.",
          "Reserve a table at {restaurant} for {people}.")),
    Tool("play_music", "Play a song.", (Parameter("song", "string", "Song", _text),),
         ("Play {song}", "Play the song {song}", "I want to hear {song}")),
    Tool("get_price", "Get the price of an item.",
         (Parameter("item", "string", "Item", lambda rng: rng.choice(THINGS)),),
         ("What does the {item} cost?", "What is the price of the {item}?", "Price of a {item}?")),
    Tool("read_file", "Read a file.",
         (Parameter("path", "string", "Path of the file",
                    lambda rng: f"/{pseudo_word(rng)}/{pseudo_word(rng)}.txt"),),
         ("Read the file {path}", "Show me {path}", "Open {path}")),
    Tool("get_time", "Get the current time.", (), ("What time is it?", "Tell me the time.")),
)  # fmt: skip

_TYPES: tuple[tuple[str, Draw], ...] = (
    ("string", _city),
    ("string", lambda rng: word(rng)),
    ("string", lambda rng: phrase(rng, 2, 3)),
    ("integer", _integer),
    ("integer", _small),
    ("boolean", _boolean),
)
_NAMES = (
    "city color count size name user id date title text level mode status width height limit page "
    "topic place amount code key value target source path label rank speed price item"
).split()
_VERBS = "get find set make open close send list check load save move update create delete".split()
_CALLS = (
    "Call {tool} with {arguments}.",
    "Use {tool} with {arguments}.",
    "Please call {tool} with {arguments}.",
    "Run {tool} with {arguments}.",
    "I need {tool} with {arguments}.",
)


def made_up_tool(rng: Random) -> Tool:
    """Return a tool with random name and parameters; its questions name every argument."""
    if rng.random() < 0.5:
        tool_name = f"{rng.choice(_VERBS)}_{word(rng)}"
    else:
        tool_name = pseudo_word(rng, rng.choice((2, 3)))
    parameters: list[Parameter] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3))):
        kind, value = rng.choice(_TYPES)
        title = rng.choice(_NAMES) if rng.random() < 0.7 else pseudo_word(rng, 2)
        if all(title != p.name for p in parameters):
            parameters.append(Parameter(title, kind, phrase(rng, 1, 3), value))
    style = rng.choice(("{n} {{{n}}}", "{n} = {{{n}}}", "{n}={{{n}}}", "{n}: {{{n}}}"))
    shown = [style.format(n=p.name) for p in parameters]
    arguments = ", ".join(shown) if rng.random() < 0.5 else " and ".join(shown)
    forms = _CALLS if parameters else ("Call {tool}.", "Run {tool} now.", "Use {tool}.")
    question = rng.choice(forms).format(tool=tool_name, arguments=arguments)
    about = phrase(rng, 2, 5).capitalize() + "." if rng.random() < 0.7 else ""
    return Tool(tool_name, about, tuple(parameters), (question,))


_OTHER_NAMES = {
    "city": "city_name town place location destination where",
    "location": "city place region address where",
    "query": "q text search_query question keywords",
    "to": "recipient address email receiver",
    "subject": "title topic headline",
    "song": "title track song_name",
    "path": "file filename file_path",
    "item": "product article item_name",
    "device": "name appliance device_name",
    "a": "x first left number1",
    "b": "y second right number2",
}
_NOT_ASKED = (
    _choice("unit", "Unit", "celsius", "fahrenheit"),
    _choice("units", "Units", "metric", "imperial"),
    _choice("language", "Language", "en", "de", "fr"),
    _choice("sort", "Order", "asc", "desc"),
    _choice("mode", "Mode", "fast", "slow", "auto"),
    Parameter("limit", "integer", "Number of results", _small),
    Parameter("timeout", "integer", "Seconds", _small),
    Parameter("verbose", "boolean", "More output", _boolean),
    Parameter("note", "string", "Note", _text),
)


def _renamed(rng: Random, tool: Tool) -> Tool:
    """Return the tool with other parameter names, which only its declaration tells."""
    questions, parameters = tool.questions, list[Parameter]()
    for p in tool.parameters:
        known = _OTHER_NAMES.get(p.name, p.name).split()
        title = rng.choice(known) if rng.random() < 0.7 else pseudo_word(rng, 2)
        if any(title == other.name for other in (*parameters, *tool.parameters)):
            title = p.name
        questions = tuple(q.replace("{" + p.name + "}", "{" + title + "}") for q in questions)
        parameters.append(replace(p, name=title))
    return replace(tool, parameters=tuple(parameters), questions=questions)


def _with_optional(rng: Random, tool: Tool) -> Tool:
    """Return the tool with one or two further parameters that no question mentions."""
    taken = {p.name for p in tool.parameters}
    spare = [p for p in _NOT_ASKED if p.name not in taken]
    parameters = [*tool.parameters]
    for p in rng.sample(spare, rng.choice((1, 1, 2))):
        # Mostly at the end. The others keep their order: it decides the split.
        at = len(parameters) if rng.random() < 0.8 else rng.randint(0, len(parameters))
        parameters.insert(at, replace(p, asked=False))
    return replace(tool, parameters=tuple(parameters))


def any_tool(rng: Random) -> Tool:
    """Return an everyday tool or a made-up one, often with a changed declaration."""
    tool = rng.choice(EVERYDAY) if rng.random() < 0.5 else made_up_tool(rng)
    if rng.random() < 0.4:
        tool = _renamed(rng, tool)
    return _with_optional(rng, tool) if rng.random() < 0.3 else tool
