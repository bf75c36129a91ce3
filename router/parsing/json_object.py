"""JSON objects in text that comes in pieces: where they end, and what calls they spell."""

import re
from collections.abc import Container
from dataclasses import dataclass

import orjson

_STRUCTURE = re.compile(r'["\\{}\[\]]')

_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""What nearly all models write before the arguments: they can be passed on while they come."""


_FIRST_MEMBER = re.compile(r'\{\s*"(?P<key>[^"\\]*)"(?:\s*:\s*"(?P<text>[^"\\]*)")?')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class ObjectScanner:
    """Finds the end of a JSON object. Told apart are only strings, brackets and the rest; nothing is validated."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """How much of ``text`` belongs to the object, its last bracket included; ``None`` if all does and more follows.

        The first text begins with the object's first bracket.
        """
        position = 0
        if self._is_escaped and text:
            self._is_escaped, position = False, 1
        while (found := _STRUCTURE.search(text, position)) is not None:
            position = found.end()
            if self._is_in_string:
                if found[0] == "\\":
                    self._is_escaped = position == len(text)
                    position += 1
                self._is_in_string = found[0] != '"'
            elif found[0] == '"':
                self._is_in_string = True
            elif found[0] != "\\":
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


@dataclass(frozen=True, slots=True)
class CallHead:
    """The beginning of a call up to its arguments, ``num_chars`` long; ``name`` is a function that may be called."""

    name: str
    num_chars: int


def read_head(text: str, names: Container[str]) -> CallHead | None:
    """``None`` where the text begins otherwise, or is not long enough to tell."""
    found = _HEAD.match(text)
    if found is None or found["name"] not in names:
        return None
    return CallHead(found["name"], found.end())


def is_other_object(text: str, names: Container[str]) -> bool:
    """Whether the first member says already that this is no call of a function that may be called."""
    found = _FIRST_MEMBER.match(text)
    if found is None:
        return False
    key, value = found["key"], found["text"]
    return key not in _KEYS or (key == "name" and value is not None and value not in names)


@dataclass(frozen=True, slots=True)
class SpelledCall:
    """A call whose members stand in another order. ``arguments`` is JSON text."""

    name: str
    arguments: str


def read_call(text: str, names: Container[str]) -> SpelledCall | None:
    """A whole object; ``None`` where it is no call of a function that may be called."""
    spelled = _object(text)
    if spelled is None:
        return None
    name = spelled.get("name")
    arguments = spelled.get("arguments", spelled.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = _object(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return SpelledCall(name, orjson.dumps(arguments).decode())


def is_object(text: str) -> bool:
    """Whether the text is a valid JSON object."""
    return _object(text) is not None


def _object(text: str) -> dict[str, object] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
