"""YAML, JSON and TOML with the place of each value, so that a copy can have other values there.

Values are those that trainers read. YAML is that of PyYAML (version 1.1: `yes` is true), except
that 1e-5 is a number, as OmegaConf and users take it, and times such as 1:30 stay texts. JSON may
have comments and commas too many, since DeepSpeed reads it as Hjson. TOML is read by `tomllib`,
which has no places: `positioned_toml` finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import yaml

from layout_tuner.documents.json_and_yaml import MAX_NUMBER_LENGTH, SAFE_LOADER
from layout_tuner.documents.numbers import read_number
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError, TextPlace
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned_json import positioned_json
from layout_tuner.trainers.found_jobs.positioned_node import Limits, Positioned, number_problem
from layout_tuner.trainers.found_jobs.positioned_toml import positioned_toml

YAML_SUFFIXES: Final = (".yaml", ".yml")


def root_of(file: JobFile, *suffixes: str) -> Positioned | None:
    """The mapping that a file holds; None: its name has another end, or it holds none.

    Raises:
        JobFileInvalidError: see `positioned`.
    """
    if not file.name.lower().endswith(suffixes):
        return None
    root = positioned(file)
    return root if root.is_mapping else None


def positioned(file: JobFile) -> Positioned:
    """The document of a file, by the end of its name: JSON, TOML, or YAML otherwise.

    Raises:
        JobFileInvalidError: it is malformed, has a key twice or several documents, is nested too
            deeply, or has too many values.
    """
    return _positioned(file.name, file.text)


@lru_cache(maxsize=8)
def _positioned(file_name: str, text: str) -> Positioned:
    """The same, once for all readers that are tried."""
    file, name = JobFile(name=file_name, text=text), file_name.lower()
    if name.endswith(".toml"):
        return positioned_toml(file)
    if name.endswith(".json") or (
        not name.endswith(YAML_SUFFIXES) and file.text.lstrip()[:1] == "{"
    ):
        return positioned_json(file)
    return _Yaml(file).document()


class _Yaml:
    """Makes nodes of the parser's events."""

    def __init__(self, file: JobFile) -> None:
        self._text = file.text
        self._limits = Limits(file)
        self._anchors: dict[str, tuple[Positioned, int]] = {}
        self._num_nodes = 0
        self._events: Iterator[Any] = iter(())

    def document(self) -> Positioned:
        """The one document of the file."""
        try:
            self._events = self._accepted()
            first = next(self._events, None)
            if first is None:
                self._limits.refuse("it holds no value")
            document = self._node(first, "", 0)
            next(self._events, None)  # a second document is refused
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
            self._limits.refuse(f"{where}malformed YAML: {error.problem}")
        except JobFileInvalidError:
            raise
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            self._limits.refuse(f"malformed YAML: {' '.join(str(error).split())[:200]}")
        return document

    def _accepted(self) -> Iterator[Any]:
        has_document = False
        for event in yaml.parse(self._text, Loader=SAFE_LOADER):
            if isinstance(event, yaml.DocumentStartEvent):
                if has_document:
                    position = event.start_mark.index if event.start_mark else None
                    self._limits.refuse("a second document begins; there must be one", position)
                has_document = True
            elif isinstance(event, (yaml.NodeEvent, yaml.CollectionEndEvent)):
                yield event

    def _next(self) -> Any:
        return next(self._events)

    def _node(self, event: Any, path: str, depth: int) -> Positioned:
        """The value that begins with an event."""
        start = event.start_mark.index
        self._limits.count(depth, start)
        self._num_nodes += 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path, depth)
        before = self._num_nodes
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(event, path, depth)
        else:
            node = self._mapping(event, path, depth)
        if event.anchor:
            self._anchors[event.anchor] = node, self._num_nodes - before + 1
        return node

    def _alias(self, event: Any, path: str, depth: int) -> Positioned:
        if event.anchor not in self._anchors:
            self._limits.refuse(
                f"the alias *{event.anchor[:80]} stands for nothing above it",
                event.start_mark.index,
            )
        node, size = self._anchors[event.anchor]
        # Values behind aliases of aliases count as often as they are met.
        self._limits.count(depth, event.start_mark.index, size)
        self._num_nodes += size
        return _moved(node, path)

    def _sequence(self, event: Any, path: str, depth: int) -> Positioned:
        items: list[Positioned] = []
        while not isinstance(each := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(each, f"{path}[{len(items)}]", depth + 1))
        return self._collection(event, each, path, items=tuple(items))

    def _mapping(self, event: Any, path: str, depth: int) -> Positioned:
        entries: dict[str, Positioned] = {}
        merged: dict[str, Positioned] = {}
        while not isinstance(each := self._next(), yaml.MappingEndEvent):
            start = each.start_mark.index
            if not isinstance(each, yaml.ScalarEvent):
                self._limits.refuse("a key must be a word", start)
            key = each.value
            if key in entries:
                self._limits.duplicate(key, start)
            node = self._node(self._next(), f"{path}.{key}" if path else key, depth + 1)
            if key == "<<" and each.implicit[0]:
                for source in node.items if node.items is not None else (node,):
                    for name, value in (source.entries or {}).items():
                        merged.setdefault(name, _moved(value, f"{path}.{name}" if path else name))
            else:
                entries[key] = node
        return self._collection(event, each, path, entries={**merged, **entries})

    def _collection(self, event: Any, end: Any, path: str, **content: Any) -> Positioned:
        stop = end.end_mark.index if event.flow_style else end.start_mark.index
        why = _tag_problem(event.tag, ("map", "seq"))
        if not why:
            why = next((each.why for each in content.get("items", ()) if each.why), "")
        node = Positioned(
            path=path, text=self._text, place=self._place(event.start_mark, stop), why=why
        )
        if why and "entries" in content:
            return node  # an object of the program that wrote the file
        return _replaced(node, **content)

    def _scalar(self, event: Any, path: str) -> Positioned:
        value, why = event.value, _tag_problem(event.tag, ("str", "int", "float", "bool", "null"))
        tag = event.tag or ""
        if not why and (event.implicit[0] or (tag and not tag.endswith("str") and tag != "!")):
            value = plain_value(event.value)
            why = number_problem(value)
        return Positioned(
            path=path,
            text=self._text,
            place=self._place(event.start_mark, event.end_mark.index),
            scalar=None if why else value,
            why=why,
        )

    def _place(self, mark: Any, end: int) -> TextPlace:
        return TextPlace(line=mark.line + 1, start=mark.index, end=max(end, mark.index))


def _tag_problem(tag: str | None, known: tuple[str, ...]) -> str:
    if tag in (None, "!") or tag in {f"tag:yaml.org,2002:{each}" for each in known}:
        return ""
    shown = str(tag).replace("tag:yaml.org,2002:", "!!")[:80]
    return f"the tag {shown} makes an object of a program of it"


_RESOLVER: Final[Any] = yaml.resolver.Resolver()
_CONSTRUCTOR: Final = yaml.constructor.SafeConstructor()


def plain_value(written: str) -> Any:
    """The value of a scalar without quotes."""
    kind = _RESOLVER.resolve(yaml.ScalarNode, written, (True, False)).rpartition(":")[2]
    if kind in ("null", "bool", "int", "float") and ":" not in written:
        if len(written) > MAX_NUMBER_LENGTH:
            return float("inf")
        node = yaml.ScalarNode(f"tag:yaml.org,2002:{kind}", written)
        return getattr(_CONSTRUCTOR, f"construct_yaml_{kind}")(node)
    try:
        return read_number(written) if "e" in written.lower() else written
    except ValueError:
        return written


def _moved(node: Positioned, path: str) -> Positioned:
    """The same value at another path, which an alias or a merge key gives it."""
    entries, items = node.entries, node.items
    if entries is not None:
        entries = {name: _moved(each, f"{path}.{name}") for name, each in entries.items()}
    if items is not None:
        items = tuple(_moved(each, f"{path}[{index}]") for index, each in enumerate(items))
    return _replaced(node, path=path, entries=entries, items=items)


def _replaced(node: Positioned, **changes: Any) -> Positioned:
    values = {
        name: getattr(node, name)
        for name in ("path", "text", "place", "scalar", "why", "entries", "items")
    }
    return Positioned(**{**values, **changes})
