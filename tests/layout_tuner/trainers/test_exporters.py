"""Exported jobs and their scripts, which the shell runs; no text that is reported changes them."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from layout_tuner.api.formatting import measured_sentence
from layout_tuner.api.report.probe_command import probe_command
from layout_tuner.documents.reading import is_name
from layout_tuner.results_db.records import MeasurementRecord
from layout_tuner.results_db.rows import record_of
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.exports.export import (
    FORMATS,
    ExportFormatUnknownError,
    ExportSource,
    export,
)
from layout_tuner.trainers.exports.export_source import ExportImpossibleError, KnobsLackingError
from layout_tuner.trainers.exports.exported import ExportRead
from layout_tuner.trainers.exports.launch_script import exported
from layout_tuner.trainers.exports.torchtitan_files import _toml_lines
from layout_tuner.trainers.parameters import parameters_of
from layout_tuner.trainers.placeholders import environment_values
from layout_tuner.trainers.registry import ALIASES
from layout_tuner.workers.trainer.job.job import TrainJob
from tests.kit.hostile_texts import hostile_texts
from tests.kit.store import make_environment, make_measurement
from tests.search_spaces.campaigns.test_campaign_spec import read as campaign

MEGATRON = Layout(num_nodes=2, tp=2, pp=2, dp=2, zero_stage=1, recompute="full", precision="bf16")
LAYOUTS = {
    "megatron-lm": MEGATRON,
    "megatron-deepspeed": MEGATRON,
    "megatron-bridge": MEGATRON,
    "torchtitan-0.2": Layout(num_nodes=2, tp=2, pp=4, sequence_parallel=True, num_microbatches=8),
    "torchtitan-0.3": Layout(num_nodes=2, tp=2, pp=2, dp=2, vpp=2, num_microbatches=4),
    "torchtitan-main": Layout(num_nodes=2, tp=2, pp=2, dp=2, vpp=2, num_microbatches=4),
    "nanotron": Layout(num_nodes=2, tp=2, pp=2, dp=2, zero_stage=1, precision="bf16"),
    "deepspeed": Layout(num_nodes=2, pp=2, dp=4, zero_stage=1, precision="bf16"),
    "axonn": Layout(num_nodes=2, tp=2, tp_columns=2, dp=2, zero_stage=3, precision="bf16"),
    "accelerate": Layout(num_nodes=2, tp=2, pp=2, dp=2, recompute="full", precision="bf16"),
    "command": Layout(num_nodes=2, tp=2, pp=2, dp=2, vpp=2, zero_stage=1, precision="fp16"),
}
"""Eight ranks on two nodes, with knobs that each trainer has."""

USERS = {
    "TOKENIZER_DIR": "/the user's/tokenizer",
    "NANOTRON_DIR": "/the user's/nanotron",
    "TRAIN_SCRIPT": "/the user's/train.py",
    "MEGATRON_DIR": "/the user's/megatron",
    "MEGATRON_DEEPSPEED_DIR": "/the user's/megatron",
    "BRIDGE_DIR": "/the user's/bridge",
    "DATA_ARGS": "--data-path /data/tokens",
}
PROGRAMS = {
    "megatron-lm": "/the user's/megatron/pretrain_gpt.py",
    "megatron-deepspeed": "/the user's/megatron/pretrain_gpt.py",
    "megatron-bridge": "/the user's/bridge/scripts/training/run_recipe.py",
}
"""Of the trainers that take arguments, the programs that get those of the adapters."""

BESIDE = {
    "megatron-deepspeed": ("--deepspeed_config", "ds_config.json"),
    "torchtitan-0.2": ("--job.config_file", "torchtitan.toml"),
    "nanotron": ("--config-file", "nanotron.yaml"),
    "deepspeed": ("--deepspeed_config", "ds_config.json"),
    "axonn": ("/the user's/train.py", "axonn.json"),
}
"""After which word the scripts name which file beside them."""

SAYS = """#!/bin/sh
for word in "$@"; do printf "%s\\n" "$word"; done
env | grep -E "^(LAYOUT_|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|ACCELERATE_|PYTHONPATH|SLURM_[CDH])" | sort
"""
SRUN = """#!/bin/bash
echo "srun $*"
while [ "$1" != bash ]; do shift; done
for rank in 0 7; do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 4)) SLURM_NODEID=$((rank / 4)) "$@"
done
"""
# A reader that stops after the first line would end it with SIGPIPE, and the script with it.
SCONTROL = "#!/bin/sh\necho first-node\nfor n in $(seq 5000); do echo node-$n; done\n"
STAND_INS = {"torchrun": SAYS, "python": SAYS, "accelerate": SAYS, "srun": SRUN}


def source_of(name: str) -> ExportSource:
    job = TrainerJob(model=model_preset("tiny-llama"), layout=LAYOUTS[name], seed=3)
    return ExportSource(
        campaign="wide", trial=7, job=job, comments=("10 % faster than the baseline",)
    )


def started(
    name: str, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the launch script of a format with stand-ins, which print arguments and environment."""
    for file in export(name, source_of(name)).files:
        (folder / file.name).write_text(file.content)
    stand_ins = folder / "stand-ins"
    stand_ins.mkdir(exist_ok=True)
    for program, content in {**STAND_INS, "scontrol": SCONTROL}.items():
        (stand_ins / program).write_text(content)
        (stand_ins / program).chmod(0o755)
    (script,) = folder.glob("*.sh")
    return subprocess.run(
        ["bash", str(script), *arguments],
        env={"PATH": f"{stand_ins}:{os.environ['PATH']}", **USERS, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def words_of(name: str, folder: Path, *arguments: str, **environment: str) -> list[str]:
    done = started(name, folder, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def value_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def assert_environment(name: str, words: list[str]) -> None:
    """A user's own script gets every number in its environment."""
    found = dict(word.split("=", 1) for word in words if word.startswith("LAYOUT_"))
    assert found == environment_values(source_of(name).job)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_file_parses_and_says_where_it_comes_from(name: str) -> None:
    source = source_of(name)
    for file in export(name, source).files:
        if not file.name.endswith(".json"):
            assert f"# campaign wide, trial 7: {LAYOUTS[name].key}\n" in file.content
            assert "# 10 % faster than the baseline\n" in file.content
        suffix = file.name.partition(".")[2]
        assert file.executable is (suffix == "sh")
        if suffix == "py":
            ast.parse(file.content)
        elif suffix != "sh":  # the other tests run those
            reader = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}[suffix]
            assert reader(file.content) == FORMATS[name].adapter.values(source.job)


STARTED = [name for name in LAYOUTS if name != "accelerate"]
"""What torchrun or srun starts."""


def arguments_of(name: str) -> tuple[str, str]:
    """What a user adds to a launch script."""
    return ("python", "train.py") if name == "command" else ("--further", "two words")


SecondNode = Callable[[str], tuple[Path, list[str]]]


@pytest.fixture(scope="module")
def second_node(tmp_path_factory: pytest.TempPathFactory) -> SecondNode:
    """Of a format, its folder, and what its script starts on the second node with."""

    @cache
    def run(name: str) -> tuple[Path, list[str]]:
        (folder := tmp_path_factory.mktemp("second") / f"{name}'s job").mkdir()
        placed = {"NODE_RANK": "1", "MASTER_ADDR": "host", "PYTHONPATH": "/other"}
        return folder, words_of(name, folder, *arguments_of(name), **placed)

    return run


@pytest.mark.parametrize("name", STARTED)
def test_torchrun_starts_the_ranks_of_each_node(name: str, second_node: SecondNode) -> None:
    _, words = second_node(name)
    flags = ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr")
    assert [value_after(words, flag) for flag in flags] == ["2", "4", "1", "host"]


TITANS = [name for name in STARTED if name.startswith("torchtitan")]
GIVEN = [
    *((name, *arguments_of(name)) for name in STARTED),
    *((name, "--data-path", "/data/tokens") for name in ("megatron-lm", "megatron-deepspeed")),
    *((name, "-m", "torchtitan.train") for name in TITANS),
    *((name, "--module", "torchtitan_layout") for name in TITANS[1:]),
]


@pytest.mark.parametrize(("name", "flag", "value"), GIVEN)
def test_a_script_gives_each_argument_to_its_program(
    name: str, flag: str, value: str, second_node: SecondNode
) -> None:
    assert value_after(second_node(name)[1], flag) == value


@pytest.mark.parametrize("name", BESIDE)
def test_a_script_names_the_file_beside_it(name: str, second_node: SecondNode) -> None:
    flag, file = BESIDE[name]
    folder, words = second_node(name)
    assert value_after(words, flag) == str(folder / file)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_the_adapters_arguments(name: str, second_node: SecondNode) -> None:
    own, words = list(FORMATS[name].adapter.arguments(source_of(name).job)), second_node(name)[1]
    start = words.index(own[0])
    assert words[start : start + len(own)] == own
    assert PROGRAMS[name] in words


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_finds_its_files(name: str, second_node: SecondNode) -> None:
    folder, words = second_node(name)
    assert f"PYTHONPATH={folder}:/other" in words  # it imports what is beside the script
    assert "/the user's/tokenizer" in words
    assert (folder / "torchtitan_layout.py").exists() == (name != "torchtitan-0.2")


@pytest.mark.parametrize("name", ["deepspeed", "command"])
def test_a_users_own_script_gets_its_layout(name: str, second_node: SecondNode) -> None:
    assert_environment(name, second_node(name)[1])


@pytest.mark.parametrize("name", STARTED)
def test_srun_starts_every_rank_with_its_number_and_the_address_of_the_first_node(
    name: str, tmp_path: Path
) -> None:
    (folder := tmp_path / f"{name}'s job").mkdir()
    allocation = {"LAUNCH": "srun", "SLURM_JOB_NODELIST": "n[1-2]"}
    words = words_of(name, folder, *arguments_of(name), **allocation)
    assert words[0].startswith("srun -N 2 -n 8 --ntasks-per-node 4 bash -c")
    assert [word for word in words if word.startswith("RANK=")] == ["RANK=0", "RANK=7"]
    assert [word for word in words if word.startswith("LOCAL_RANK=")][-1] == "LOCAL_RANK=3"
    assert words.count("WORLD_SIZE=8") == words.count("MASTER_ADDR=first-node") == 2


@pytest.mark.parametrize("name", ["megatron-lm", "accelerate"])
def test_ranks_are_placed_in_order_whatever_the_job_was_submitted_with(
    name: str, tmp_path: Path
) -> None:
    theirs = {"SLURM_DISTRIBUTION": "cyclic", "SLURM_HOSTFILE": "/hosts", "SLURM_CLUSTERS": "a,b"}
    words = words_of(name, tmp_path, LAUNCH="srun", SLURM_JOB_NODELIST="n[1-2]", **theirs)
    assert {word for word in words if word.startswith("SLURM_")} == {"SLURM_DISTRIBUTION=block"}


def test_accelerate_is_launched_once_a_node(tmp_path: Path) -> None:
    words = words_of("accelerate", tmp_path, "--epochs", "2", NODE_RANK="1")
    assert words[:3] == ["launch", "--machine_rank", "1"]
    config = Path(value_after(words, "--config_file"))
    assert yaml.safe_load(config.read_text())["num_processes"] == 8
    script = words.index("/the user's/train.py")
    assert words[script + 1 : script + 3] == ["--epochs", "2"]
    assert_environment("accelerate", words)
    words = words_of("accelerate", tmp_path, LAUNCH="srun", SLURM_JOB_NODELIST="n[1-2]")
    assert words[0].startswith("srun -N 2 -n 2 --ntasks-per-node 1 bash -c")
    assert value_after(words, "--machine_rank") == "0"
    assert value_after(words[::-1], "1") == "--machine_rank"
    assert value_after(words, "--main_process_ip") == "first-node"


def test_a_command_is_filled_with_the_layout(tmp_path: Path) -> None:
    template = ("./train", "--tp={tp}", "{pp}x{dp} {model}", '{"zero": {zero_stage}}', "", "a  b*")
    words = words_of("command", tmp_path, *template)
    filled = ["--no-python", "./train", "--tp=2", "2x2 tiny-llama", '{"zero": 1}', "", "a  b*"]
    start = words.index("--no-python")
    assert words[start : start + len(filled)] == filled
    once = words_of("command", tmp_path, "torchrun", "--nproc={num_devices}", LAUNCH="once")
    assert once[0] == "--nproc=8"


@pytest.mark.parametrize(
    ("name", "arguments", "environment", "code", "says"),
    [
        ("command", ["./train", "--tp={tpp}"], {}, 2, "{tpp} is no placeholder"),
        ("command", [], {}, 2, "say which program to start"),
        ("deepspeed", [], {"TRAIN_SCRIPT": ""}, 1, "set it to your training script"),
        ("megatron-deepspeed", [], {"DATA_ARGS": ""}, 1, "there is no mock data"),
        *((name, ["x"], {"LAUNCH": "mpirun"}, 2, "LAUNCH=mpirun is not") for name in LAYOUTS),
    ],
)
def test_what_a_script_cannot_start_is_refused_in_words(
    name: str,
    arguments: list[str],
    environment: dict[str, str],
    code: int,
    says: str,
    tmp_path: Path,
) -> None:
    done = started(name, tmp_path, *arguments, **environment)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "LAUNCH" not in environment or "srun" in done.stderr


def test_torchtitan_alone_is_its_newest_release() -> None:
    assert ALIASES["torchtitan"] == "torchtitan-0.3"
    source = source_of("torchtitan-0.3")
    assert export("torchtitan", source) == export("torchtitan-0.3", source)


PLAIN = Layout(tp=2, dp=2, zero_stage=1, micro_batch_size=4, precision="bf16")
INTERLEAVED = Layout(pp=2, dp=4, vpp=2, num_microbatches=4, precision="bf16")
GROUPED = replace(INTERLEAVED, zero_stage=1, zero_replicas=2)
"""megatron-deepspeed lacks both its vpp and its zero_replicas."""


def make_source(layout: Layout = INTERLEAVED, model: str = "gpt-22b") -> ExportSource:
    job = TrainerJob(model=model_preset(model), layout=layout)
    return ExportSource(campaign="wide", trial=7, job=job, comments=("measured: 5 tokens/s",))


def comments_of(bundle: ExportRead) -> list[str]:
    script = next(file for file in bundle.files if file.name.endswith(".sh"))
    return [line[2:] for line in script.content.splitlines() if line.startswith("# ")]


def test_the_trainer_reads_the_exported_job_and_writes_it_back() -> None:
    source = make_source(PLAIN, "tiny-llama")
    (file,) = export("trainer", source).files
    assert file.name == "job.json"
    exported = json.loads(file.content)
    assert (exported["seed"], exported["warmup"]) == (0, 2)
    job = TrainJob.from_mapping(exported)
    assert (job.model, job.layout) == (source.job.model, PLAIN)
    assert exported.items() <= job.to_mapping().items()
    more = {"data": {"tokens": "t.npy"}, "checkpoint": {"directory": "saved"}}
    extended = TrainJob.from_mapping({**exported, **more})
    assert TrainJob.from_mapping(extended.to_mapping()) == extended


def test_a_compiled_probe_is_exported_as_a_compiled_job() -> None:
    plain = make_source(PLAIN, "tiny-llama")
    source = replace(plain, job=replace(plain.job, compile=True))
    (file,) = export("trainer", source).files
    assert TrainJob.from_mapping(json.loads(file.content)).compile
    assert not any("compile" in note for note in export("megatron-lm", plain).notes)
    assert any("compile=true has no flag" in note for note in export("megatron-lm", source).notes)


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ExportFormatUnknownError, match=rf"'nemo'.*{', '.join(FORMATS)}"):
        export("nemo", make_source())


def test_knobs_that_the_trainer_lacks_are_refused_with_what_happens_and_how_to_accept_it() -> None:
    happens = r"plain 1F1B instead of vpp=2(.|\n)*accept that with --without vpp"
    both = ("vpp", "zero_replicas")
    for layout, without, knobs, says in (
        (INTERLEAVED, [], ("vpp",), happens),
        (GROUPED, [], both, "--without vpp --without zero_replicas"),
        (GROUPED, ["vpp"], ("zero_replicas",), "sharded over all of dp=4"),
    ):
        with pytest.raises(KnobsLackingError, match=says) as caught:
            export("megatron-deepspeed", make_source(layout), without=without)
        assert caught.value.knobs == knobs


def test_without_the_knob_the_files_are_those_of_the_plain_layout_and_say_so() -> None:
    bundle = export("megatron-deepspeed", make_source(), without=["vpp"])
    plain = export("megatron-deepspeed", make_source(replace(INTERLEAVED, vpp=1)))
    script, script_of_plain = (
        [line for line in each.files[0].content.splitlines() if not line.startswith("# ")]
        for each in (bundle, plain)
    )
    assert script == script_of_plain
    head = comments_of(bundle)
    assert head[:3] == [
        f"campaign wide, trial 7: {INTERLEAVED.key}",
        "measured: 5 tokens/s",
        f"this file is for {replace(INTERLEAVED, vpp=1).key}, which was not measured",
    ]
    assert head[3].startswith("without vpp: DeepSpeed's pipeline has no interleaved schedule")
    assert bundle.notes[:2] == head[2:4]
    assert not any("not measured" in line for line in comments_of(plain))


def test_a_changed_job_without_a_layout_or_with_one_in_json_says_so() -> None:
    source = make_source()
    changed = source.changed(source.job, "without recompute: it recomputes whatever it wants")
    assert changed.head[2:] == (
        "this file is for a job with other knobs than this layout, which was not measured",
        "without recompute: it recomputes whatever it wants",
    )

    bundle = export("megatron-deepspeed", make_source(replace(INTERLEAVED, vpp=1)))
    script, config = bundle.files
    assert "# measured: 5 tokens/s" in script.content
    assert json.loads(config.content)["train_batch_size"] == 16

    job = make_source(GROUPED).job.without(["zero_stage"])
    assert (job.layout.zero_stage, job.layout.zero_replicas) == (0, 1)
    assert replace(job.layout, zero_stage=1, zero_replicas=2) == GROUPED


def test_dropping_a_knob_that_the_trainer_has_or_nobody_knows_is_refused() -> None:
    plain = make_source(replace(INTERLEAVED, vpp=1))
    for source, without, why in (
        (plain, ["vpp"], r"without=vpp is not a knob .*lacks none"),
        (plain, ["colour"], r"without=colour is not a knob .*lacks none"),
        (make_source(), ["vpp", "tp"], r"without=tp .*it lacks vpp\)"),
    ):
        with pytest.raises(ExportImpossibleError, match=why):
            export("megatron-deepspeed", source, without=without)


def test_a_change_of_the_job_stands_in_every_file_that_can_have_comments() -> None:
    measured = Layout(dp=4, num_microbatches=4, precision="bf16")
    source = make_source(measured, "llama-7b")  # a model and a layout that no trainer refuses
    larger = replace(measured, num_nodes=2, dp=8, num_microbatches=2)
    scaled = source.changed(replace(source.job, layout=larger), "scaled from 1 node to 2")
    for name in FORMATS:
        accepted = [*FORMATS[name].adapter.all_lacking(scaled.job)]
        bundle = export(name, scaled, without=accepted)
        assert "scaled from 1 node to 2" in bundle.notes
        for file in bundle.files:
            if not file.name.endswith(".json"):
                assert "# scaled from 1 node to 2" in file.content
                assert f"trial 7: {measured.key}" in file.content


LAYOUT: Final = Layout(num_nodes=2, dp=4, num_microbatches=4, precision="bf16")
HARMLESS: Final = "harmless"
HALVES: Final = re.compile("[\ud800-\udfff]")
"""Halves of characters, which no file can hold."""
some_texts: Final = st.lists(hostile_texts, min_size=20, max_size=20)
"""Texts of one example: one bash parses all of them."""


def with_text(document: Any, text: str) -> Any:
    """A copy of a dataclass in which every text is this one, as an old database may hold it."""
    found = object.__new__(type(document))
    for field in fields(document):
        value = getattr(document, field.name)
        if is_dataclass(value):
            value = with_text(value, text)
        object.__setattr__(found, field.name, text if isinstance(value, str) else value)
    return found


def files_of(text: str) -> dict[tuple[str, str], str]:
    """The files of all formats, with the text wherever somebody else than this project writes."""
    model = model_preset("tiny-llama")
    job = TrainerJob(model=replace(model, name=text if is_name(text) else HARMLESS), layout=LAYOUT)
    measured = measured_sentence(
        record_of(MeasurementRecord, with_text(make_measurement(), text)),
        with_text(make_environment(), text),
    )
    source = ExportSource(
        campaign=text, trial=7, job=job, comments=(text, measured), changes=(text,)
    )
    return {
        (name, file.name): file.content for name in FORMATS for file in export(name, source).files
    }


def named(text: str) -> str:
    """The name of the model in these files: the text, if a model may have that name."""
    return text if is_name(text) else HARMLESS


READERS: Final[dict[str, Callable[[str], Any]]] = {
    "py": lambda content: ast.dump(ast.parse(content.encode())),
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
    "json": json.loads,
}


def values_of(text: str) -> dict[tuple[str, str], Any]:
    """What the language of each file reads in it; bash's are in `commands_of`."""
    return {
        key: READERS[kind](content)
        for key, content in files_of(text).items()
        if (kind := key[1].rpartition(".")[2]) != "sh"
    }


def commands_of(texts: Sequence[str], folder: Path) -> list[dict[tuple[str, str], str]]:
    """The commands of each text's scripts, as bash prints what it has read. It runs none."""
    scripts = {
        f"script_{number}_{place}": ((number, key), content)
        for number, text in enumerate(texts)
        for place, (key, content) in enumerate(files_of(text).items())
        if key[1].endswith(".sh")
    }
    read = "".join(f"{name}() {{\n{script}\n}}\n" for name, (_, script) in scripts.items())
    printed = run_by_bash(f"{read}declare -f\n", folder)
    found: list[dict[tuple[str, str], str]] = [{} for _text in texts]
    for name, body in re.findall(r"^(script_\d+_\d+) \(\) \n(\{.*?^\}$)", printed, re.M | re.S):
        (number, key), _script = scripts[name]
        found[number][key] = body
    return found


def run_by_bash(program: str, folder: Path) -> str:
    """What bash prints; it finds no program, so that only its own commands can run."""
    bash = shutil.which("bash")
    assert bash
    asked: dict[str, Any] = {"cwd": folder, "env": {"PATH": ""}, "input": program.encode()}
    done = subprocess.run([bash], **asked, capture_output=True, check=False)
    assert (done.returncode, done.stderr, [*folder.iterdir()]) == (0, b"", [])
    return done.stdout.decode()


def assert_same_commands_and_values(texts: Sequence[str], folder: Path) -> None:
    plain_values, (plain_commands,) = values_of(HARMLESS), commands_of([HARMLESS], folder)
    assert len(plain_values) == 11
    assert len(plain_commands) == 11
    for text, commands in zip(texts, commands_of(texts, folder), strict=True):
        values = values_of(text)
        assert values["embedded", "job.json"]["model"].pop("name") == named(text)
        values["embedded", "job.json"]["model"]["name"] = HARMLESS
        assert values == plain_values, repr(text)
        # The model's name is a value of scripts: bash reads it as one word.
        word = shlex.quote(named(text))
        assert commands == {
            key: body.replace(f"LAYOUT_MODEL={HARMLESS}", f"LAYOUT_MODEL={word}")
            for key, body in plain_commands.items()
        }, repr(text)


SEARCH: Final = settings(deadline=None, phases=[Phase.explicit, Phase.generate])
"""The text is named where it fails; to make it shorter takes minutes."""


ATTACKS: Final = (
    *("{tp} $(exit 1)`exit 1`'\"\\", "coding: utf-7 +AAo-x=1", "\r\ntouch x", "\0\ud800", "\x85a"),
)
"""Texts that changed something once."""


@settings(SEARCH, max_examples=1)
@given(texts=some_texts)
def test_no_text_changes_a_command_or_a_value(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_same_commands_and_values([*ATTACKS, *texts], tmp_path_factory.mktemp("empty"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(SEARCH, max_examples=250)
@given(texts=some_texts)
def test_none_of_5000_texts_changes_a_command_or_a_value(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_same_commands_and_values(texts, tmp_path_factory.mktemp("empty"))


@settings(SEARCH, max_examples=5)
@given(texts=some_texts)
def test_a_text_is_the_value_of_a_variable_of_bash_as_it_is(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = [HALVES.sub("", text.replace("\0", "")) for text in texts]  # no variable holds NUL
    lines = [f"{exported({'V': text})[0]}\nprintf '%s\\0' \"$V\"\n" for text in given]
    found = run_by_bash("".join(lines), tmp_path_factory.mktemp("empty"))
    assert found.split("\0") == [*given, ""]


@given(text=hostile_texts)
def test_a_text_is_a_value_of_toml_as_it_is(text: str) -> None:
    whole = HALVES.sub("", text)
    content = "\n".join(_toml_lines({"section": {"key": whole}}))
    assert tomllib.loads(content.encode().decode()) == {"section": {"key": whole}}


@settings(max_examples=30)
@given(value=hostile_texts.filter(str.isprintable) | st.integers() | st.sampled_from(["5", "true"]))
def test_a_parameter_of_a_probe_is_the_same_when_its_command_is_run_again(value: int | str) -> None:
    given = {"rate": value}
    found = probe_command(campaign(probe={"trainer": "mine", "parameters": given}), Layout())
    words = shlex.split(found.line)
    assert parameters_of([words[words.index("--parameter") + 1]]) == given
