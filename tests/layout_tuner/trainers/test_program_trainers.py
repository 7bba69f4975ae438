"""The file of a worker's trainers: its entries, their parameters, and the placeholders in them."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.parameters import (
    MAX_VALUE_LENGTH,
    Parameter,
    ParameterInvalidError,
    parameter_texts,
    read_parameters,
)
from layout_tuner.trainers.placeholders import (
    PLACEHOLDERS,
    PlaceholderUnknownError,
    environment_values,
    filled,
    placeholder_values,
)
from layout_tuner.trainers.program import read_trainers
from tests.kit.layouts import EVERY_KNOB

ENTRY: dict[str, Any] = {
    "name": "mine",
    "version": "3",
    "command": ["{python}", "train.py", "--tp={tp}", "--rate={rate}"],
    "parameters": {"rate": {"type": "float", "minimum": 0, "maximum": 1, "default": 0.5}},
}


def test_an_entry_is_read_with_what_it_leaves_out() -> None:
    (trainer,) = read_trainers({"trainers": [ENTRY]}, "/where").values()
    assert (trainer.name, trainer.version, trainer.adapter) == ("mine", "3", "command")
    assert trainer.command == tuple(ENTRY["command"])
    assert trainer.directory == "/where"
    assert trainer.parameters["rate"] == Parameter(type="float", minimum=0, maximum=1, default=0.5)
    stated = (trainer.processes_per, trainer.start_limit_s, trainer.same_data)
    assert stated == ("device", None, False)
    assert trainer.patterns.read("step 1 loss 3") is None


def test_what_yaml_makes_of_numbers_and_switches_is_text_for_the_program() -> None:
    text = (
        "trainers: [{name: mine, version: 1.10, command: [t], environment: {A: 1, B: yes, C: x}}]"
    )
    (trainer,) = read_trainers(yaml.safe_load(text)).values()
    assert trainer.version == "1.1"
    assert trainer.environment == {"A": "1", "B": "true", "C": "x"}


def test_a_parameter_may_be_an_argument_of_code_that_a_shell_reads() -> None:
    command = ["sh", "-c", 'exec train "$0"', "{rate}"]
    assert read_trainers({"trainers": [{**ENTRY, "command": command}]})


@pytest.mark.parametrize(
    ("changes", "field", "why"),
    [
        ({"name": "left out"}, "trainers.0.name", "the field is missing"),
        ({"name": "a b"}, "trainers.a b.name", "'a b' is not 1 to 64 characters"),
        ({"name": "embedded"}, "trainers.embedded.name", "is the name of the embedded trainer"),
        ({"version": "left out"}, "version", "the field is missing"),
        ({"version": {"a": 1}}, "version", "{'a': 1} is not a version"),
        ({"version": "v" * 65}, "version", "is not a version of 1 to 64"),
        ({"version": "1\n2"}, "version", "'1\\n2' is not a version"),
        ({"command": "left out"}, "command", "the field is missing"),
        ({"command": "python train.py"}, "command", "is not a list of texts, one for each argument"),
        ({"command": []}, "command", "it is empty"),
        ({"command": ["train", "a\0b"]}, "command", "NUL"),
        ({"command": ["train", "{tpp}"]}, "command", "{tpp} in '{tpp}' is no placeholder"),
        ({"command": ["{word}"], "parameters": {"word": {"type": "text", "pattern": "x"}}},
         "command", "{word} cannot be in the name of the program"),
        ({"command": ["sh", "-c", "train {rate}"]}, "command", "{rate} would be read as code in the"),
        ({"command": ["t"], "container": ["{rate}"]}, "container", "cannot be in the name"),
        ({"container": ["bash", "-lc", "x {rate}"]}, "container", "text after -lc"),
        ({"container": ["apptainer", "{image}"]}, "container", "{image}"),
        ({"environment": {"A-B": "1"}}, "environment", "'A-B' is not the name of a variable"),
        ({"environment": {"LAYOUT_TUNER_REPORT": "1"}}, "environment", "which the worker sets"),
        ({"environment": {"A": None}}, "environment", "None is not a text, a number or a switch"),
        ({"environment": {"A": ["b"]}}, "environment", "['b'] is not a text"),
        ({"environment": {"A": "{nothing}"}}, "environment", "{nothing}"),
        ({"working_directory": "here"}, "working_directory", "'here' is not an absolute path"),
        ({"working_directory": "{trainers_directry}"}, "working_directory", "{trainers_directry}"),
        ({"processes_per": "gpu"}, "processes_per", "'gpu'"),
        ({"adapter": "horovod"}, "adapter", "'horovod'"),
        ({"start_limit_s": 0}, "start_limit_s", "0 is not a number of seconds over 0"),
        ({"start_limit_s": True}, "start_limit_s", "True is not a number of seconds"),
        ({"same_data": "yes"}, "same_data", "'yes' is not true or false"),
        ({"log": "loss"}, "log", "the log"),
        ({"log": {"step": "("}}, "log.step", "'(' is not a regular expression"),
        ({"log": {"step": "(?P<los>x)"}}, "log.step", "the group 'los' has no meaning"),
        ({"log": {"step": ""}}, "log.step", "it is not a regular expression"),
        ({"log": {"step": []}}, "log.step", "it is not a regular expression"),
        ({"log": {"step": ["x", 1]}}, "log.step", "it is not a regular expression"),
        ({"log": {"step": ["x", "("]}}, "log.step", "'(' is not a regular expression"),
        ({"log": {"steps": "x"}}, "log", "'steps'"),
        ({"directory": "/x"}, "directory", "'directory'"),
        ({"comand": ["x"]}, "comand", "'comand'"),
        ({"parameters": {"Rate": {"type": "int"}}}, "parameters", "'Rate' is not a name"),
        ({"parameters": {"tp": {"type": "int"}}}, "parameters", "{tp} is a placeholder already"),
        ({"parameters": {"arguments": {"type": "int"}}}, "parameters", "{arguments} is a"),
        ({"parameters": {"layout_arguments": {"type": "int"}}}, "parameters", "{layout_arguments} is a"),
        ({"command": ["train", "{layout_arguments}"]}, "command", "command has no {layout_arguments}"),
        ({"configuration": ["x"]}, "configuration", "the configuration"),
        ({"configuration": {"x": 1}}, "configuration", "command has no configuration in a file"),
        ({"parameters": {f"p{n}": {"type": "int"} for n in range(33)}}, "parameters", "33 are more"),
        ({"parameters": {"rate": {}}}, "parameters.rate.type", "the field is missing; it is one of"),
        ({"parameters": {"rate": {"type": "number"}}}, "parameters.rate.type", "'number'"),
        ({"parameters": {"rate": {"type": "text"}}}, "parameters.rate", "needs pattern"),
        ({"parameters": {"rate": {"type": "path"}}}, "parameters.rate", "needs below"),
        ({"parameters": {"rate": {"type": "choice"}}}, "parameters.rate", "needs choices"),
        ({"parameters": {"rate": {"type": "choice", "choices": [True]}}}, "rate.choices", "quote"),
        ({"parameters": {"rate": {"type": "int", "pattern": "x"}}}, "rate", "cannot have pattern"),
        ({"parameters": {"rate": {"type": "bool", "minimum": 1}}}, "rate", "cannot have minimum"),
        ({"parameters": {"rate": {"type": "int", "minimum": "1"}}}, "rate.minimum", "not a number"),
        ({"parameters": {"rate": {"type": "int", "minimum": 2, "maximum": 1}}}, "rate",
         "no number is from minimum=2 to maximum=1"),
        ({"parameters": {"rate": {"type": "int", "default": 1.5}}}, "rate.default", "not a whole"),
        ({"parameters": {"rate": {"type": "text", "pattern": "("}}}, "rate.pattern", "regular"),
        ({"parameters": {"rate": {"type": "path", "below": "data"}}}, "rate.below", "absolute"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_one_error_with_the_trainer_and_the_field(
    changes: dict[str, Any], field: str, why: str
) -> None:
    entry = {name: value for name, value in {**ENTRY, **changes}.items() if value != "left out"}
    with pytest.raises(SearchSpaceError) as refused:
        read_trainers({"trainers": [entry]})
    problem = str(refused.value)
    assert field in problem
    assert why in problem
    assert "trainers." in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("document", "why"),
    [
        *((no_mapping, "the file") for no_mapping in (None, [])),
        *(
            (none, "it is not a list of trainers")
            for none in ({}, {"trainers": []}, {"trainers": {}})
        ),
        ({"trainers": [ENTRY], "more": 1}, "'more'"),
        ({"trainers": ["mine"]}, "trainers.0: "),
        ({"trainers": [ENTRY, ENTRY]}, "trainers.mine.name: there are two of this name"),
    ],
)
def test_a_file_that_is_no_list_of_trainers_is_refused(document: object, why: str) -> None:
    with pytest.raises(SearchSpaceError, match=re.escape(why)):
        read_trainers(document)


PARAMETERS = {
    "count": Parameter(type="int", minimum=1, maximum=8),
    "rate": Parameter(type="float", minimum=0.0),
    "fast": Parameter(type="bool"),
    "kind": Parameter(type="choice", choices=("adam", "no", "1")),
    "tag": Parameter(type="text", pattern=r"[\w =;$'\"`{}|&<>(){}*?~\\-]*"),
    "data": Parameter(type="path", below="/data/sets"),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 0), ("count", 9), ("count", True), ("count", 1.0), ("count", "3"),
        ("count", 10**400), ("rate", -0.1), ("rate", math.nan), ("rate", math.inf), ("rate", True),
        ("rate", "0.5"), ("rate", 10**400), ("fast", "true"), ("fast", 1), ("kind", "sgd"),
        ("kind", False), ("kind", 1), ("tag", "--evil"), ("tag", "-c"), ("tag", "a\nb"),
        ("tag", "a\0b"), ("tag", "a\x1bb"), ("tag", "a\u2028b"), ("tag", "a\u202eb"),
        ("tag", "\ud800"), ("tag", "x" * 201), ("tag", 5), ("tag", "é,"), ("tag", None),
        ("data", ""), ("data", "/etc/passwd"), ("data", "//etc"), ("data", ".."), ("data", "a/.."),
        ("data", "../sets2/x"), ("data", "a/../../x"), ("data", "-x"), ("data", "a\nb"),
        ("data", "a\0"), ("data", ["a"]),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterInvalidError) as refused:
        parameter_texts({name: PARAMETERS[name]}, {name: value})
    assert str(refused.value).startswith(f"{name}: ")
    assert "\n" not in str(refused.value)


def test_all_wrong_and_missing_parameters_are_reported_together() -> None:
    given = {"cuont": 1, "rate": -1, "fast": True, "kind": "no", "tag": "t", "data": "d"}
    with pytest.raises(ParameterInvalidError) as refused:
        parameter_texts(PARAMETERS, given)
    assert [part.field for part in refused.value.parts] == ["cuont", "count", "rate"]
    assert "'cuont'" in str(refused.value)
    assert "count: the parameter has no default" in str(refused.value)
    with pytest.raises(ParameterInvalidError, match="'count'; there are none to choose from"):
        parameter_texts({}, {"count": 1, "rate": 2})
    with pytest.raises(ParameterInvalidError, match="33 parameters are more than 32"):
        read_parameters({f"p{n}": n for n in range(33)})


def test_the_service_gets_a_declaration_as_the_owner_wrote_it() -> None:
    for declared in (*PARAMETERS.values(), Parameter(type="text", pattern=".*", default="")):
        sent = json.loads(json.dumps(declared.for_service()))
        assert Parameter.from_mapping(sent) == declared


@pytest.mark.parametrize(
    ("pattern", "is_quick"),
    [
        ("", True), ("[a-z]+", True), (r"[\]*+?{(]{1,9}-\(\+\+.?", True), ("bf16|fp16|fp32", True),
        (r"\d+\.\d*", True), ("(a+)+b", False), ("(bf|fp)16", False), (".*.*.*x", False),
        ("a?a?a?", False), (r"\\(a*)*", False), (r"[^]a](b*)*", False), ("(?x)[ # ]\n(a*)*", False),
        ("a\n", False), ("\u202e", False),
    ],
)  # fmt: skip
def test_patterns_that_may_take_long_are_left_to_the_worker(pattern: str, is_quick: bool) -> None:
    declared = Parameter(type="text", pattern=f"{pattern}x")
    sent = Parameter.from_mapping(declared.for_service())
    assert (sent == declared) is is_quick
    assert sent.is_quick
    assert sent.problem("any line") is None or is_quick


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("count", 8, "8"), ("rate", 1e-05, "1e-05"), ("rate", 3, "3"), ("fast", True, "true"),
        ("kind", "no", "no"), ("tag", "a; rm -rf $HOME `x` '\"", "a; rm -rf $HOME `x` '\""),
        ("tag", "{tp}", "{tp}"), ("data", "a b/c;d", "/data/sets/a b/c;d"), ("data", ".", "/data/sets"),
        ("data", "..x/y..", "/data/sets/..x/y.."),
    ],
)  # fmt: skip
def test_an_allowed_value_reaches_the_program_as_it_is(name: str, value: Any, text: str) -> None:
    assert parameter_texts({name: PARAMETERS[name]}, {name: value}) == {name: text}


@settings(max_examples=50)
@given(st.text(max_size=250))
def test_no_text_can_pass_for_an_option_or_end_a_line(text: str) -> None:
    anything = Parameter(type="text", pattern=r"(?s).*")
    if anything.problem(text) is None:
        assert not text.startswith("-")
        assert len(text) <= MAX_VALUE_LENGTH
        assert text.isprintable()
        text.encode()


@given(st.text(alphabet="./ab-~", max_size=20))
def test_no_path_leads_out_of_its_directory(text: str) -> None:
    path = PARAMETERS["data"]
    if path.problem(text) is None:
        assert os.path.normpath(path.text(text)).startswith("/data/sets")


@given(st.text(max_size=40), st.text(alphabet="{}tp ", max_size=20))
def test_a_value_is_never_read_as_a_template(value: str, other: str) -> None:
    template = "--x={tag}" + "{tp}"
    assert filled(template, {"tag": value + other, "tp": "{tag}"}) == f"--x={value}{other}{{tag}}"


@given(st.one_of(st.none(), st.integers(), st.floats(), st.booleans(), st.text(max_size=210),
                 st.lists(st.integers(), max_size=2)))  # fmt: skip
def test_a_campaigns_parameter_is_a_plain_value(value: Any) -> None:
    is_plain = isinstance(value, (bool, str)) or (
        isinstance(value, (int, float)) and abs(value) < 1e300
    )
    if isinstance(value, str):
        is_plain = value.isprintable() and len(value) <= MAX_VALUE_LENGTH
    if is_plain:
        assert read_parameters({"x": value}) == {"x": value}
    elif not isinstance(value, float) or not math.isfinite(value):
        with pytest.raises(ParameterInvalidError, match=r"^x: "):
            read_parameters({"x": value})


SHAPE = {"name": "small", "family": "llama", "num_layers": 12, "hidden_size": 64}
SHAPE |= {"ffn_hidden_size": 160, "num_heads": 4, "num_kv_heads": 2, "seq_length": 32}
JOB = TrainerJob(
    model=ModelShape.from_mapping(SHAPE | {"vocab_size": 500}),
    layout=replace(EVERY_KNOB, pp=3, micro_batch_size=5, num_microbatches=6),
    seed=9,
)


def test_every_field_has_a_placeholder_and_derived_numbers_are_those_of_the_arithmetic() -> None:
    values = placeholder_values(JOB)
    stated = {each.name for each in (*fields(Layout), *fields(ModelShape))} - {"name"}
    assert stated - {"job"} < set(values)
    assert tuple(values) == PLACEHOLDERS
    assert all(isinstance(value, str) for value in values.values())
    expected = {
        "num_devices": 2 * 2 * 2 * 3 * 4,
        "ranks_per_node": 48,
        "global_batch_size": 4 * 5 * 6,
        "tokens_per_step": 4 * 5 * 6 * 32,
        "zero_group_size": 4,
        "layers_per_stage": 4,
        "layers_per_virtual_stage": 2,
        "head_size": 16,
        "seed": 9,
        "model": "small",
        "tp": 2,
        "ep": 2,
        "etp": 2,
        "sequence_parallel": "true",
        "compile": "false",
    }
    values, environment = placeholder_values(JOB), environment_values(JOB)
    for name, value in expected.items():
        assert values[name] == environment[f"LAYOUT_{name.upper()}"] == str(value)
    unstated = {each.name for each in fields(ModelShape)} - JOB.model.to_mapping().keys()
    assert len(environment) == len(PLACEHOLDERS) - len(unstated)
    assert "LAYOUT_NUM_EXPERTS" not in environment
    experts = environment_values(replace(JOB, model=model_preset("tiny-moe")))
    assert (experts["LAYOUT_NUM_EXPERTS"], experts["LAYOUT_QK_NORM"]) == ("8", "true")
    of_experts = placeholder_values(replace(JOB, model=model_preset("tiny-moe")))
    assert (of_experts["attention_window"], of_experts["head_dim"]) == ("0", "32")


def test_a_template_is_filled_once_and_other_braces_stay() -> None:
    template = '--tp={tp} {"bf16": {precision}} ${HOME} {} { tp }'
    expected = '--tp=2 {"bf16": bf16} ${HOME} {} { tp }'
    assert filled(template, placeholder_values(JOB)) == expected
    assert filled("{model} {tp}", {"model": "{tp}", "tp": "2"}) == "{tp} 2"
    known = r"\{tpp\} in '--tp \{tpp\}'.* tp, tp_columns, cp, pp, dp"
    with pytest.raises(PlaceholderUnknownError, match=known):
        filled("--tp {tpp}", placeholder_values(JOB))
