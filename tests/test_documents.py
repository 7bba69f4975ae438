"""The rules for documents: links, width, names, commands, and references that match the code."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
import pytest
import yaml

from layout_tuner.api.openapi_document import openapi_text
from layout_tuner.cli.main import main as command_line
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.campaign_settings import (
    Budget,
    Constraints,
    ProbeSettings,
    StopSettings,
)
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.clusters.site import cluster_part
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS, resolve_model
from layout_tuner.search_spaces.objectives import ALL_OBJECTIVES
from layout_tuner.search_spaces.spaces.search_space import SPACE_FIELDS
from tests.kit.markdown import ROOT, Markdown, documents, guides, words
from tools.commands_reference import commands_text

WIDTH: Final = 100

NOT_WRAPPED: Final = {"CHANGELOG.md", "benchmarks/RESULTS.md"}
"""Documents with a record on each line."""

WHY_NOT_RUN: Final = {
    "needs a clone",
    "needs another machine",
    "needs Frontier",
    "needs GPUs",
    "needs PostgreSQL",
    "needs root",
    "needs root and systemd",
    "needs Slurm",
    "needs two machines",
}
"""Everything that an empty directory with a service on loopback does not have."""

FILE: Final = re.compile(r".*\.(yaml|yml|json|csv|service|timer|env|ipynb|py)")
"""A word of a command that names a file."""

EXAMPLES: Final = ROOT / "examples"
CAMPAIGN_FILE: Final = ROOT / "docs/reference/campaign-file.md"

WRITTEN_MODULES: Final = {"layout_tuner.py", "torchtitan_layout.py", "torchtitan_model.py"}
"""Modules that the product writes: for a user's program, and in a job of torchtitan."""

CURRENT: Final = [each for each in documents() if each.name not in NOT_WRAPPED]
"""Documents that describe the current code; records may name older modules."""

every_document = pytest.mark.parametrize("document", documents(), ids=lambda each: each.name)
every_guide = pytest.mark.parametrize("guide", guides(), ids=lambda each: each.name)


@every_document
def test_relative_links_lead_to_files_and_headings(document: Markdown) -> None:
    lost = []
    for link in document.links():
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (document.path.parent / target).resolve() if target else document.path
        if not path.exists():
            lost.append(f"{link}: there is no such file")
        elif anchor and anchor not in Markdown.read(path).anchors():
            lost.append(f"{link}: there is no such heading")
    assert lost == []


@every_document
def test_prose_is_wrapped(document: Markdown) -> None:
    if document.name in NOT_WRAPPED:
        pytest.skip("its lines are records")
    too_long = [
        f"line {number} has {len(line)} characters"
        for number, line in document.prose()
        if len(line) > WIDTH and not line.lstrip().startswith("|") and not _is_one_word(line)
    ]
    assert too_long == []


@pytest.mark.parametrize("document", CURRENT, ids=lambda each: each.name)
def test_modules_that_prose_names_exist(document: Markdown) -> None:
    """A module is named by its path, its dotted name or the last part of its path.

    A path of a module that a recipe adds is followed by "a new file".
    """
    text = " ".join(document.path.read_text().split())
    named = re.finditer(r"`((?:\w+/)*\w+\.py)`(\**, a new file)?", text)
    missing = {each[1] for each in named if not each[2] and not _is_module(each[1])}
    dotted = re.findall(
        r"`(?:python -m )?((?:layout_tuner|tests|benchmarks)(?:\.(?!py`)[a-z_]\w*)+)`", text
    )
    assert missing | {name for name in dotted if not _is_importable(name)} == set()


@pytest.mark.parametrize("document", CURRENT, ids=lambda each: each.name)
def test_folders_that_prose_names_exist(document: Markdown) -> None:
    tops = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir()))
    text = " ".join(document.path.read_text().split())
    named = re.findall(rf"`((?:{tops})/(?:\w+/)*)`", text)
    assert {folder for folder in named if not (ROOT / folder).is_dir()} == set()


def test_the_map_of_the_code_lists_the_floors_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = (ROOT / "docs/architecture.md").read_text().replace("\n  ", "\n")
    for contract in project["tool"]["importlinter"]["contracts"]:
        package = contract["name"].removeprefix("the floors of ")
        if package != contract["name"]:
            floors = (floor.replace("layout_tuner.", "") for floor in contract["layers"])
            assert "\n".join((package, *floors)) + "\n" in listed


@every_document
def test_documented_commands_and_options_exist(document: Markdown) -> None:
    problems = [
        f"line {block.line}: {command}: {problem}"
        for block in document.console_blocks()
        for command in block.commands
        for program in words(command)
        if (problem := _problem(program)) is not None
    ]
    assert problems == []


@every_guide
def test_files_that_documented_commands_name_exist(guide: Markdown) -> None:
    missing, earlier = [], ""
    for block in guide.console_blocks():
        for command in block.commands:
            earlier = f"{earlier} {command}"
            missing += [
                f"line {block.line}: {word}"
                for program in words(command)
                if program[0] != "systemctl"
                for word in program
                if FILE.fullmatch(word) and not _is_there(word, earlier)
            ]
    assert missing == []


@every_guide
def test_blocks_are_left_out_for_known_reasons_only(guide: Markdown) -> None:
    reasons = {block.why_not_run for block in guide.console_blocks()} - {None}
    assert reasons <= WHY_NOT_RUN


def test_examples_are_readable() -> None:
    documents = {
        path.stem: yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))
    }
    own: dict[str, Any] = {}
    for name, document in documents.items():
        if "space" in document:
            continue
        if "hidden_size" in document:
            own[name] = resolve_model(document).to_mapping()
        else:
            own[name] = resolve_cluster(cluster_part(document))[0].to_mapping()
    campaigns = [document for document in documents.values() if "space" in document]
    assert len(campaigns) >= 3
    for campaign in campaigns:
        written_out = {
            field: own.get(campaign[field], campaign[field])
            if isinstance(campaign[field], str)
            else campaign[field]
            for field in ("model", "cluster")
        }
        CampaignSpec.from_mapping({**campaign, **written_out})


def test_the_board_and_the_guide_name_metrics_that_exist() -> None:
    source = (ROOT / "api/process/metrics.py").read_text()
    exported = {f"layout_tuner{rest}" for rest in re.findall(r'"layout_tuner(_\w+)"', source)}
    board = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    guide = (ROOT / "docs/guides/service-for-a-group.md").read_text()
    named = set(re.findall(r"layout_tuner_\w+", "\n".join([*expressions, guide])))
    suffixes = re.compile(r"_(total|bucket|count|sum)$")
    assert {suffixes.sub("", name) for name in named} - {"layout_tuner_info"} <= exported
    assert 6 <= len(board["panels"]) <= 8


@pytest.mark.parametrize(
    ("path", "generated", "target"),
    [
        ("docs/openapi.json", openapi_text, "openapi"),
        ("docs/reference/commands.md", commands_text, "reference"),
    ],
)
def test_a_generated_document_is_as_the_code_generates_it(
    path: str, generated: Callable[[], str], target: str
) -> None:
    if (ROOT / path).read_text(encoding="utf-8") != generated():
        pytest.fail(f"{path} is old: run `make {target}`, and look at what changes for users")


@pytest.mark.parametrize(
    ("heading", "described", "written"),
    [
        ("## Fields", CampaignSpec, {"objectives": {"objective"}}),
        ("### `budget`", Budget, {"wall_time_s": {"wall_time", "wall_time_s"}}),
        ("### `probe`", ProbeSettings, {"deadline_s": {"deadline", "deadline_s"}}),
        ("### `stop`", StopSettings, {}),
        ("### `constraints`", Constraints, {}),
        ("## The space", SPACE_FIELDS, {}),
    ],
)
def test_the_reference_of_the_campaign_file_has_every_field(
    heading: str, described: Any, written: dict[str, set[str]]
) -> None:
    below = CAMPAIGN_FILE.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", below, flags=re.MULTILINE)
    assert table is not None
    rows = table[0].splitlines()[2:]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    is_class = isinstance(described, type)
    fields = [f.name for f in dataclasses.fields(described)] if is_class else described
    assert listed == set().union(*(written.get(name, {name}) for name in fields))


def test_the_reference_of_the_campaign_file_names_every_preset_and_objective() -> None:
    text = CAMPAIGN_FILE.read_text(encoding="utf-8")
    for name in (*MODEL_PRESETS, *CLUSTER_PRESETS, *ALL_OBJECTIVES):
        assert f"`{name}`" in text


def test_every_dependency_is_described() -> None:
    described = (ROOT / "docs/reference/dependencies.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain(*project["optional-dependencies"].values())
    required = {re.split(r"[\[<>=]", each)[0] for each in (*project["dependencies"], *extras)}
    missing = {
        name
        for name in required
        if not re.search(rf"^(\||`bench`:).*\b{re.escape(name)}\b", described, re.MULTILINE)
    }
    assert missing == {"layout-tuner"}  # the extra `all` consists of the other extras


def _is_module(path: str) -> bool:
    """Whether a module exists; documents of the trainer name paths below its folder."""
    if "/" not in path:
        return path in _module_names() | WRITTEN_MODULES
    return (ROOT / path).exists() or (ROOT / "workers/trainer" / path).exists()


@functools.cache
def _module_names() -> frozenset[str]:
    """The file names of all modules in the repository."""
    folders = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    return frozenset(path.name for folder in folders for path in folder.rglob("*.py"))


def _is_importable(name: str) -> bool:
    """Whether a dotted name is a module, or a name that a module defines."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    source = module if module.is_file() else path.parent / "__init__.py"
    return source.is_file() and re.search(rf"\b{path.name}\b", source.read_text()) is not None


def _is_one_word(line: str) -> bool:
    return len(re.sub(r"^\s*([-*]|\d+\.)\s", "", line).split()) == 1


def _problem(program: list[str]) -> str | None:
    """What is wrong with the words of a program; None where nothing is, or it is not ours."""
    if program[0] == "make":
        known = (ROOT / "Makefile").read_text()
        found = re.search(rf"^{re.escape(program[1])}:", known, re.MULTILINE)
        return None if found else f"the Makefile has no target {program[1]}"
    arguments = _arguments(program)
    if arguments is None:
        return None
    rest = list(_without_redirections(arguments))
    command: click.Command = command_line
    context = click.Context(command, info_name="layout-tuner", **command.context_settings)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None:
            return f"there is no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    try:
        command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return error.format_message()
    return None


def _arguments(program: list[str]) -> list[str] | None:
    """The arguments of our own command line; None: another program."""
    if program[0] == "layout-tuner":
        return program[1:]
    if program[0] == "sudo":
        for index, word in enumerate(program):
            if word.endswith("/bin/layout-tuner"):
                return program[index + 1 :]
    return None


def _without_redirections(words: list[str]) -> Iterator[str]:
    skipped = False
    for word in words:
        if skipped:
            skipped = False
        elif word in (">", ">>", "<", "2>"):
            skipped = True
        else:
            yield word


def _is_there(word: str, commands: str) -> bool:
    """Whether a file is in the repository, or a command up to here writes it or its folder."""
    path = word.removeprefix("@")
    if path.startswith(("/", "~", "$")) or "*" in path or (ROOT / path).exists():
        return True
    folder = path.rpartition("/")[0]
    written = rf"(>|--out|-out|-keyout)\s+({re.escape(path)}|{re.escape(folder)}/?)(\s|$)"
    return not path.startswith("examples/") and re.search(written, commands) is not None
