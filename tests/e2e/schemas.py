"""Random JSON schemas of moderate size, and whether what they describe is bounded."""

from dataclasses import dataclass
from random import Random
from typing import Any

Json = dict[str, Any]
WORDS = ("name", "age", "city", "tags", "size", "owner", "is_open", "price", "kind", "note", "from", "to")
PATTERNS = ("^[A-Z][a-z]{1,6}$", "^[0-9]{3}-[0-9]{2}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$")
FORMATS = ("date", "ipv4", "uuid")
MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class RandomSchema:
    """``is_bounded`` is false where a text, a number or a list may go on for ever."""

    schema: Json
    is_bounded: bool


class _Author:
    def __init__(self, random: Random) -> None:
        self._random = random
        self.is_bounded = True
        self.definitions: Json = {}

    def object(self, depth: int) -> Json:
        random = self._random
        names = random.sample(WORDS, random.randint(1, 4 if depth else 5))
        required = [name for name in names if random.random() < 0.7]
        properties = {name: self.any(depth + 1) for name in names}
        made: Json = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**made, "required": required} if required else made

    def array(self, depth: int) -> Json:
        least = self._random.randint(0, 2)
        made: Json = {"type": "array", "items": self.any(depth + 1), "minItems": least}
        if self._random.random() < 0.05:
            self.is_bounded = False
            return made
        return {**made, "maxItems": least + self._random.randint(0, 2)}

    def string(self) -> Json:
        random = self._random
        match random.randrange(20):
            case 0:
                self.is_bounded = False
                return {"type": "string"}
            case n if n < 6:
                return {"type": "string", "pattern": random.choice(PATTERNS)}
            case n if n < 9:
                return {"type": "string", "format": random.choice(FORMATS)}
            case _:
                least = random.randint(0, 3)
                return {"type": "string", "minLength": least, "maxLength": least + random.randint(1, 9)}

    def number(self) -> Json:
        random = self._random
        least = random.randint(-50, 1000)
        match random.randrange(10):
            case 0:
                self.is_bounded = False
                return {"type": "number", "minimum": least}
            case 1:
                return {"type": "integer", "minimum": 0, "maximum": 300, "multipleOf": random.choice((2, 5, 7))}
            case 2:
                return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + random.randint(2, 99)}
            case _:
                return {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 5000)}

    def leaf(self) -> Json:
        random = self._random
        match random.randrange(8):
            case 0:
                return {"type": random.choice(("boolean", "null"))}
            case 1:
                return {"enum": random.sample(["a", "b c", "é", 1, 2.5, True, None, [1], {"x": []}], 3)}
            case 2:
                return {"const": random.choice([0, 'it\'s "so"\n', {"k": [1, None]}, False])}
            case n if n < 5:
                return self.number()
            case _:
                return self.string()

    def any(self, depth: int) -> Json:
        random = self._random
        if depth >= MAX_DEPTH or random.random() < 0.6:
            return self.leaf()
        match random.randrange(6):
            case 0:
                return {"anyOf": [self.leaf(), self.any(depth + 1)]}
            case 1:
                name = f"d{len(self.definitions)}"
                self.definitions[name] = {}
                self.definitions[name] = self.any(depth + 1)
                return {"$ref": f"#/$defs/{name}"}
            case 2:
                return {"type": ["null", "boolean"], "description": "either"}
            case 3:
                return self.object(depth)
            case _:
                return self.array(depth)


def random_schema(seed: int) -> RandomSchema:
    """The same for the same seed."""
    author = _Author(Random(seed))
    schema = author.object(0)
    if author.definitions:
        schema["$defs"] = author.definitions
    return RandomSchema(schema, author.is_bounded)
