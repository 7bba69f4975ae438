"""Options of a script are changed, put in and taken out in the manner in which they are written."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping

import pytest

from layout_tuner.trainers.found_jobs.into.layout_changes import GONE
from layout_tuner.trainers.found_jobs.into.script_edits import (
    Edit,
    EditsOverlapError,
    edited,
    script_edits,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.scripts.shell_script import started_programs

TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"
ANCHORS = ({TP, PP, SP},)


def changed(
    text: str,
    changes: Mapping[str, tuple[str, ...] | object],
    *,
    replaced: Collection[str] = (),
    environment: Mapping[str, str] | None = None,
    at_use: bool = False,
) -> str:
    text = textwrap.dedent(text).removeprefix("\n")
    (started,) = started_programs(JobFile(name="job.sh", text=text))
    edits = script_edits(
        text,
        started.command,
        changes=changes,
        replaced=replaced,
        anchors=ANCHORS,
        environment=environment or {},
        at_use=at_use,
    )
    return edited(text, edits)


ARRAY = f"""
TP=4
PARALLEL=(
    {TP} $TP   # of a node
    {PP} 2
    {SP}
)
torchrun pretrain_gpt.py "${{PARALLEL[@]}}"
"""
LINES = f"""
TP=4
torchrun pretrain_gpt.py \\
    {TP} $TP \\
    {SP} \\
    {PP} 2
"""
STRING = f"""
TP=4
ARGS="{TP} $TP {SP} {PP} 2"
torchrun pretrain_gpt.py $ARGS
"""


def plain(text: str) -> str:
    return text.removeprefix("\n")


@pytest.mark.parametrize("text", [ARRAY, LINES, STRING])
def test_a_variable_that_carries_a_value_is_assigned_the_new_one(text: str) -> None:
    assert changed(text, {TP: ("8",)}) == plain(text).replace("TP=4", "TP=8")


@pytest.mark.parametrize("text", [ARRAY, LINES, STRING])
def test_a_value_is_written_in_place_of_its_variable_where_that_is_asked(text: str) -> None:
    assert changed(text, {TP: ("8",)}, at_use=True) == plain(text).replace("$TP", "8")


@pytest.mark.parametrize("text", [ARRAY, LINES, STRING])
def test_a_literal_changes_alone(text: str) -> None:
    assert changed(text, {PP: ("16",)}) == plain(text).replace(f"{PP} 2", f"{PP} 16")


@pytest.mark.parametrize("text", [ARRAY, LINES, STRING])
def test_values_that_are_there_already_change_nothing(text: str) -> None:
    assert changed(text, {TP: ("4",), PP: ("2",), SP: (), "--other": GONE}) == plain(text)


def test_an_option_of_an_array_goes_with_its_line() -> None:
    assert changed(ARRAY, {SP: GONE}) == plain(ARRAY).replace(f"    {SP}\n", "")
    gone = plain(ARRAY).replace(f"    {TP} $TP   # of a node\n", "")
    assert changed(ARRAY, {TP: GONE}) == gone


def test_an_option_of_continued_lines_goes_with_its_backslash() -> None:
    assert changed(LINES, {SP: GONE}) == plain(LINES).replace(f"    {SP} \\\n", "")


def test_the_last_of_continued_lines_takes_the_backslash_before_it_along() -> None:
    assert changed(LINES, {PP: GONE}) == plain(LINES).replace(f" \\\n    {PP} 2", "")


def test_options_of_a_string_go_with_the_space_beside_them() -> None:
    assert changed(STRING, {SP: GONE}) == plain(STRING).replace(f" {SP}", "")
    assert changed(STRING, {PP: GONE}) == plain(STRING).replace(f" {PP} 2", "")
    assert changed(STRING, {TP: GONE}) == plain(STRING).replace(f"{TP} $TP ", "")


def test_new_options_of_an_array_are_lines_behind_the_last_option_of_the_layout() -> None:
    new = {"--recompute-method": ("uniform",), "--overlap": ()}
    expected = f"    {SP}\n    --recompute-method uniform\n    --overlap\n"
    assert changed(ARRAY, new) == plain(ARRAY).replace(f"    {SP}\n", expected)


def test_new_options_of_continued_lines_are_continued() -> None:
    new = {"--recompute-method": ("uniform",)}
    expected = f"{PP} 2 \\\n    --recompute-method uniform\n"
    assert changed(LINES, new) == plain(LINES).replace(f"{PP} 2\n", expected)


def test_new_options_of_a_string_stand_on_its_line() -> None:
    assert changed(STRING, {"--overlap": ()}) == plain(STRING).replace(" 2", " 2 --overlap")


def test_an_option_goes_while_another_comes_behind_its_neighbour() -> None:
    result = changed(ARRAY, {SP: GONE, "--overlap": ()})
    assert result == plain(ARRAY).replace(SP, "--overlap")
    result = changed(LINES, {PP: GONE, "--overlap": ()})
    assert result == plain(LINES).replace(f"{PP} 2", "--overlap")


def test_an_option_of_several_values_is_written_anew() -> None:
    text = f"torchrun train.py {TP} 4 --recompute-modules core_attn mlp --bf16\n"
    result = changed(text, {"--recompute-modules": ("core_attn",)})
    assert result == f"torchrun train.py {TP} 4 --recompute-modules core_attn --bf16\n"


def test_another_spelling_goes_where_the_trainers_own_comes() -> None:
    text = f"torchrun train.py {TP} 4 --num-layers-per-virtual-pipeline-stage 4 --bf16\n"
    result = changed(
        text,
        {"--num-virtual-stages-per-pipeline-rank": ("2",)},
        replaced=["--num-layers-per-virtual-pipeline-stage"],
    )
    assert result == f"torchrun train.py {TP} 4 --num-virtual-stages-per-pipeline-rank 2 --bf16\n"


def test_a_value_behind_an_equals_sign_stays_there() -> None:
    assert (
        changed(f"torchrun train.py {TP}=4 --bf16\n", {TP: ("8",)})
        == f"torchrun train.py {TP}=8 --bf16\n"
    )


def test_of_two_values_for_one_variable_the_second_is_written_in_its_place() -> None:
    text = f"N=4\ntorchrun train.py {TP} $N {PP} $N\n"
    both = {TP: ("8",), PP: ("2",)}
    assert changed(text, both) == f"N=8\ntorchrun train.py {TP} $N {PP} 2\n"
    assert changed(text, both, at_use=True) == f"N=4\ntorchrun train.py {TP} 8 {PP} 2\n"


def test_changes_that_overlap_are_an_error() -> None:
    with pytest.raises(EditsOverlapError):
        edited("abc", [Edit(start=0, end=2, text="x"), Edit(start=1, end=3, text="y")])


def test_a_variable_of_the_environment_is_set_where_it_is_exported_or_before_the_command() -> None:
    text = f"export A=1\ntorchrun train.py {TP} 4\n"
    assert changed(text, {}, environment={"A": "2"}) == f"export A=2\ntorchrun train.py {TP} 4\n"
    assert (
        changed(text, {}, environment={"B": "2"})
        == f"export A=1\nexport B=2\ntorchrun train.py {TP} 4\n"
    )
