"""Strict parsers of JSON and YAML documents; errors state the line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from typing import Any, Final, NoReturn

import yaml
from pydantic_core import from_json

from api.errors import DocumentInvalidError, DocumentMalformedError
from search_spaces.documents.limits import (
    MAX_DEPTH,
    MAX_FIELDS,
    document_problem,
    is_plainly_acceptable,
    visible_text_problem,
)
from search_spaces.documents.numbers import CORE_SCHEMA, core_loader
from search_spaces.documents.reading import shown

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # without libyaml: slower, same results
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

JSON_TYPE: Final = "application/json"
YAML_TYPES: Final = (
    "application/yaml",
    "application/x-yaml",
    "text/yaml",
    "text/x-yaml",
)

MAX_NUMBER_LENGTH: Final = 400
"""Most characters of a number in YAML; the largest finite one has 309 digits."""

MAX_VALUES: Final = 50_000
"""Most values of a document, in YAML with its keys: 1,000 listed layouts have 40,000 with them."""


def read_json(body: bytes) -> Any:
    """Parses a JSON document that a user wrote.

    Raises:
        DocumentMalformedError: it is not JSON, or has a field twice.
        DocumentInvalidError: it is nested too deeply, or no field accepts a number or text in it.
    """
    _refuse_many_values(body, MAX_VALUES)
    document = _parse_json(_text(body))
    _refuse_invalid(document_problem(document, visible_text_problem))
    return document


def read_json_request(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """Parses the JSON body of any request; texts may have several lines.

    Raises:
        DocumentMalformedError: as `read_json`.
        DocumentInvalidError: it has more values, is nested too deeply, a number is too large, or a
            text cannot be stored.
    """
    _refuse_many_values(body, max_values)
    try:
        document = from_json(body, allow_inf_nan=False)  # much faster than the parser below
        if is_plainly_acceptable(body, document):
            return document
    except ValueError:
        pass  # the parser below raises an error with the service's message
    document = _parse_json(_text(body))
    _refuse_invalid(document_problem(document))
    return document


def _refuse_many_values(body: bytes, most: int) -> None:
    """Counts the values of JSON before they are made, by commas and brackets: empty ones twice."""
    if _num_separators(body) >= most and _num_separators(_STRING.sub(b"", body)) >= most:
        raise DocumentInvalidError(f"it has more than {most} values")


def _refuse_many_fields(number: int) -> None:
    if number > MAX_FIELDS:
        raise DocumentInvalidError(f"a mapping has {number} fields, more than {MAX_FIELDS}")


def _num_separators(body: bytes) -> int:
    return sum(body.count(separator) for separator in (b",", b"[", b"{"))


_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string, or the rest of a body that ends in one: the search is over in one pass."""


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise DocumentMalformedError(
            f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except ValueError as error:
        raise DocumentInvalidError(_TOO_MANY_DIGITS) from error
    except RecursionError as error:
        raise DocumentInvalidError(_TOO_DEEP) from error


def read_yaml(body: bytes) -> Any:
    """Parses YAML that JSON can express: no tags, aliases, merge keys or repeated keys.

    Raises:
        DocumentMalformedError: it is not such YAML.
        DocumentInvalidError: it is nested too deeply, or JSON has no such value.
    """
    text = _text(body)
    try:
        _refuse_surprises(text)
        # A safe loader: it makes only plain values.
        document = yaml.load(text, Loader=_StrictLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at {_place(mark)}" if mark else ""
        raise DocumentMalformedError(f"malformed YAML{where}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if "integer string conversion" in str(error):
            raise DocumentInvalidError(_TOO_MANY_DIGITS) from error
        raise DocumentMalformedError(f"malformed YAML: {_one_line(error)}") from error
    except RecursionError as error:
        raise DocumentInvalidError(_TOO_DEEP) from error
    _refuse_invalid(document_problem(document, visible_text_problem))
    return document


def media_type_of(content_type: str) -> str:
    """A content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def reader_of(content_type: str) -> Callable[[bytes], Any] | None:
    """The parser for a content type; None: there is none. An empty type is JSON."""
    essence = media_type_of(content_type)
    if essence in YAML_TYPES:
        return read_yaml
    if essence in ("", JSON_TYPE) or essence.endswith("+json"):
        return read_json
    return None


_TOO_DEEP: Final = f"it is nested too deeply, more than {MAX_DEPTH} levels"
_TOO_MANY_DIGITS: Final = "a whole number has thousands of digits, more than any field accepts"


def _refuse_invalid(problem: tuple[str, str] | None) -> None:
    if problem:
        field, why = problem
        raise DocumentInvalidError(why, field=field)


def _refuse_surprises(text: str) -> None:
    """Refuses aliases (a few can expand to gigabytes), tags, deep nesting and long numbers.

    It counts keys and values, before objects are made of them.
    """
    depth = num_nodes = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        num_nodes += isinstance(event, yaml.NodeEvent)
        if num_nodes > MAX_VALUES:
            raise DocumentInvalidError(f"it has more than {MAX_VALUES} keys and values")
        if isinstance(event, yaml.AliasEvent):
            _refuse("aliases are not supported; write the value out", event.start_mark)
        tag = getattr(event, "tag", None)
        if tag is not None:
            _refuse(
                f"the tag {shown(tag)} is not supported; write the plain value", event.start_mark
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise DocumentInvalidError(f"{_place(event.start_mark)}: {_TOO_DEEP}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            _refuse_long_number(event.value)


def _refuse_long_number(scalar: str) -> None:
    """Refuses it before it is converted."""
    if len(scalar) > MAX_NUMBER_LENGTH and _NUMBER.fullmatch(scalar):
        raise DocumentInvalidError(_TOO_MANY_DIGITS)


class _StrictKeys:
    """A mixin of a loader that refuses repeated keys, merge keys, and keys that are not scalars."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _refuse_many_fields(len(node.value))
        seen = set()
        for key_node, _value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                _refuse("a key is a list or a mapping; it must be a word", key_node.start_mark)
            if key_node.tag == _MERGE_TAG:
                _refuse("merge keys are not supported; write the fields out", key_node.start_mark)
            key = _spelled(self.construct_object(key_node))  # type: ignore[attr-defined]
            if key in seen:
                _refuse(f"the key {shown(key_node.value)} is there twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)  # type: ignore[misc]
        return {_spelled(key): value for key, value in mapping.items()}


def _spelled(key: Hashable) -> Hashable:
    """A key in the form of JSON: a whole number becomes text. Other keys are refused later."""
    return str(key) if type(key) is int else key


_NUMBER: Final = re.compile(r"[-+]?[0-9.][0-9a-fA-FxX:_.]*")

_CoreLoader: Any = core_loader(_SafeLoader)


class _StrictLoader(_StrictKeys, _CoreLoader):  # type: ignore[misc]
    pass


class _Dumper(yaml.SafeDumper):
    """Puts into quotes what YAML 1.1 or 1.2 would read as another value than the text."""


for _resolver in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(*_resolver)


def write_yaml(document: Any, **style: Any) -> str:
    """A document as YAML, in the order of its fields; `style` is of `yaml.dump`."""
    text: Any = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return str(text)


_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _refuse(problem: str, mark: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for name, _value in pairs:
            if name in seen:
                raise DocumentMalformedError(
                    f"malformed JSON: the field {shown(name)} is there twice"
                )
            seen.add(name)
    _refuse_many_fields(len(mapping))
    return mapping


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise DocumentMalformedError(f"the document is not UTF-8 at line {line}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
