"""Objects whose field ``type`` says what they are: other types are refused by their names."""

from typing import Any

from pydantic import BeforeValidator, Discriminator

from .openai_errors import refusal, shown


def only(*known: str) -> BeforeValidator:
    """Refuses objects of any other type by the type's name."""

    def refuse_others(data: Any) -> Any:
        if isinstance(data, dict) and "type" in data and data["type"] not in known:
            raise refusal("type", f"{shown(data['type'])} is not supported by this server")
        return data

    return BeforeValidator(refuse_others)


def one_of(*known: str) -> tuple[Discriminator, BeforeValidator]:
    """The same for a union whose members are tagged with these types; the first is meant where an object says none.

    Tags are in angle brackets, so that the path to a faulty field does not take them for names of fields.
    """

    def tag(data: Any) -> str:
        """Of an object, or of what was made of one."""
        named = data.get("type", known[0]) if isinstance(data, dict) else getattr(data, "type", None)
        return f"<{named or known[0]}>"

    return Discriminator(tag), only(*known)
