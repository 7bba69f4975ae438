"""The jobs of a script, as readers of commands find them."""

import subprocess
import sys
from pathlib import Path

import pytest

from layout_tuner.trainers.found_jobs import job_file
from layout_tuner.trainers.found_jobs.found_job import (
    Findings,
    FoundJob,
    JobFileInvalidError,
    job_lines,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, options_of
from layout_tuner.trainers.found_jobs.script_jobs import read_script


def reader(command: ProgramCommand, file: JobFile) -> FoundJob | None:
    """Reads `--tp` and the configuration of a program `train.py`."""
    if not command.program.endswith("train.py"):
        return None
    findings = Findings()
    for option in options_of(command.words):
        if option.name == "--tp":
            findings.note("tp", option.values[0].text, option.said, option.values[0].place)
        if option.name == "--config":
            found = file.beside(option.values[0].said)
            findings.note("zero_stage", "" if found is None else found.text.strip(), option.said)
    findings.assume("pp", 1, "the default")
    return findings.job(file=file.name, format="megatron-lm", trainer="megatron-lm")


def jobs(text: str, name: str = "job.sh") -> list[FoundJob] | None:
    return read_script(JobFile(name=name, text=text), [reader])


def test_a_job_has_its_options_ranks_and_command() -> None:
    found = jobs("TP=4\nexport A=1\ntorchrun --nnodes 2 --nproc_per_node 8 train.py --tp $TP")
    assert found is not None
    (job,) = found

    assert job.values == {"tp": "4", "pp": 1, "num_nodes": 2, "devices_per_node": 8}
    assert job.command is not None
    assert job.command.words == ("train.py", "--tp", "4")
    assert job.command.environment == {"A": "1"}
    assert job.name == ""


def test_a_file_of_a_byte_too_many_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_file, "MAX_BYTES", 10)
    script = tmp_path / "job.sh"
    script.write_text("x" * 10)
    assert JobFile.open(script).text == "x" * 10
    script.write_text("x" * 11)
    with pytest.raises(JobFileInvalidError, match=r"'job\.sh': it has more than"):
        JobFile.open(script)


def test_several_jobs_have_numbers() -> None:
    found = jobs("torchrun train.py --tp 4\npython other.py\ntorchrun train.py --tp 8") or []

    assert [(each.name, each.value("tp")) for each in found] == [("1", "4"), ("2", "8")]


def test_one_job_in_two_branches_is_one() -> None:
    text = "if [ $X ]; then\n  {0}\nelse\n  {0} >> log\nfi".format("torchrun train.py --tp 4")
    found = jobs(text) or []

    assert [each.name for each in found] == [""]


def test_a_program_reads_what_its_script_writes() -> None:
    found = jobs("D=$PWD\ncat > $D/a.json <<EOF\n3\nEOF\npython train.py --config $D/a.json")

    assert found is not None
    assert found[0].value("zero_stage") == "3"


def test_a_plain_command_line_in_a_text_is_a_job() -> None:
    found = jobs("python train.py --tp 4", "command.txt")

    assert found is not None
    assert found[0].value("tp") == "4"


def test_options_behind_a_placeholder_are_read() -> None:
    found = jobs("python train.py --tp 4 --save <PATH TO CHECKPOINTS> --fp16 --tp 8")

    assert found is not None
    assert found[0].value("tp") == "8"


def test_a_file_in_an_unknown_folder_holds_no_options() -> None:
    found = jobs('HERE="$(cd . && pwd)"\npython train.py --tp 4 --config "$HERE/a_config.json"')

    assert found is not None
    assert found[0].not_understood == ()


def test_variables_that_may_hold_any_options_are_listed() -> None:
    found = jobs("python train.py --tp 4 $EXTRA_ARGS")

    assert found is not None
    assert [each.said for each in found[0].not_understood] == ["$EXTRA_ARGS"]


def test_defaults_are_open_where_unknown_options_may_change_them() -> None:
    text = "source model.sh\npython train.py --tp 4 ${MODEL_ARGS[@]}"
    (job,) = jobs(text) or []

    assert set(job.open_fields) == {"pp"}
    assert job.value("tp") == "4"


def test_defaults_stay_beside_options_of_a_variable_that_nothing_sets() -> None:
    (job,) = jobs("python train.py --tp 4 $EXTRA_ARGS") or []

    assert job.value("pp") == 1
    assert job.open_fields == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "python: train.py"),
        ("a.txt", "Some words, and don't read them"),
        ("a.py", "train.py"),
        ("README", "x"),
    ],
)
def test_other_files_are_no_scripts(name: str, text: str) -> None:
    assert jobs(text, name) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/bash\necho", "starts no training"),
        ("#!/bin/bash\npython prepare.py", "starts prepare.py"),
    ],
)
def test_a_script_without_a_job_is_refused(text: str, said: str) -> None:
    with pytest.raises(JobFileInvalidError, match=said):
        jobs(text)


def test_help_does_not_import_the_parser() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom layout_tuner.cli.main import main\n"
        "import layout_tuner.trainers.found_jobs.read_job\n"
        "assert not any(name.startswith('tree_sitter') for name in sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("tp", ["${1:-8}", "${TP:-8}", '"${TP:=8}"', "${TP-8}"])
def test_the_default_of_a_variable_is_assumed_and_keeps_its_place(tp: str) -> None:
    text = f"T={tp}\nN=2\ntorchrun --nnodes ${{N:-4}} --nproc_per_node ${{G:-8}} train.py --tp $T"
    (job,) = jobs(text) or ()
    name = "$1" if "1" in tp else "$TP"

    assert [(each.field, each.value) for each in job.certain] == [("num_nodes", 2)]
    assert [(each.field, each.why) for each in job.presumed] == [
        ("pp", "the default"),
        ("tp", f"--tp 8: its default where {name} is not given"),
        ("devices_per_node", "--nproc_per_node 8: its default where $G is not given"),
    ]
    (read,) = [each for each in job.read if each.field == "tp"]
    assert read.place is not None
    assert text[read.place.start : read.place.end] == "8"
    lines = "\n".join(job_lines(job))
    assert lines.index("assumed:") < lines.index("tp = 8")


def test_a_default_of_a_variable_that_is_set_is_read() -> None:
    (job,) = jobs("TP=4\npython train.py --tp ${TP:-8}") or ()

    assert [(each.field, each.value) for each in job.certain] == [("tp", "4")]


def test_options_in_quotes_that_leave_no_job_are_said_to_be_one_word() -> None:
    with pytest.raises(JobFileInvalidError, match="stands in quotes"):
        read_script(JobFile(name="job.sh", text='A="--tp 4 --pp 2"\npython pretrain_gpt.py "$A"'))
