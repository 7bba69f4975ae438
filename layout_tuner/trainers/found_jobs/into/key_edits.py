"""Changes of values in YAML, JSON and TOML by their paths, in the manner of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.into.layout_changes import GONE
from layout_tuner.trainers.found_jobs.into.script_edits import Edit
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned import positioned
from layout_tuner.trainers.found_jobs.positioned_node import Positioned

_PLAIN: Final = re.compile(r"[A-Za-z_][\w.+-]*(?: [\w.+-]+)*")
_NOT_TEXTS: Final = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])
_INDENT: Final = "  "


class KeyNotWritableError(ValueError):
    """A value is written in a way that is not changed here; the message is its path."""


class KeyEdits:
    """Collects the changes of a file's values."""

    def __init__(self, file: JobFile) -> None:
        self._text = file.text
        self._root = positioned(file)
        name = file.name.lower()
        self._is_toml = name.endswith(".toml")
        self._is_json = not self._is_toml and file.text.lstrip()[:1] == "{"
        self._line_end = "\r\n" if "\r\n" in file.text else "\n"
        self._inserted: dict[str, dict[str, Any]] = {}
        self._gone: set[TextPlace] = set()
        self.edits: list[Edit] = []

    def set(self, path: str, value: Any) -> None:
        """Gives a key a value: in its place, or behind the others of its section.

        Raises:
            KeyNotWritableError: the place of the value cannot be changed.
        """
        node = self._root.get(path)
        if value is GONE or (value is None and self._is_toml):
            if node is not None:
                self._remove(node, path)
        elif node is None:
            self._insert(path, value)
        elif node.value != value or isinstance(node.value, bool) != isinstance(value, bool):
            self._replace(node, path, value)

    def finish(self) -> list[Edit]:
        """All changes."""
        for section, values in self._inserted.items():
            self._insert_into(section, values)
        self._inserted = {}
        return self.edits

    def _replace(self, node: Positioned, path: str, value: Any) -> None:
        place = node.place
        if place is None or (
            (node.is_mapping or node.items is not None) and not self._is_flow(node)
        ):
            raise KeyNotWritableError(path)
        old = self._text[place.start : place.end]
        quote = old[:1] if old[:1] in ("'", '"') else ""
        text = self._literal(value, quote)
        if place.start == place.end and not self._text[: place.start].endswith(" "):
            text = f" {text}"  # `key:` without a value
        self.edits.append(Edit(start=place.start, end=place.end, text=text))

    def _is_flow(self, node: Positioned) -> bool:
        return node.place is not None and self._text[node.place.start] in "[{"

    def _literal(self, value: Any, quote: str = "") -> str:
        if isinstance(value, Mapping) and not self._is_json:
            inside = ", ".join(f"{key}: {self._literal(each)}" for key, each in value.items())
            return f"{{{inside}}}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._literal, value))}]"
        if isinstance(value, str):
            if quote == "'" and "'" not in value and "\\" not in value and not self._is_json:
                return f"'{value}'"
            is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXTS
            if is_plain and not (quote or self._is_json or self._is_toml):
                return value
        return json.dumps(value)

    def _insert(self, path: str, value: Any) -> None:
        """Notes a new key of the innermost section that is there."""
        section, _, rest = "", "", path
        while "." in rest:
            first, _, more = rest.partition(".")
            inner = f"{section}.{first}".lstrip(".")
            node = self._root.get(inner)
            if node is None or not node.entries:
                break
            section, rest = inner, more
        inside = self._inserted.setdefault(section, {})
        *names, last = rest.split(".")
        for name in names:
            inside = inside.setdefault(name, {})
        inside[last] = value

    def _insert_into(self, section: str, values: Mapping[str, Any]) -> None:
        if self._is_toml and (tables := {k: v for k, v in values.items() if isinstance(v, dict)}):
            for name, inside in tables.items():
                self._append_table(f"{section}.{name}".lstrip("."), inside)
            values = {name: each for name, each in values.items() if name not in tables}
            if not values:
                return
        node = self._root.get(section) if section else self._root
        in_braces = self._is_json or (node is not None and self._is_flow(node))
        children = (node.entries or {}) if node is not None else {}
        placed = [
            each.place
            for each in children.values()
            if each.place is not None
            and each.place.end > each.place.start
            and each.place not in self._gone
            and (in_braces or not each.is_mapping)
        ]
        if (
            not section
            and not in_braces
            and (not placed or all(isinstance(each, dict) for each in values.values()))
        ):
            end = len(self._text.rstrip())
            text = "".join(map(self._line, self._lines(values, "")))
            self.edits.append(Edit(start=end, end=end, text=text))
            return
        if not placed and node is not None and children and not self._is_toml:
            self._insert_behind_sections(node, values)
            return
        if not placed:
            raise KeyNotWritableError(section or "the document")
        last = max(placed, key=lambda each: each.end)
        line_start = self._text.rfind("\n", 0, last.start) + 1
        line_end = self._text.find("\n", last.end)
        line_end = len(self._text) if line_end < 0 else line_end
        before = self._text[line_start : last.start]
        indent = before[: len(before) - len(before.lstrip())]
        if in_braces and not self._is_toml:
            is_on_own_line = re.fullmatch(r"\s*\"[^\"\n]*\"\s*:\s*", before) is not None
            joint = f",{self._line_end}{indent}" if is_on_own_line else ", "
            written = "".join(
                f"{joint}{self._key(name)}: {self._literal(each)}" for name, each in values.items()
            )
            self.edits.append(Edit(start=last.end, end=last.end, text=written))
            return
        text = "".join(map(self._line, self._lines(values, indent)))
        line_end = len(self._text[:line_end].rstrip("\r"))
        self.edits.append(Edit(start=line_end, end=line_end, text=text))

    def _insert_behind_sections(self, node: Positioned, values: Mapping[str, Any]) -> None:
        """Puts keys of YAML behind the last value of a section that holds sections alone."""
        places = [each.place for each in node.leaves() if each.place is not None]
        name = next(iter(node.entries or {}))
        if not places:
            raise KeyNotWritableError(node.path)
        key = re.compile(rf"^([ \t]*)[\"']?{re.escape(name)}[\"']?[ \t]*:", re.MULTILINE)
        heads = [*key.finditer(self._text, 0, min(each.start for each in places))]
        if not heads:
            raise KeyNotWritableError(node.path)
        end = self._text.find("\n", max(each.end for each in places))
        end = len(self._text[: end if end >= 0 else None].rstrip("\r"))
        text = "".join(map(self._line, self._lines(values, heads[-1][1])))
        self.edits.append(Edit(start=end, end=end, text=text))

    def _line(self, content: str) -> str:
        return self._line_end + content

    def _key(self, name: str) -> str:
        return json.dumps(name) if self._is_json else name

    def _lines(self, values: Mapping[str, Any], indent: str) -> list[str]:
        lines = []
        for name, each in values.items():
            if isinstance(each, dict) and not self._is_toml:
                lines += [f"{indent}{name}:", *self._lines(each, indent + _INDENT)]
            else:
                sign = " = " if self._is_toml else ": "
                lines.append(f"{indent}{name}{sign}{self._literal(each)}")
        return lines

    def _append_table(self, section: str, values: Mapping[str, Any]) -> None:
        inner = {name: each for name, each in values.items() if isinstance(each, dict)}
        for name, each in inner.items():
            self._append_table(f"{section}.{name}", each)
        plain = {name: each for name, each in values.items() if name not in inner}
        if plain:
            lines = ["", f"[{section}]", *self._lines(plain, "")]
            end = len(self._text.rstrip())
            self.edits.append(Edit(start=end, end=end, text="".join(map(self._line, lines))))

    def _remove(self, node: Positioned, path: str) -> None:
        """Takes a key out; a switch, and the last key of a section, get a value instead."""
        if isinstance(node.value, bool):
            self._replace(node, path, False)
            return
        parent = self._root.get(path.rpartition(".")[0]) if "." in path else self._root
        is_alone = parent is not None and len(parent.entries or {}) < 2
        if is_alone and not self._is_toml:
            self._replace(node, path, None)
            return
        place = node.place
        if place is None:
            raise KeyNotWritableError(path)
        self._gone.add(place)
        key = path.rpartition(".")[2]
        head = re.search(
            rf"[\"']?{re.escape(key)}[\"']?[ \t]*[:=][ \t]*\Z", self._text[: place.start]
        )
        if head is None:
            raise KeyNotWritableError(path)
        line_start = self._text.rfind("\n", 0, head.start()) + 1
        rest = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\r?\n|\Z)").match(self._text, place.end)
        if rest and not self._is_json and not self._text[line_start : head.start()].strip():
            self.edits.append(Edit(start=line_start, end=rest.end(), text=""))
            return
        if comma := re.compile(r"\s*,\s*").match(self._text, place.end):
            self.edits.append(Edit(start=head.start(), end=comma.end(), text=""))
        elif comma := re.search(r"\s*,\s*\Z", self._text[: head.start()]):
            self.edits.append(Edit(start=comma.start(), end=place.end, text=""))
        else:
            raise KeyNotWritableError(path)
