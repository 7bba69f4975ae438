"""Random scripts: the words that are read are those that bash prints."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.scripts.shell_script import started_programs

TEXTS = st.text("abx01_=,.:/+-", min_size=1, max_size=4)
NAMES = st.sampled_from(["A", "B", "C"])
ARRAYS = st.sampled_from(["R", "S"])
NUMBERS = st.sampled_from(["N", "M", "3", "12"])
FORMS = (
    "${0}", "${{{0}}}", "${{{0}:-{1}}}", "${{{0}-{1} z}}", "${{{0}:+{1}}}", "${{#{0}}}",
    "${{{0}#{1}}}", "${{{0}%%{1}*}}", "${{{0}##*{1}}}", "${{{0}//a/{1}}}", "${{{0}/b/}}",
    "${{{0}:1:2}}", "${{{0}^^}}", "${{NEW:={1}}}$NEW",
)  # fmt: skip
ARRAY_FORMS = ("${{{0}[@]}}", "${{{0}[*]}}", "${0}", "${{{0}[1]}}", "${{#{0}[@]}}")


def formatted(form: str, name: str, text: str) -> str:
    return form.format(name, text.replace("/", "") or "a")


EXPANSIONS = st.one_of(
    st.builds(formatted, st.sampled_from(FORMS), NAMES, TEXTS),
    st.builds(formatted, st.sampled_from(ARRAY_FORMS), ARRAYS, TEXTS),
    st.builds("$(({} {} {}))".format, NUMBERS, st.sampled_from("+-*/%"), NUMBERS),
)
QUOTED = st.lists(
    st.one_of(
        EXPANSIONS, st.text("ab '#$ \\", max_size=4).map(lambda text: text.replace("$", "\\$"))
    )
).map(lambda parts: '"{}"'.format("".join(parts).replace("\\\\$", "\\$")))
PARTS = st.one_of(TEXTS, EXPANSIONS, QUOTED, st.text('ab "#$\\', max_size=4).map("'{}'".format))
WORDS = st.lists(PARTS, min_size=1, max_size=3).map("".join)
ASSIGNMENTS = st.one_of(
    st.builds("{}={}".format, NAMES, WORDS),
    st.builds("{}+={}".format, NAMES, WORDS),
    st.builds("export {}={}".format, NAMES, WORDS),
    st.builds(
        "{}{}=({})".format, ARRAYS, st.sampled_from(["", "+"]), st.lists(WORDS).map(" ".join)
    ),
    st.builds("N=$(({} * {}))".format, NUMBERS, NUMBERS),
    st.builds("R=({} # it's\n  # {}\n  {})".format, WORDS, TEXTS, WORDS),
)
CONDITIONS = st.one_of(
    st.builds('[ "${}" = {} ]'.format, NAMES, TEXTS),
    st.builds("[[ ${} == {}* ]]".format, NAMES, TEXTS),
    st.builds("[ $N -gt {} ]".format, NUMBERS.filter(str.isdigit)),
    st.builds('[ -z "${}" ] || [ -n "${}" ]'.format, NAMES, NAMES),
)
STATEMENTS = st.one_of(
    ASSIGNMENTS,
    st.builds("if {}; then {}; else {}; fi".format, CONDITIONS, ASSIGNMENTS, ASSIGNMENTS),
    st.builds("{} && {}".format, CONDITIONS, ASSIGNMENTS),
    st.builds(
        'case "${}" in {}*) {};; *) {};; esac'.format, NAMES, TEXTS, ASSIGNMENTS, ASSIGNMENTS
    ),
)
START = "A=a; B='a b'; C=; R=(x 'y  z'); S=(); N=7; M=2\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder: no pattern matches a file."""
    return tmp_path_factory.mktemp("bash")


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    statements=st.lists(STATEMENTS, max_size=5).map("\n".join),
    words=st.lists(WORDS, min_size=1, max_size=5).map(" ".join),
)
def test_words_equal_those_of_bash(folder: Path, statements: str, words: str) -> None:
    script = f"{START}{statements}\n"
    printed = subprocess.run(
        ["bash", "--norc", "-c", f"{script}printf '%s\\0' start {words}"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
    )
    if printed.returncode or printed.stderr:
        return  # bash refuses it, as a division by zero

    text = f"{script}python train.py {words}\n"
    (program,) = started_programs(JobFile(name="job.sh", text=text))
    read = [each.text for each in program.command.words[1:]]
    if None in read or not all(each.is_certain for each in program.command.words):
        return
    assert read == printed.stdout.decode().split("\0")[1:-1]
