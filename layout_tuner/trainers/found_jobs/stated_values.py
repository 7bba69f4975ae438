"""The values of a configuration by dotted key, and the fields of a job that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from layout_tuner.documents.reading import word_of
from layout_tuner.trainers.found_jobs.found_job import Findings, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import Stated
from layout_tuner.trainers.found_jobs.own_scripts.statements import (
    ADAM,
    NOT_ADAM,
    file_named,
    statements_of,
)
from layout_tuner.trainers.found_jobs.positioned import positioned


def stated_beside(file: JobFile, path: Stated) -> dict[str, Stated] | None:
    """The values of a configuration that a script names; None: it does not lie beside the script.

    Their places are not in the text of the script, and are left out.
    """
    found = file_named(file, path)
    return None if found is None else statements_of(positioned(found), named=found.name)


def default_of(value: Any) -> Stated:
    """A value that nothing states."""
    return Stated(value=value, said="")


class StatedValues:
    """Values of a configuration, of which each notes what a field follows from."""

    def __init__(
        self,
        file: JobFile,
        stated: Mapping[str, Stated],
        *,
        trainer: str,
        unread: Stated | None = None,
    ) -> None:
        """Reads `stated`, of the configuration of a trainer.

        Args:
            file: where they stand.
            stated: values by dotted key.
            trainer: its name, for people.
            unread: what else sets values, and cannot be read: then nothing has its default.
        """
        self.findings = Findings()
        self._file, self._unread = file, unread
        self._stated = {
            key: each
            for key, each in stated.items()
            if each.value not in (None, {}) or each.unknown
        }
        self._default = f"{trainer}'s default"
        self._used: set[str] = set()

    def find(self, paths: Sequence[str], default: Any = None) -> Stated:
        """The value at the first of some keys; else the trainer's default."""
        found = [path for path in paths if path in self._stated]
        self._used.update(found)
        return self._stated[found[0]] if found else self._unread or default_of(default)

    def word(self, default: str, *paths: str) -> Stated:
        """A text; of a number or switch its text, as of an option."""
        found = self.find(paths, default)
        if found.unknown or isinstance(found.value, str):
            return found
        if not isinstance(found.value, (bool, int)):
            self.refuse(f"{found.said} is not a text")
        return replace(found, value=word_of(found.value))

    def names(self, default: Sequence[str], *paths: str) -> tuple[Stated, list[str]]:
        """A list of words, also one that a command line writes with commas."""
        found = self.find(paths, default)
        if found.unknown:
            return found, []
        if not isinstance(found.value, (str, list, tuple)):
            self.refuse(f"{found.said} is not a list")
        value = found.value.split(",") if isinstance(found.value, str) else found.value
        return found, [str(each) for each in value if each]

    def switch(self, *paths: str, default: bool = False) -> Stated:
        found = self.find(paths, default)
        if not found.unknown and not isinstance(found.value, bool):
            self.refuse(f"{found.said} is not true or false")
        return found

    def whole(self, default: int | None, *paths: str, least: int = 1) -> Stated:
        """A whole number; JobFileInvalidError for anything else."""
        found = self.find(paths, default)
        if found.said and not found.unknown:
            value = found.value
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self.refuse(f"{found.said} is not a whole number of at least {least}")
        return found

    def refuse(self, problem: str) -> NoReturn:
        raise JobFileInvalidError(f"{self._file.name}: {problem}")

    def put(
        self,
        name: str,
        compute: Callable[..., Any],
        *of: Stated,
        shown: Sequence[Stated] | None = None,
        why: str = "",
    ) -> Any:
        """Notes a field that is computed of some values.

        Args:
            name: the field.
            compute: takes the values of `of`.
            of: where one of them is not known, the field is open.
            shown: those that decide it by themselves; None: all. The others matter by default.
            why: why it has its value where none of `shown` is stated; empty: it is the trainer's
                default.

        Returns:
            The field's value; None: it is open.
        """
        if unknown := next((each for each in of if each.unknown), None):
            self.miss(unknown, unknown.unknown, name)
            return None
        value = compute(*(each.value for each in of))
        stated = [each for each in (of if shown is None else shown) if each.said]
        if stated:
            said = ", ".join(each.said for each in stated)
            self.findings.note(name, value, said, stated[0].place if len(stated) == 1 else None)
        else:
            self.findings.assume(name, value, why or self._default)
        return value

    def miss(self, found: Stated | Sequence[Stated], why: str, *names: str) -> None:
        """Notes that values are not understood, and the fields that are open by them."""
        several = [found] if isinstance(found, Stated) else [each for each in found if each.said]
        said = ", ".join(each.said for each in several) or " of ".join(
            (self._default, *([", ".join(names)] if names else []))
        )
        line = next((each.line for each in several), None)
        for name in names or ("",):
            self.findings.miss(said, why, name=name, line=line)

    def check_optimizer(self, path: str) -> None:
        """Names an optimizer with other states than those of Adam."""
        found = self.find((path,), "adam")
        if found is not self._unread and not ADAM.fullmatch(str(found.value)):
            self.miss(found, found.unknown or NOT_ADAM)

    def keys_below(self, path: str) -> Iterator[str]:
        """The keys that begin with a path, without it."""
        return (key.removeprefix(path) for key in self._stated if key.startswith(path))

    def unused(self) -> Iterator[tuple[str, Stated]]:
        """The values that nothing has asked for."""
        yield from ((key, each) for key, each in self._stated.items() if key not in self._used)
