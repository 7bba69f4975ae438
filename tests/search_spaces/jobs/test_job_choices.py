"""Conditions of job knobs, and the jobs that a space has with them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from layout_tuner.errors import SearchSpaceError, SpaceInvalidError
from layout_tuner.search_spaces.campaigns import stated_jobs
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.jobs.condition import Condition, Facts
from layout_tuner.search_spaces.jobs.job_choices import JobChoices, stated_settings
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.knobs import searched_words
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal

MODEL, CLUSTER = MODEL_PRESETS["mixtral-8x7b"], CLUSTER_PRESETS["frontier"]
LAYOUTS = [
    Layout(tp=tp, ep=ep, recompute=recompute)
    for tp in (1, 2)
    for ep in (1, 4)
    for recompute in ("none", "full")
]


def by_hand(text: str, layout: Layout, job: dict[str, Any]) -> bool:
    """The condition as Python would answer it: words are names of themselves."""
    names = {"true": True, "false": False, "none": "none", "full": "full", "math": "math"}
    names |= {
        "num_experts": MODEL.num_experts,
        "mi250x": "mi250x",
        "h100": "h100",
        "mi250": "mi250",
    }
    facts = {name: getattr(layout, name) for name in ("tp", "ep", "recompute", "dp_cp")}
    return bool(eval(text, {}, names | facts | {"device": "mi250x"} | job))


@pytest.mark.parametrize(
    "text",
    [
        "tp > 1",
        "ep > 1 and recompute != full",
        "not (tp == 2 or ep >= 4)",
        "recompute in [none, full]",
        "recompute not in [none]",
        "compile",
        "not compile and tp < 2",
        "attention == math or tp <= 1",
        "attention != math",
        "num_experts > 1",
        "num_experts > tp",
        "tp < ep",
        "device == mi250x",
        "device != mi250x or tp > 1",
        "device in [h100, mi250x]",
        "device == mi250",
        "tp != 1 and compile == true",
        "bucket >= 8",
    ],
)
def test_a_condition_holds_where_it_says(text: str) -> None:
    condition = Condition.read(text)
    columns = LayoutColumns.of_each(LAYOUTS)
    for compiled, attention, bucket in itertools.product((False, True), ("math", "own"), (4, 8)):
        job = {"compile": compiled, "attention": attention, "bucket": bucket}
        assert condition.unknown_name(job) is None
        answers = np.broadcast_to(
            condition.holds(Facts(columns, MODEL, CLUSTER, job)), len(LAYOUTS)
        )
        assert answers.tolist() == [by_hand(text, each, job) for each in LAYOUTS], job


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a condition"),
        ("tp >", "not a condition"),
        ("1 < tp", "no comparison of a name"),
        ("tp > 1 > 0", "no comparison of a name"),
        ("tp.real > 1", "no comparison of a name"),
        ("open('x')", "no comparison of a name"),
        ("tp > f(1)", "not a number"),
        ("tp in [1, [2]]", "not a number"),
        ("tp in 1", "a list"),
        ("tp == full", "not a whole number"),
        ("tp == true", "not a whole number"),
        ("recompute == half", "not one of"),
        ("recompute > full", "only"),
        ("foo > dp", "only"),
        ("tp", "not a whole number"),
        ("num_heads", "is a number"),
        ("num_heads == many", "is a number"),
        ("family == 3", "a word"),
        ("device == 1", "a word"),
        ("compile > true", "only"),
        (" or ".join(["tp > 1"] * 60), "at most 300"),
        ("(" * 150 + "tp > 1" + ")" * 140, "not a condition"),
        (7, "not a condition"),
    ],
)
def test_what_is_no_condition_is_refused_and_never_executed(text: Any, words: str) -> None:
    with pytest.raises(SpaceInvalidError, match=words):
        Condition.read(text)


def knob(name: str, **stated: Any) -> JobKnob:
    when = stated.pop("when", None)
    values = {"kind": "switch", "values": (False, True), "default": False}
    return JobKnob(name=name, **values | stated, when=when and Condition.read(when))


KNOBS = {
    each.name: each
    for each in (
        knob("compile"),
        knob("async_tp", when="compile and tp > 1"),
        knob("scatter", default=True, when="dp_cp > 1"),
        knob(
            "bucket",
            kind="count",
            values=(4, 8),
            default=8,
            when="scatter and dp_cp > 1",
            maximum=64,
        ),
    )
}


def job_set(**described: Any) -> JobSet:
    space = SearchSpace(global_batch_size=8, num_nodes=1, tp=[1, 2], dp=[1, 4], micro_batch_size=1)
    legal = enumerate_legal(space, MODEL_PRESETS["gpt-125m"], CLUSTER)
    choices = JobChoices.of(described, KNOBS, "some trainer")
    return JobSet(legal, choices, MODEL_PRESETS["gpt-125m"], CLUSTER)


def test_a_knob_whose_condition_fails_makes_no_second_job() -> None:
    jobs = job_set(compile=[False, True], async_tp=[False, True], bucket=[4, 8, 16])
    of: dict[tuple[int, int], set[str]] = {}
    for position in range(len(jobs)):
        layout = jobs.layout(position)
        assert jobs.index_of(layout) == position
        of.setdefault((layout.tp, layout.dp), set()).add(layout.job.key)
    assert len({jobs.layout(at).key for at in range(len(jobs))}) == len(jobs)
    one, two = {"", "~compile.true"}, {"", "~compile.true", "~async_tp.true~compile.true"}
    buckets = ("", "~bucket.4", "~bucket.16")

    def beside(settings: set[str]) -> set[str]:
        return {
            "".join(sorted(f"~{part}" for part in (each + bucket).split("~") if part))
            for each in settings
            for bucket in buckets
        }

    assert of == {(1, 1): one, (2, 1): two, (1, 4): beside(one), (2, 4): beside(two)}


def test_the_columns_of_jobs_are_those_of_their_layouts() -> None:
    jobs = job_set(compile=[False, True], bucket=[4, 8])
    positions = np.array([len(jobs) - 1, 0, 3])
    for columns, at in (
        (jobs.columns(positions), positions),
        (jobs.columns(), range(len(jobs))),
    ):
        layouts = [jobs.layout(int(each)) for each in at]
        assert columns.tp.tolist() == [each.tp for each in layouts]
        assert [columns.jobs[each] for each in columns.job] == [each.job for each in layouts]
    assert jobs.column("dp").tolist() == [jobs.layout(at).dp for at in range(len(jobs))]
    rows = np.array([2, 0])
    assert {jobs.layout(int(at)).without_job for at in jobs.jobs_of(rows)} == {
        jobs.legal.layout(row) for row in rows.tolist()
    }
    assert len(jobs.jobs_of(np.arange(len(jobs.legal)))) == len(jobs)


def test_a_knob_that_a_condition_asks_about_has_its_default_where_it_is_not_searched() -> None:
    jobs = job_set(async_tp=[False, True])
    assert jobs.choices.values("compile") == (False,)
    assert searched_words({"job": jobs.choices.to_mapping()}) == "async_tp false, true"
    assert all(not jobs.layout(at).job for at in range(len(jobs)))
    with_compile = job_set(async_tp=[False, True], compile=True)
    assert {with_compile.layout(at).job.key for at in range(len(with_compile))} == {
        "~compile.true",
        "~async_tp.true~compile.true",
    }


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"complie": True}, "complie: .*did you mean|complie: .*compile"),
        ({"compile": "yes"}, "compile: .*not a switch"),
        ({"compile": []}, "compile: .*empty"),
        ({"compile": [True, True]}, "compile: .*more than once"),
        ({"compile": {"from": 1, "to": 2}}, "compile: .*not a value or a list"),
        ({"bucket": [65]}, "bucket: .*not from 0 to 64"),
        ({"bucket": [True]}, "bucket: .*not a count"),
        ({"tp": [1, 2]}, "tp: .*beside `job`"),
        (None, "the value is None"),
        ([1], "mapping"),
    ],
)
def test_choices_that_no_job_can_have_are_refused_by_name(described: Any, words: str) -> None:
    with pytest.raises(SpaceInvalidError, match=words):
        JobChoices.of(described, KNOBS, "some trainer")


@pytest.mark.parametrize(
    ("when", "words"),
    [("compile == ture", "not a switch"), ("compile == ep", "not a switch"), ("bucket", "count")],
)
def test_a_condition_compares_a_knob_with_values_that_it_can_have(when: str, words: str) -> None:
    known = {**KNOBS, "asked": knob("asked", when=when)}
    with pytest.raises(SpaceInvalidError, match=f"asked: .*{words}"):
        JobChoices.of({"asked": [False, True]}, known, "some trainer")


def test_a_searched_count_is_one_of_the_values_of_its_knob() -> None:
    choices = JobChoices.of({"bucket": [4, 16, 8]}, KNOBS, "some trainer")
    assert choices.knobs["bucket"].values == (4, 8, 16)
    assert JobChoices.of(choices.to_mapping(), {}, "another") == choices


def test_settings_are_found_once_for_all_layouts_with_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = {
        f"k{n}": knob(f"k{n}", when=f"{axis} > {n}")
        for axis, places in (("dp", range(5)), ("tp", range(5, 10)))
        for n in places
    }
    choices = JobChoices.of({name: [False, True] for name in many}, many, "some trainer")
    settled = []
    monkeypatch.setattr(
        JobChoices, "_settled", lambda _, job, facts: settled.append(job) or JobSettings(job)
    )
    columns = LayoutColumns.of_each([Layout(dp=dp, tp=tp) for dp in (1, 2, 3) for tp in (1, 2)])
    for _ in range(2):
        choices.groups(columns, MODEL, CLUSTER)
    # No layout has more than 5 of them, of which dp > 0, 1 and 2 hold of some.
    assert len(settled) == 2 + 4 + 8


def test_a_value_that_no_layout_can_have_is_refused_where_the_knob_has_no_other() -> None:
    graphs = JobKnob(
        name="graphs",
        kind="word",
        values=("none", "attn", "whole"),
        default="none",
        needs=(
            ("attn", Condition.read("tp > 1 or pp > 1")),
            ("whole", Condition.read("tp > 8")),
        ),
        when=Condition.read("dp > 0"),
    )
    known = {**KNOBS, "graphs": graphs}
    for searched, layout, words in (
        ({"graphs": ["none", "attn", "whole"]}, Layout(tp=2), "graphs whole .only where dp > 0"),
        ({"graphs": ["none", "attn"]}, Layout(), r"where dp > 0 and \(tp > 1 or pp > 1\); leave"),
        ({"async_tp": [False, True]}, Layout(tp=2), r"or add compile: \[true\] to job"),
    ):
        choices = JobChoices.of(searched, known, "some trainer")
        _, (settings,) = choices.groups(LayoutColumns.of_each([layout]), MODEL, CLUSTER)
        if layout.tp > 1 and "graphs" in searched:
            (sentence,) = choices.impossible(settings)
            assert re.match(words, sentence)
        else:
            with pytest.raises(SpaceInvalidError, match=words):
                choices.impossible(settings)


def test_too_many_combinations_are_refused_with_their_number() -> None:
    count = {"kind": "count", "values": tuple(range(40)), "default": 0}
    many = {name: knob(name, **count) for name in ("one", "two")}
    described = {name: list(range(40)) for name in many}
    with pytest.raises(SpaceInvalidError, match="1600 combinations, more than 1024"):
        JobChoices.of(described, many, "some trainer")


def test_a_declaration_is_read_back_as_it_was_written() -> None:
    effect = KnobEffect(touches=("ep",), factor=0.7, memory_bytes=1e9, source="a paper")
    whole = JobKnob(
        name="dispatcher",
        kind="word",
        values=("alltoall", "deepep"),
        default="alltoall",
        when=Condition.read("ep > 1"),
        touches=("ep", "host"),
        effects={"deepep": effect},
        losses="rounding",
        help="how tokens are sent",
    )
    assert JobKnob.from_mapping("dispatcher", whole.to_mapping()) == whole
    assert whole.effect("deepep") == effect
    assert whole.effect("alltoall") is None
    choices = JobChoices.of({"dispatcher": ["alltoall", "deepep"]}, {"dispatcher": whole}, "it")
    assert JobChoices.of(choices.to_mapping(), {}, "another") == choices


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "number"}, "kind"),
        ({"values": ["a", 1]}, "values"),
        ({"default": 3}, "default"),
        ({"touches": ["network"]}, "touches"),
        ({"when": "tp >"}, "when"),
        ({"losses": "none"}, "losses"),
        ({"effects": [{"value": "b", "factor": 0}]}, "effects.0.factor"),
        ({"effects": [{"factor": 1}]}, "effects.0.value"),
        ({"effects": [{"value": "b", "gain": 2}]}, "effects.0"),
        ({"flag": "--x"}, "flag"),
    ],
)
def test_a_wrong_declaration_is_refused_by_its_field(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SearchSpaceError, match=words):
        JobKnob.from_mapping("name", {"kind": "word", "values": ["a", "b"]} | wrong)


def test_a_name_of_a_layout_field_is_no_job_knob() -> None:
    with pytest.raises(SpaceInvalidError, match="beside `job`"):
        knob("recompute")


def test_stated_settings_leave_out_defaults_and_refuse_what_the_layout_cannot_have() -> None:
    one, two = Layout(tp=1), Layout(tp=2)
    read = {"catalogue": KNOBS, "trainer": "some trainer", "model": MODEL, "cluster": CLUSTER}
    described = {"compile": True, "async_tp": True, "scatter": True}
    settings = stated_settings(described, two, **read)
    assert settings == JobSettings({"compile": True, "async_tp": True})
    with pytest.raises(SpaceInvalidError, match=r"async_tp: .*only where compile and tp > 1"):
        stated_settings(described, one, **read)
    with pytest.raises(SpaceInvalidError, match=r"compile: .*one value"):
        stated_settings({"compile": [True, False]}, two, **read)


CAMPAIGN: dict[str, Any] = {
    "name": "knobs",
    "model": "tiny-llama",
    "cluster": "local-cpu",
    "space": {"global_batch_size": 16, "job": {"compile": [False, True]}},
    "baseline": {"tp": 2, "job": {"compile": True}},
    "budget": {"trials": 4},
}


def test_a_campaign_keeps_the_declarations_of_its_knobs() -> None:
    spec = CampaignSpec.from_document(CAMPAIGN)
    assert spec.space.job.values("compile") == (False, True)
    assert spec.baseline is not None
    assert spec.baseline.job == JobSettings({"compile": True})
    again = CampaignSpec.from_mapping(spec.to_mapping())
    assert again == spec
    assert again.space.job == spec.space.job
    jobs = spec.jobs(spec.legal_set())
    assert len(jobs) == 2 * len(spec.legal_set())


def test_a_campaign_with_a_knob_that_its_trainer_lacks_is_refused_by_name() -> None:
    space = {"global_batch_size": 16, "job": {"moe_dispatcher": ["deepep"]}}
    with pytest.raises(SpaceInvalidError, match=r"space\.job\.moe_dispatcher.*embedded"):
        CampaignSpec.from_document({**CAMPAIGN, "space": space})


def test_the_switch_of_the_probes_is_the_knob_compile_at_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = {
        "name": "knobs",
        "model": "tiny-llama",
        "cluster": "local-cpu",
        "space": {"global_batch_size": 16, "job": {"compile": [False, True]}},
        "budget": {"trials": 4},
        "probe": {"compile": True},
    }
    with pytest.raises(
        SearchSpaceError, match=r"space\.job\.compile: probe\.compile=true compiles"
    ):
        CampaignSpec.from_document(document)
    known = {"after": knob("after", when="compile"), "compile": knob("compile")}
    monkeypatch.setattr(stated_jobs, "knobs_of_trainer", lambda _: ("embedded", known))
    document["space"] = {"global_batch_size": 16, "job": {"after": [False, True]}}
    spec = CampaignSpec.from_document(document)
    assert spec.space.job.values("compile") == (True,)
    monkeypatch.undo()
    document["space"] = {"global_batch_size": 16, "job": {"compile": True}}
    spec = CampaignSpec.from_document(document)
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec


def listing(*jobs: dict[str, Any]) -> CampaignSpec:
    layout = CampaignSpec.from_document(CAMPAIGN).legal_set().layout(0).to_mapping()
    layouts = [{**layout, **({"job": job} if job else {})} for job in jobs]
    return CampaignSpec.from_document({**CAMPAIGN, "layouts": layouts})


def test_a_campaign_that_lists_jobs_has_these_alone() -> None:
    for jobs, keys in (
        (({"compile": True},), ["~compile.true"]),
        (({}, {"compile": True}, {"compile": True}), ["", "~compile.true"]),
        (({"compile": False},), [""]),
    ):
        spec = listing(*jobs)
        found = spec.jobs(spec.legal_set())
        assert [found.layout(at).job.key for at in range(len(found))] == keys
        assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
        assert all(found.index_of(found.layout(at)) == at for at in range(len(found)))


def test_a_listed_job_that_the_space_or_trainer_does_not_have_is_refused_with_its_place() -> None:
    with pytest.raises(SearchSpaceError, match=r"layouts\.1\.job\.compiler: .*compile"):
        listing({}, {"compiler": True})
    only_compiled = {**CAMPAIGN, "space": {"global_batch_size": 16, "job": {"compile": True}}}
    plain = CampaignSpec.from_document(CAMPAIGN).legal_set().layout(0).to_mapping()
    spec = CampaignSpec.from_document({**only_compiled, "layouts": [plain]})
    with pytest.raises(SpaceInvalidError, match=r"layouts\.0\.job: .*the trainer's defaults"):
        spec.legal_set()


def test_a_baseline_is_outside_of_a_space_that_does_not_have_its_settings() -> None:
    legal = CampaignSpec.from_document(CAMPAIGN).legal_set()
    baseline = {**legal.layout(0).to_mapping(), "job": {"compile": True}}
    for searched, is_outside in (
        ({"compile": [False, True]}, False),
        ({"compile": True}, False),
        ({"compile": [False]}, True),
        ({}, True),
    ):
        space = {"global_batch_size": 16, "job": searched}
        spec = CampaignSpec.from_document({**CAMPAIGN, "space": space, "baseline": baseline})
        assert spec.baseline_is_outside == is_outside, searched
