"""Exported files of layouts in which every knob that a format can express is set."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.exports.export import FORMATS, export
from layout_tuner.trainers.exports.export_source import ExportSource

_SIZES = {"num_layers": 16, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_heads": 16}
_OTHERS = {"num_kv_heads": 8, "seq_length": 512, "vocab_size": 32000}
LLAMA: Final = replace(model_preset("tiny-llama"), name="llama", **_SIZES, **_OTHERS)
SEED: Final = 7

EVERY_KNOB: Final[dict[str, Any]] = {
    "num_nodes": 2,
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "vpp": 2,
    "micro_batch_size": 3,
    "num_microbatches": 4,
    "zero_stage": 1,
    "recompute": "full",
    "sequence_parallel": True,
    "precision": "bf16",
}
VARIATIONS: Final[Sequence[dict[str, Any]]] = (
    {},
    {"tp": 4, "num_microbatches": 8},
    {"pp": 4, "micro_batch_size": 2},
    {"dp": 8, "num_nodes": 4},
    {"micro_batch_size": 5, "num_microbatches": 8},
    {"tp": 8, "pp": 4, "dp": 3, "num_nodes": 12, "num_microbatches": 12},
)
"""In none of these has a knob its default."""


def layouts(**without: Any) -> list[Layout]:
    """Layouts in which only the given knobs may have their defaults."""
    return [Layout(**{**EVERY_KNOB, **each, **without}) for each in VARIATIONS]


READERS: Final = {
    "deepspeed": ("ds_config.json", "read_deepspeed.py"),
    "megatron-deepspeed": ("ds_config.json", "read_deepspeed.py"),
    "accelerate": ("accelerate.yaml", "read_accelerate.py"),
    "nanotron": ("nanotron.yaml", "read_nanotron.py"),
    "torchtitan-0.2": ("torchtitan.toml", "read_torchtitan_0_2.py"),
    "torchtitan-0.3": ("torchtitan_layout.py", "read_torchtitan_0_3.py"),
    "torchtitan-main": ("torchtitan_layout.py", "read_torchtitan_0_3.py"),
    "megatron-lm": ("arguments.json", "read_megatron_core.py"),
    "megatron-bridge": ("bridge.json", "read_megatron_core.py"),
    "axonn": ("axonn.json", "read_axonn.py"),
}
"""By format, the file that its trainer reads, and the reader that asks the trainer."""
ENVIRONMENTS: Final = {
    "megatron-deepspeed": "deepspeed",
    "megatron-lm": "megatron-core",
    "megatron-bridge": "megatron-core",
}
"""The environments of formats that have another one's."""


def written(folder: Path, format_name: str, chosen: Sequence[Layout]) -> list[Path]:
    """Writes the files of each layout to a folder of its own; the paths of the file that is read.

    What the trainer lacks is taken as accepted: the files then say what it does without.
    """
    paths = []
    for number, layout in enumerate(chosen):
        job = TrainerJob(model=LLAMA, layout=layout, seed=SEED)
        assert not FORMATS[format_name].adapter.refusals(job)
        paths.append(written_job(folder / f"{format_name}-{number}", format_name, job))
    return paths


def written_job(
    folder: Path, format_name: str, job: TrainerJob, fields: Sequence[str] = ()
) -> Path:
    """Writes the files of a job, refused or not; the path of the file that its trainer reads.

    The reader's answer then has these fields of the trainer's configuration too.

    Beside them lie arguments that scripts give to the trainer, and the shape that they hand on.
    """
    folder.mkdir()
    form = FORMATS[format_name]
    for file in form.render(ExportSource(campaign="wide", trial=7, job=job)).files:
        (folder / file.name).write_text(file.content)
    (folder / "arguments.json").write_text(json.dumps(form.adapter.arguments(job)))
    (folder / "fields.json").write_text(json.dumps(fields))
    (folder / "model.json").write_text(json.dumps(job.model.to_mapping()))
    (folder / "bridge.json").write_text(json.dumps(form.adapter.values(job).get("model")))
    return folder / READERS[format_name][0]


def exported_texts(
    format_name: str, job: TrainerJob, *, without: Collection[str] = ()
) -> dict[str, str]:
    """The files of a job's export by name, as users get them."""
    source = ExportSource(campaign="c", trial=1, job=job)
    return {file.name: file.content for file in export(format_name, source, without=without).files}


def write_export(
    folder: Path, format_name: str, job: TrainerJob, *, without: Collection[str] = ()
) -> None:
    """Writes these files to a folder."""
    for name, text in exported_texts(format_name, job, without=without).items():
        (folder / name).write_text(text)


def expected(layout: Layout, *names: str) -> dict[str, Any]:
    """Fields of the layout, of the model's shape, or of what follows from them."""
    return {
        name: getattr(layout, name) if hasattr(layout, name) else getattr(LLAMA, name)
        for name in names
    }


def changed(path: Path, old: str, new: str) -> Path:
    """A copy of a file in which one text is another."""
    content = path.read_text()
    assert content.count(old) == 1, f"{old!r} is not once in {path}"
    folder = path.parent.with_name(
        f"{path.parent.name}-changed-{len(list(path.parent.parent.iterdir()))}"
    )
    folder.mkdir()
    for each in path.parent.iterdir():
        (folder / each.name).write_text(each.read_text())
    copy = folder / path.name
    copy.write_text(content.replace(old, new))
    return copy
