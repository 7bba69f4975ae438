"""How Megatron's options divide the layers over pipeline stages, as `pipeline_split` and `vpp`.

The rules are those of `validate_args` (megatron/training/arguments.py) and of
`PipelineParallelLayerLayout` (megatron/core/transformer) at d98e8a64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from layout_tuner.search_spaces.layouts.layout import PipelineSplit, split_of
from layout_tuner.search_spaces.layouts.pipeline_layout import (
    canonical_layout,
    layout_text,
    stage_layers,
)
from layout_tuner.trainers.found_jobs.megatron.megatron_options import Arguments
from layout_tuner.trainers.megatron_lm import LAYOUT_FLAGS, SPLIT_FLAGS, STAGES_FLAG

_LAYERS_OF_STAGE: Final = "--num-layers-per-virtual-pipeline-stage"
_STRING: Final = STAGES_FLAG
_ENDS: Final = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_MOST_LETTERS: Final = 1 << 15
_SPLITS: Final[dict[tuple[bool, bool], PipelineSplit]] = {
    (False, False): "layers",
    (True, False): "embedding",
    (False, True): "head",
    (True, True): "embedding_and_head",
}
_UNEQUAL: Final = "the stages have numbers of layers that no pipeline_split gives"


def read_pipeline(arguments: Arguments) -> None:
    """Notes `vpp` and `pipeline_split`, after `pp` and `model.num_layers`."""
    pp, layers = (arguments.findings.value(name) for name in ("pp", "model.num_layers"))
    counted = [arguments.switch("pipeline_split", each) for each in SPLIT_FLAGS]
    switches = [each for each in counted if each is not None]
    if pp == 1:
        arguments.is_given(_LAYERS_OF_STAGE, _STRING, LAYOUT_FLAGS["vpp"], *_ENDS)
        return
    if switches and not arguments.findings.is_open("pipeline_split"):
        split = _SPLITS[counted[0] is not None, counted[1] is not None]
        said = " ".join(each.said for each in switches)
        arguments.findings.note("pipeline_split", split, said)
    if (found := arguments.word("vpp", _STRING)) is not None:
        _read_string(arguments, found[1].text or "", pp)
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


def _read_string(arguments: Arguments, text: str, pp: int | None) -> None:
    """A layout such as `Et*3|(tt|)*29,m|L`: E, t, m and L for embedding, layer, MTP and loss."""
    option, stages = arguments.options[_STRING], stages_of(text)
    if stages is None or pp is None or len(stages) % pp:
        why = "it has other letters than E, t, m and L, or is too long"
        if stages is not None:
            why = f"its {len(stages)} parts are not a multiple of pp"
        for name in ("vpp", "pipeline_split"):
            arguments.miss(option, why, name)
        return
    vpp = len(stages) // pp
    arguments.note("vpp", vpp, option)
    if any("m" in each for each in stages):
        why = "it has a layer of multi-token prediction (m), which models cannot say yet"
        arguments.miss(option, why, "pipeline_split")
        return
    try:
        written = canonical_layout(text)
    except ValueError as error:
        arguments.miss(option, str(error), "pipeline_split")
        return
    _note_split(arguments, _STRING, stage_layers(written), pp, vpp)


def stages_of(text: str) -> list[str] | None:
    """The letters of each part of a layout; None: it is none, or longer than any pipeline."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        times = [len(each[1]) * int(each[2]) for each in re.finditer(pattern, text)]
        if len(text) + sum(times) > _MOST_LETTERS:
            return None
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return None if re.search(r"[^EtmL|]", text) else text.split("|")


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
    if pp is None or layers is None or pp * vpp > _MOST_LETTERS:
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


def _note_split(arguments: Arguments, name: str, sizes: Sequence[int], pp: int, vpp: int) -> None:
    option, split = arguments.options[name], split_of(sizes, pp, vpp)
    if split is not None:
        arguments.note("pipeline_split", split, option)
    elif all(sizes[1:-1]) and len(sizes) == pp * vpp:
        arguments.note("pipeline_layout", layout_text(sizes), option)
    else:
        arguments.miss(option, _UNEQUAL, "pipeline_split")
