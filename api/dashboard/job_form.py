"""The form for the files of a job, beside that of a campaign."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from fastapi import Request
from starlette.datastructures import UploadFile

from layout_tuner.api.campaigns.found_jobs import UploadedJob
from layout_tuner.documents.reading import shown
from layout_tuner.trainers.found_jobs.found_job import FoundJob

FILES: Final = ("file", "config")
"""Fields with a file; `NAME_text` and `NAME_name` keep one that was uploaded before."""
_TEXTS: Final = ("num_nodes", "seq_length", "cluster", "job", "stated")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobForm:
    """The fields of the form, and what was read of its files."""

    fields: dict[str, str] = field(
        default_factory=lambda: dict.fromkeys(
            (*_TEXTS, *(f"{each}_{part}" for each in FILES for part in ("text", "name"))), ""
        )
    )
    uploaded: UploadedJob | None = None
    """None: no file was read yet."""
    problem: str = ""
    """Why an uploaded file is none; empty: nothing."""

    @property
    def found(self) -> FoundJob | None:
        return None if self.uploaded is None else self.uploaded.found

    @property
    def notes(self) -> dict[str, str]:
        """What the job says, by the field of the campaign's form beside which it is shown."""
        said = {}
        if self.found is not None:
            for each in self.found.read:
                line = f" (line {each.place.line})" if each.place else ""
                said[each.field] = f"read: {each.said}{line}"
            said |= {each.field: f"assumed: {each.why}" for each in self.found.assumed}
            for missed in self.found.not_understood:
                said[missed.field] = f"not understood: {missed.said}: {missed.why}"
        return said


async def read_job_form(request: Request) -> JobForm:
    """The fields that were sent; of a file its text and name."""
    form = JobForm()
    for name, value in (await request.form()).multi_items():
        if isinstance(value, UploadFile):
            content = await value.read()
            if name in FILES and value.filename:
                try:
                    form.fields[f"{name}_text"] = content.decode("utf-8-sig")
                except UnicodeDecodeError:
                    problem = f"{shown(value.filename)}: it is not text in UTF-8"
                    form = replace(form, problem=problem)
                form.fields[f"{name}_name"] = value.filename
            await value.close()
        elif name in form.fields:
            # Browsers send the line ends of a field as CR LF.
            is_file = name.endswith("_text")
            form.fields[name] = value.replace("\r\n", "\n") if is_file else value.strip()
    return form
