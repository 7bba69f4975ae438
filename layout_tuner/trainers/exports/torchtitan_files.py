"""torchtitan's configuration, the model's shape as Python, and a launch script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.exports.export_source import ExportSource, RenderedJob
from layout_tuner.trainers.exports.exported import ExportFileRead
from layout_tuner.trainers.exports.launch_script import HERE, LaunchScript, head_of, template
from layout_tuner.trainers.torchtitan import (
    TORCHTITAN_0_2,
    TORCHTITAN_0_3,
    TORCHTITAN_MAIN,
    model_arguments_of_0_2,
)

_TOML_FILE: Final = "torchtitan.toml"
_MODEL_FILE: Final = "torchtitan_model.py"
_LAYOUT_FILE: Final = "torchtitan_layout.py"


def torchtitan_0_2(source: ExportSource) -> RenderedJob:
    """A TOML file, and the model's shape as Python."""
    arguments = model_arguments_of_0_2(source.job.model)
    # The head is below the docstring: Python looks for the encoding in comments of lines 1 and 2.
    model = template(_MODEL_FILE).format(
        head=head_of(TORCHTITAN_0_2, source),
        arguments="\n".join(f"    {name}={value!r}," for name, value in arguments.items()),
    )
    toml = "\n".join(_toml_lines(TORCHTITAN_0_2.values(source.job)))
    return _rendered(
        TORCHTITAN_0_2,
        source,
        f'--job.config_file "$HERE/{_TOML_FILE}" --model.hf_assets_path "$TOKENIZER_DIR"',
        {_TOML_FILE: f"{head_of(TORCHTITAN_0_2, source)}\n{toml}\n", _MODEL_FILE: model},
    )


def _toml_lines(sections: Mapping[str, Mapping[str, Any]], above: str = "") -> Iterator[str]:
    """Sections of strings, numbers, switches and sections, below those of the path `above`.

    TOML writes them as JSON does, but for two things: it has no pairs of surrogates, and refuses
    DEL as it is.
    """
    for section, values in sections.items():
        inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
        if len(inner) < len(values) or not values:
            yield f"\n[{above}{section}]"
        for key, value in values.items():
            if key not in inner:
                written = json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
                yield f"{key} = {written}"
        yield from _toml_lines(inner, f"{above}{section}.")


def _python_module(adapter: TrainerAdapter, source: ExportSource, *, longest: str) -> RenderedJob:
    job, sections = source.job, dict(adapter.values(source.job))
    budget = sections.pop("activation_checkpoint", None)
    checkpointing = "SelectiveAC" if job.layout.recompute == "selective" else "FullAC"
    checkpointed = None if job.layout.recompute == "none" else f"{checkpointing}.Config()"
    if budget is not None:
        checkpointing = "MemoryBudgetAC"
        checkpointed = f"{checkpointing}.Config(memory_budget={budget['memory_budget']})"
    settings = [
        f"    config.{section}.{key} = {value!r}"
        for section, values in sections.items()
        for key, value in values.items()
    ]
    content = template(_LAYOUT_FILE).format(
        head=head_of(adapter, source),
        longest=longest,
        settings="\n".join(settings),
        activation_checkpoint=checkpointed,
        checkpointing=checkpointing,
        **job.model.to_mapping(),
    )
    return _rendered(
        adapter,
        source,
        '--module torchtitan_layout --config layout --hf_assets_path "$TOKENIZER_DIR"',
        {_LAYOUT_FILE: content},
    )


torchtitan_0_3 = partial(_python_module, TORCHTITAN_0_3, longest="max_seq_len")
torchtitan_main = partial(_python_module, TORCHTITAN_MAIN, longest="max_context_length")


def _rendered(
    adapter: TrainerAdapter, source: ExportSource, arguments: str, files: Mapping[str, str]
) -> RenderedJob:
    script = LaunchScript(
        adapter=adapter,
        name="torchtitan.sh",
        required={"TOKENIZER_DIR": ("/path/to/tokenizer", "a folder with tokenizer.json")},
        setup=(HERE, 'export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"'),
        program=(f"PROGRAM=(-m torchtitan.train {arguments})",),
    )
    written = (
        ExportFileRead(name=name, content=content, executable=False)
        for name, content in files.items()
    )
    return script.job(source, *written)
