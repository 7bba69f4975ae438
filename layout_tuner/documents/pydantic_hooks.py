"""Hooks by which pydantic validates dataclasses of this package, which do not import pydantic.

The API validates the messages of workers with pydantic. Limits of numbers and lengths are
`annotated_types`, which pydantic knows. The classes here say the rest. pydantic calls
`__get_pydantic_core_schema__` and takes a schema as a plain dict
(https://docs.pydantic.dev/latest/concepts/types/#customizing-validation-with-__get_pydantic_core_schema__).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class StrictMessage:
    """Base of dataclasses that clients send; unknown fields and wrong types are refused."""

    __slots__ = ()
    __pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # noqa: RUF012

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(source)
        # The fields are strict. A strict dataclass would accept instances only, and no mapping.
        handler.resolve_ref_schema(schema)["strict"] = False
        return schema


@dataclass(frozen=True, slots=True)
class Refuses:
    """Annotates a field that a rule is applied to once its type is right."""

    problem: Callable[[Any], str | None]
    """Returns what is wrong with the value, or None."""

    def check(self, value: Any) -> Any:
        """The value itself. Raises ValueError if the rule refuses it."""
        if problem := self.problem(value):
            raise ValueError(problem)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": function, "schema": handler(source)}


@dataclass(frozen=True, slots=True)
class StopsAtFirstError:
    """Annotates a list of which the first wrong item alone is reported, however long it is."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {**handler(source), "fail_fast": True}


@dataclass(frozen=True, slots=True)
class ReadWith:
    """Annotates a field that a function of ours reads and checks, and not pydantic."""

    read: Callable[[Any], Any]
    """Builds the value from a mapping; raises `ValueError` for one that is not acceptable."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        function = {"type": "no-info", "function": self.read}
        described = handler(source)  # for the OpenAPI document
        return {
            "type": "function-plain",
            "function": function,
            "json_schema_input_schema": described,
        }
