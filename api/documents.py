"""Reading documents that people write, JSON or YAML: strict, and with the line of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any, Final, NoReturn

import yaml

from api.errors import DocumentMalformedError

JSON_TYPE: Final = "application/json"
YAML_TYPES: Final = (
    "application/yaml",
    "application/x-yaml",
    "text/yaml",
    "text/x-yaml",
)


def read_json(body: bytes) -> Any:
    """Parses JSON.

    Raises:
        DocumentMalformedError: it is not JSON, names a field twice, or holds NaN or infinity.
    """
    try:
        return json.loads(
            _text(body), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise DocumentMalformedError(
            f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise DocumentMalformedError(f"malformed JSON: {error}") from error
    except RecursionError as error:
        raise DocumentMalformedError("malformed JSON: it is nested too deeply") from error


def read_yaml(body: bytes) -> Any:
    """Parses YAML without tags, aliases and repeated keys.

    Raises:
        DocumentMalformedError: it is not such YAML.
    """
    try:
        # A safe loader: it makes plain values only.
        return yaml.load(_text(body), Loader=_StrictLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DocumentMalformedError(f"malformed YAML{where}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise DocumentMalformedError(f"malformed YAML: {_one_line(error)}") from error
    except RecursionError as error:
        raise DocumentMalformedError("malformed YAML: it is nested too deeply") from error


def reader_of(content_type: str) -> Callable[[bytes], Any] | None:
    """The reader for a content type; None when there is none. No type at all is JSON."""
    essence = content_type.partition(";")[0].strip().lower()
    if essence in YAML_TYPES:
        return read_yaml
    if essence in ("", JSON_TYPE) or essence.endswith("+json"):
        return read_json
    return None


class _StrictLoader(yaml.SafeLoader):
    """Refuses what a reader of the file would not expect."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # A few of them can stand for gigabytes.
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="aliases are not supported; write the value out",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _value in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} is there twice",
                    problem_mark=key_node.start_mark,
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _value in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentMalformedError(f"malformed JSON: the field {twice!r} is there twice")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise DocumentMalformedError(f"malformed JSON: {name} is not a JSON number")


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise DocumentMalformedError(f"the document is not UTF-8 at line {line}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
