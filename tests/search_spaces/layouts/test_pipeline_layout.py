"""Pipelines that are written out: their texts, keys, columns and rules."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.errors import LayoutInvalidError, SpaceInvalidError
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.knobs import choices_words
from layout_tuner.search_spaces.layouts.layout import KNOBS, PIPELINE_SPLITS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, code_of
from layout_tuner.search_spaces.layouts.pipeline_layout import (
    canonical_layout,
    layout_text,
    stage_layers,
)
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal

STAGES = st.lists(st.integers(1, 9), max_size=12).flatmap(
    lambda inner: st.tuples(st.integers(0, 9), st.integers(0, 9)).map(
        lambda ends: [max(ends[0], not inner), *inner, ends[1]]
    )
)
"""Layers of two stages and more; the first and the last may have none."""


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("Et*3|(tt|)*28t|L", "Et*3|(tt|)*28t|L"),
        ("Ettt|(tt|)*2,(tt|)*26t|L", "Et*3|(tt|)*28t|L"),
        ("E|(t|)*3tL", "E|(t|)*3tL"),
        ("E(t)*2|(|t)*0tttL", "Ett|t*3L"),
        ("Et*4|tttt|t*4|t|L", "Et*4|(t*4|)*2t|L"),
        ("EtL", "EtL"),
        ("split", "split"),
    ],
)
def test_equal_stages_have_one_text(text: str, canonical: str) -> None:
    assert canonical_layout(text) == canonical


@given(STAGES, st.sampled_from([1, 2]))
def test_texts_keys_and_documents_keep_the_stages(stages: list[int], vpp: int) -> None:
    text = layout_text(stages)
    assert canonical_layout(text) == text
    assert stage_layers(text) == tuple(stages)
    layout = Layout(pp=len(stages), pipeline_layout=text)
    assert [len(layout.layers_of_stage(s, sum(stages))) for s in range(len(stages))] == stages
    assert Layout.of_key(layout.key) == layout
    assert Layout.from_mapping(layout.to_mapping()) == layout


@pytest.mark.parametrize("split", PIPELINE_SPLITS)
@pytest.mark.parametrize("vpp", [1, 2])
def test_a_text_of_a_split_is_the_split(split: Any, vpp: int) -> None:
    short = Layout(pp=4, vpp=vpp, pipeline_split=split)
    stages = [
        len(short.layers_of_stage(s, 30 if split != "layers" else 32)) for s in range(4 * vpp)
    ]
    ends = short.counted_ends
    stages = [4 - ends[0], *[4] * (4 * vpp - 2), 4 - ends[1]]
    written = Layout(pp=4, vpp=vpp, pipeline_layout=layout_text(stages))
    assert written == short
    assert written.key == short.key
    assert not written.is_written_out
    # Another split is not overwritten: legality names both.
    other = PIPELINE_SPLITS[PIPELINE_SPLITS.index(split) - 1]
    if other != "layers":
        assert replace(
            written, pipeline_split=other, pipeline_layout=layout_text(stages)
        ).is_written_out


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("Et|m|L", "multi-token prediction"),
        ("Et|x|L", "'x', which is none of E"),
        ("t|tL", "begin with its only E"),
        ("Et|tE|L", "begin with its only E"),
        ("Ett|tt", "begin with its only E"),
        ("Et||tL", "no layer in stage 2 of 3"),
        ("E|L", "no transformer layer"),
        ("Et*9999|(tt|)*9999L", "more than 1024"),
        ("E(t*9999|)*9999L", "more than 1024"),
        ("E" + "|".join("t" * (1 + i % 2) for i in range(400)) + "L", "more than 160"),
        (7, "is not a text"),
    ],
)
def test_wrong_texts_are_refused_with_a_sentence(value: object, sentence: str) -> None:
    with pytest.raises(LayoutInvalidError, match=re.escape(sentence)) as refused:
        Layout(pp=2, pipeline_layout=value)  # type: ignore[arg-type]
    assert str(refused.value).startswith("pipeline_layout=")
    with pytest.raises(SpaceInvalidError, match=re.escape(sentence)):
        SearchSpace(global_batch_size=8, pipeline_layout=value)


@pytest.mark.parametrize("end", ["3.2x9999", "0", "2..3", "9x9x9"])
def test_wrong_texts_in_keys_are_refused(end: str) -> None:
    key = Layout(pp=3, pipeline_layout="Et|t*3|tL").key.replace("1.3.1", end)
    with pytest.raises(LayoutInvalidError, match="not the key of a layout"):
        Layout.of_key(key)


def test_columns_keep_texts_apart() -> None:
    layouts = [
        Layout(pp=2, pipeline_layout=text) for text in ("Et|t*3L", "split", "Et*3|tL", "Et|t*3L")
    ]
    one, other = LayoutColumns.of_each(layouts[:2]), LayoutColumns.of_each(layouts[2:])
    columns = LayoutColumns.joined([one, other])
    words, places = columns.words("pipeline_layout")
    assert [words[place] for place in places] == [each.pipeline_layout for each in layouts]
    assert columns.of_stages(lambda stages: stages[0]).tolist() == [1, 0, 3, 1]
    assert KNOBS["pipeline_layout"].code("split") == 0
    words, (place,) = columns.flattened().rows(np.array([2])).words("pipeline_layout")
    assert words[place] == "Et*3|tL"
    assert len({code_of("pipeline_layout", f"Et*{n}|tL") for n in range(3, 999)}) == 996


MODEL = replace(model_preset("llama-8b"), num_layers=10)
CLUSTER = CLUSTER_PRESETS["h100-sxm"]
JOB = Layout(pp=4, dp=2, num_microbatches=4, precision="bf16", micro_batch_size=1)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"pipeline_layout": "Et|(t*3|)*2t*3L"}, ""),
        ({"pipeline_layout": "Et|t*3|t*6L"}, "has 3 stages, and pp*vpp=4*1=4"),
        ({"pipeline_layout": "Et|(t*3|)*2t*4L"}, "has 11 layers t, and num_layers=10"),
        (
            {"pipeline_layout": "Ett|t|t*3|t*4L", "pipeline_split": "head"},
            "leave out pipeline_split=head",
        ),
    ],
)
def test_layouts_must_fit_stages_and_layers(knobs: dict[str, Any], sentence: str) -> None:
    scopes = ("model", "machine", "batch", "redundant")
    found = violations(replace(JOB, **knobs), MODEL, CLUSTER, scopes=scopes)
    assert (not found) if not sentence else any(sentence in each for each in found)


def test_a_space_holds_the_layouts_that_fit() -> None:
    texts = ["split", "Et|(t*3|)*2t*3L", "Et*4|t*6L", "Ett|(t*3|)*2ttL"]
    space = SearchSpace(
        global_batch_size=8, pp=[2, 4], precision="bf16", pipeline_layout=texts, num_nodes=1
    )
    scopes = ("model", "machine", "batch", "redundant")
    legal = enumerate_legal(space, MODEL, CLUSTER, scopes=scopes)
    held = {(each.pp, each.pipeline_layout) for each in map(legal.layout, range(len(legal)))}
    # The last text is embedding_and_head, which a space says by that name.
    assert held == {(2, "split"), (2, texts[2]), (4, texts[1])}
    assert {each.example for each in legal.exclusions if each.rule == "layout_is_split"} == {
        "the pipeline_layout has the same stages as pipeline_split=embedding_and_head; list that "
        "instead"
    }
    words, places = legal.columns().words("pipeline_layout")
    assert [words[each] for each in places] == [
        legal.layout(each).pipeline_layout for each in range(len(legal))
    ]
    assert all(legal.index_of(legal.layout(each)) == each for each in range(len(legal)))


def test_choices_are_shown_as_documents_write_them() -> None:
    stated = {"pipeline_layout": ["split", "Et*3|ttL"], "sequence_parallel": [False, True], "pp": 4}
    said = "pipeline_layout split, Et*3|ttL; sequence_parallel false, true; pp 4"
    assert choices_words(stated) == said
