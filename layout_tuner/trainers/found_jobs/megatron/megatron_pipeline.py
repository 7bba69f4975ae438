"""How Megatron's options divide the layers over pipeline stages, as `pipeline_split` and `vpp`.

The rules are those of `validate_args` (megatron/training/arguments.py) and of
`PipelineParallelLayerLayout` (megatron/core/transformer) at d98e8a64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from layout_tuner.search_spaces.layouts.layout import split_of, split_of_ends
from layout_tuner.search_spaces.layouts.pipeline_layout import (
    MAX_STAGES,
    canonical_layout,
    layout_text,
    stage_layers,
    unfolded,
)
from layout_tuner.trainers.found_jobs.megatron.megatron_layers import PATTERN_FLAGS, pattern_of
from layout_tuner.trainers.found_jobs.megatron.megatron_options import Arguments
from layout_tuner.trainers.megatron_lm import LAYOUT_FLAGS, SPLIT_FLAGS, STAGES_FLAG

_LAYERS_OF_STAGE: Final = "--num-layers-per-virtual-pipeline-stage"
_ENDS: Final = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_UNEQUAL: Final = "the stages have numbers of layers that no pipeline_split gives"


def read_pipeline(arguments: Arguments) -> None:
    """Notes `vpp` and `pipeline_split`, after `pp` and `model.num_layers`."""
    pp, layers = (arguments.findings.value(name) for name in ("pp", "model.num_layers"))
    counted = [arguments.switch("pipeline_split", each) for each in SPLIT_FLAGS]
    switches = [each for each in counted if each is not None]
    if pp == 1:
        arguments.is_given(_LAYERS_OF_STAGE, STAGES_FLAG, LAYOUT_FLAGS["vpp"], *_ENDS)
        return
    if switches and not arguments.findings.is_open("pipeline_split"):
        split = split_of_ends(*(each is not None for each in counted))
        said = " ".join(each.said for each in switches)
        arguments.findings.note("pipeline_split", split, said)
    if (found := arguments.word("vpp", STAGES_FLAG)) is not None:
        _read_text(arguments, found[1].text or "", pp)
        return
    if "|" in (pattern := pattern_of(arguments)):
        stages = [len(each) for each in pattern.partition("/")[0].split("|")]
        flag = next(each for each in PATTERN_FLAGS if each in arguments.options)
        _note_split(arguments, flag, stages, pp, _vpp_of_stages(arguments, flag, len(stages), pp))
        return
    vpp = arguments.whole("vpp", LAYOUT_FLAGS["vpp"])
    if (each := arguments.whole("vpp", _LAYERS_OF_STAGE, notes=False)) is not None:
        vpp = _by_layers(arguments, each, pp, layers, len(switches))
    _read_ends(arguments, pp, vpp or 1, layers)


def _by_layers(
    arguments: Arguments, each: int, pp: int | None, layers: int | None, ends: int
) -> int | None:
    option = arguments.options[_LAYERS_OF_STAGE]
    if pp is None or layers is None:
        arguments.miss(option, "it follows from pp and the number of layers", "vpp")
        return None
    vpp, rest = divmod(layers + ends, pp * each) if each else (0, 1)
    if rest:
        why = f"{layers + ends} layers on pp={pp} stages are no multiple of it"
        arguments.miss(option, why, "vpp")
        return None
    arguments.note("vpp", vpp, option)
    return vpp


def _read_text(arguments: Arguments, text: str, pp: int | None) -> None:
    """Reads the stages that are written out, in the letters of `pipeline_layout`."""
    option = arguments.options[STAGES_FLAG]
    try:
        num_stages = unfolded(text).count("|") + 1
    except ValueError as error:
        return arguments.miss_all(option, str(error), ("vpp", "pipeline_split"))
    vpp = _vpp_of_stages(arguments, STAGES_FLAG, num_stages, pp)
    try:
        written = canonical_layout(text)
    except ValueError as error:
        return arguments.miss(option, str(error), "pipeline_split")
    return _note_split(arguments, STAGES_FLAG, stage_layers(written), pp, vpp)


def _vpp_of_stages(arguments: Arguments, flag: str, num_stages: int, pp: int | None) -> int | None:
    """Notes `vpp` of stages that are written out; None: there are too many, or too few."""
    option, stated = (
        arguments.options[flag],
        arguments.whole("vpp", LAYOUT_FLAGS["vpp"], notes=False),
    )
    vpp = num_stages // (pp or 1)
    if pp is None or num_stages % pp:
        why = f"its {num_stages} parts are not a multiple of pp"
    elif stated not in (None, vpp):
        why = f"it has {num_stages} parts, and pp * vpp is {pp} * {stated}"
    else:
        arguments.note("vpp", vpp, option)
        return vpp
    arguments.miss_all(option, why, ("vpp", "pipeline_split"))
    return None


def _read_ends(arguments: Arguments, pp: int | None, vpp: int, layers: int | None) -> None:
    """First and last stage with a number of layers of their own; the others share the rest."""
    given = [each for each in _ENDS if arguments.is_given(each)]
    if not given:
        return
    ends = [arguments.whole("pipeline_split", each, notes=False) for each in _ENDS]
    if arguments.findings.is_open("pipeline_split"):
        return
    first, last = ends
    option, why = arguments.options[given[0]], "the other stages do not share the rest equally"
    if pp is None or layers is None or pp * vpp > MAX_STAGES:
        arguments.miss(option, "it follows from pp and the number of layers", "pipeline_split")
        return
    others = pp - len(given)
    rest = layers - sum(each for each in ends if each is not None)
    if others < 0 or rest < 0 or (rest % others if others else rest):
        arguments.miss(option, why, "pipeline_split")
        return
    inner = [rest // others] * others if others else []
    sizes = [*([] if first is None else [first]), *inner, *([] if last is None else [last])]
    if any(each % vpp for each in sizes):
        arguments.miss(option, _UNEQUAL, "pipeline_split")
        return
    _note_split(arguments, given[0], [each // vpp for each in sizes] * vpp, pp, vpp)


def _note_split(
    arguments: Arguments, name: str, sizes: Sequence[int], pp: int | None, vpp: int | None
) -> None:
    if pp is None or vpp is None:
        return
    option, split = arguments.options[name], split_of(sizes, pp, vpp)
    if split is not None:
        arguments.note("pipeline_split", split, option)
    elif all(sizes[1:-1]) and len(sizes) == pp * vpp:
        arguments.note("pipeline_layout", layout_text(sizes), option)
    else:
        arguments.miss(option, _UNEQUAL, "pipeline_split")
