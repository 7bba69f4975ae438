"""Reading a report as a browser does, as far as tests look at it."""

from __future__ import annotations

from collections import defaultdict
from html.parser import HTMLParser

VOID = {"meta", "br"}


class Page(HTMLParser):
    """The elements of a document, their attributes, and the text in them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        """All that is read."""
        self.texts: defaultdict[str, list[str]] = defaultdict(list)
        """By element, what stands in each of them, that of elements inside apart."""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        opened = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data
            self.texts[self._open[-1]].append(data)

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _attributes in self.elements}

    def kinds(self, tag: str) -> list[str]:
        """The class of each element of a kind."""
        return [attributes.get("class", "") for name, attributes in self.elements if name == tag]
