"""A file of a job: its text, and the files beside it that it names."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from layout_tuner.documents.reading import shown, why_unreadable
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError

MAX_BYTES: Final = 1 << 20
"""Most bytes of a file: launch scripts have some thousand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """A text file, read once; nothing in it is executed."""

    name: str
    """Its name, without folders."""
    text: str
    folder: Path | None = None
    """Where files beside it may be read; None: it was uploaded, and has none."""
    written: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What a script writes before it starts its program, by path as the script says it:
    `cat > ds_config.json <<EOF`, `echo {} > $DIR/ds.json`."""

    @classmethod
    def open(cls, path: Path) -> JobFile:
        """Reads a file; JobFileInvalidError where it cannot be read, is too large or is no text."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise JobFileInvalidError(f"{path}: cannot be read: {why_unreadable(error)}") from error
        return cls.of(path.name, content, path.parent)

    @classmethod
    def of(cls, name: str, content: bytes, folder: Path | None = None) -> JobFile:
        """A file of this content."""
        if len(content) > MAX_BYTES:
            raise JobFileInvalidError(
                f"{shown(name)}: it has more than {MAX_BYTES >> 20} MB, and files of jobs have some "
                "thousand bytes; give the launch script or the configuration of the job"
            )
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise JobFileInvalidError(f"{shown(name)}: it is not text in UTF-8") from error
        if "\0" in text:
            raise JobFileInvalidError(f"{shown(name)}: it is not text: it holds a NUL character")
        if not text.strip():
            raise JobFileInvalidError(f"{shown(name)}: it is empty")
        return cls(name=name, text=text, folder=folder)

    def beside(self, path: str) -> JobFile | None:
        """A file that this one names: the script's own, or one in the same folder or below.

        None: there is none. Places in it are not those in the text of this file.

        Raises:
            JobFileInvalidError: it is there, and is too large or no text.
        """
        if (own := posixpath.normpath(path or ".")) in self.written:
            return JobFile(name=own.rpartition("/")[2], text=self.written[own])
        if self.folder is None or not path or "\0" in path:
            return None
        folder = self.folder.resolve()
        found = (folder / path).resolve()
        is_there = found.is_relative_to(folder) and found.is_file()
        return JobFile.open(found) if is_there else None

    def line_of(self, position: int) -> int:
        """The line of a position in the text, from 1."""
        return self.text.count("\n", 0, position) + 1
