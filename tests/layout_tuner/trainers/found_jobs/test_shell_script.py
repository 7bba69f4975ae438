"""Launch scripts, read without running them."""

from contextlib import suppress
from pathlib import Path

import pytest

from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, options_of
from layout_tuner.trainers.found_jobs.scripts.shell_script import StartedProgram, started_programs


def read(text: str) -> list[StartedProgram]:
    return started_programs(JobFile(name="job.sh", text=text))


def program(text: str) -> ProgramCommand:
    (found,) = read(text)
    return found.command


def words(text: str) -> list[str | None]:
    """The words behind the program, whose name is train.py."""
    found = program(text).words
    assert found[0].text == "train.py"
    return [each.text for each in found[1:]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("python train.py --tp 4 --name 'a b'", ["--tp", "4", "--name", "a b"]),
        ("TP=4\npython train.py --tp $TP --pp=${TP}", ["--tp", "4", "--pp=4"]),
        ("export TP=4 PP=2; readonly CP=8\npython train.py $TP $PP $CP", ["4", "2", "8"]),
        ("declare -i TP=4\npython train.py $TP", ["4"]),
        ("python train.py ${TP:-8} ${PP:=2} $PP", ["8", "2", "2"]),
        (': "${TP:=8}"\npython train.py $TP', ["8"]),
        ("TP=\npython train.py ${TP:-8} ${TP-9}", ["8"]),
        ("NAME='a  b'\npython train.py $NAME \"$NAME\"", ["a", "b", "a  b"]),
        (
            'A=( --tp 4 # tensor\n  # --pp 2\n  --name "a b" )\npython train.py ${A[@]}',
            ["--tp", "4", "--name", "a", "b"],
        ),
        (
            'A=(--name "a b")\nA+=(--pp 2)\npython train.py "${A[@]}"',
            ["--name", "a b", "--pp", "2"],
        ),
        (
            'A=(--tp 4 \\\n  --pp 2 \\\n)\npython train.py "${A[@]}" x',
            ["--tp", "4", "--pp", "2", "x"],
        ),
        ('A=()\npython train.py "${A[@]}" "${A[*]}"', [""]),
        (
            'A=(1 2)\nB="${A[@]} 3"\nC=($B 4)\npython train.py ${C[*]} ${#C[@]} ${C[1]}',
            ["1", "2", "3", "4", "4", "2"],
        ),
        (
            'ARGS="--tp 4 \\\n  --pp 2 # no comment\n"\npython train.py $ARGS',
            ["--tp", "4", "--pp", "2", "#", "no", "comment"],
        ),
        (
            'O="--lr 1e-4"\nGPT_ARGS="--tp 4 $O"\nGPT_ARGS="$GPT_ARGS --bf16"\npython train.py $GPT_ARGS',
            ["--tp", "4", "--lr", "1e-4", "--bf16"],
        ),
        ("A=2\nB=$((A * 4 + ${A}))\npython train.py $B $((B/4)) $(( -7 / 2 ))", ["10", "2", "-3"]),
        (
            "S=a_b_c\npython train.py ${S//_/} ${S/_/-} ${#S} ${S%_*} ${S##*_} ${S^^}",
            ["abc", "a-b_c", "5", "a_b", "c", "A_B_C"],
        ),
        (
            'python train.py --freq "([0]*3+[1]*58)" --window 128,0',
            ["--freq", "([0]*3+[1]*58)", "--window", "128,0"],
        ),
        ("python train.py \\\n  --tp 4 \\\n  --pp 2", ["--tp", "4", "--pp", "2"]),
        ("if [ 1 = 1 ]; then TP=4; else TP=8; fi\npython train.py $TP", ["4"]),
        (
            'FP8=true\nif [[ $FP8 == true && -n "$FP8" ]]; then A+=(--fp8); fi\npython train.py ${A[@]}',
            ["--fp8"],
        ),
        ("FP8=false\nA=(x)\nif $FP8; then A+=(--fp8); fi\npython train.py ${A[@]}", ["x"]),
        (
            'N=3\nif [ $N -gt 4 ]; then X=1; elif [ "$N" -ge 3 ]; then X=2; else X=3; fi\npython train.py $X',
            ["2"],
        ),
        ("N=3\nif (( N > 2 )); then X=1; fi\npython train.py $X", ["1"]),
        (
            "M=7B\ncase $M in\n  1*) L=16;;\n  7B|8B) L=32;;\n  *) L=1;;\nesac\npython train.py $L",
            ["32"],
        ),
        ('M=7B\n[ "$M" = 7B ] && L=32\n[[ $M == 8* ]] || P=1\npython train.py $L $P', ["32", "1"]),
        ("X=1\nunset X\npython train.py a$X ${X:-2}", ["a", "2"]),
        ('CMD="train.py --tp 4"\neval "python $CMD"', ["--tp", "4"]),
        ('CMD="python train.py --tp 4"\n$CMD', ["--tp", "4"]),
        ("{ python train.py 1; } 2>&1 | tee log", ["1"]),
        ("( cd x && python train.py 1 > log 2>&1 & )", ["1"]),
        ("N=2; A=A$N\nA2=7\npython train.py ${!A}", ["7"]),
        ("A=a; D=$A/x_$A/\npython train.py $D $A/y$A/", ["a/x_a/", "a/ya/"]),
        ("python train.py --tp 4 \\\n", ["--tp", "4"]),
        ("D=<path of data>\nTP=4\npython train.py --tp $TP", ["--tp", "4"]),
        (
            '#SBATCH -N 2\nif [ -z "$SLURM_JOB_ID" ]; then TP=1; else TP=2; fi\npython train.py $TP',
            ["2"],
        ),
        ("python train.py --tp 4 > log 2>&1 --pp 2", ["--tp", "4", "--pp", "2"]),
        ('f() { python train.py --x "$@"; }\nf --tp 8 "a b"', ["--x", "--tp", "8", "a b"]),
        (
            "f() { TP=$1; shift; python train.py --tp $TP ${2:-4} $@; }\nf 8 4",
            ["--tp", "8", None, None],
        ),
        ('f() { python train.py "$@"; }\nf $X 8', [None, "8"]),
        ("f() { python train.py $2; }\nf $X 8", [None]),
        ('set -- --tp 8 x\npython train.py "$@" $3', ["--tp", "8", "x", "x"]),
        ('set -e\nf() { :; }\nset -- 8\nf 4\npython train.py $1 "$*"', ["8", "8"]),
        ("cd x || exit 1\nfoo || exit 1\npython train.py --tp 4", ["--tp", "4"]),
        ("mkdir -p a && cd a && TP=4\npython train.py $TP", ["4"]),
        ("N=a.py; TP=4\nsource b.sh\nPP=2\npython train.py $N $TP $PP", ["a.py", None, "2"]),
        (
            "D='<path to data>'\nsh -c \"python train.py $D --tp 4\"",
            [None, "--tp", "4"],
        ),
        ("# größer\nX=ü; TP=4\npython train.py $X $TP", ["ü", "4"]),
        ('S=()\npython train.py "${S[@]}${S[@]}" x', ["x"]),
        ('S=()\nE=\npython train.py "$E${S[@]}" "${S[@]}"\'\' a"${S[@]}"', ["", "a"]),
        ('S=()\nE=("")\npython train.py "${E[@]}${S[@]}"', [""]),
        ('A=0; N=1\n[ "$A" = - ] && N=2\npython train.py $N', ["1"]),
    ],
)
def test_words_are_expanded_as_bash_does(script: str, expected: list[str | None]) -> None:
    assert words(script) == expected


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("python train.py --tp $TP", "TP is not set in the script"),
        ("python train.py --tp $1", "argument of the script"),
        ("TP=$(nproc)\npython train.py --tp $TP", "output of a command"),
        ("TP=`nproc`\npython train.py --tp $TP", "output of a command"),
        ("read TP\npython train.py --tp $TP", "the command read sets it"),
        ("TP=1\nfor TP in 1 2; do :; done\npython train.py --tp $TP", "loops are not run"),
        ("TP=1\nwhile true; do TP=2; done\npython train.py --tp $TP", "loops are not run"),
        ("TP=1\nf() { TP=2; }\nf\npython train.py --tp $TP", "functions are not run"),
        ("if [ $X = 1 ]; then TP=1; else TP=2; fi\npython train.py --tp $TP", "if [ $X = 1 ]"),
        ("case $X in 1) TP=1;; *) TP=2;; esac\npython train.py --tp $TP", "case $X"),
        ("[ -f x ] && TP=2\npython train.py --tp $TP", "[ -f x ] &&"),
        ("TP=1; (( TP *= 2 ))\npython train.py --tp $TP", "arithmetic"),
        ("A[0]=1\npython train.py --tp ${A[0]}", "index"),
        ("TP=<your tp>\npython train.py --tp $TP", "stands for a value"),
        ("TP=$((N / 2))\npython train.py --tp $TP", "known whole numbers"),
        ("TP=4; nvidia-smi | grep -q x && TP=2\npython train.py --tp $TP", "grep -q x &&"),
        ("TP=4; grep -q x /tmp/x || TP=2\npython train.py --tp $TP", "grep -q x /tmp/x ||"),
        ("TP=4\n. ./b.sh\npython train.py --tp $TP", "`. ./b.sh` in line 2 may set it"),
    ],
)
def test_what_is_not_known_has_a_reason(script: str, why: str) -> None:
    option = list(options_of(program(script).words))[-1]

    assert option.name == "--tp"
    assert option.values[0].text is None
    assert why in option.values[0].why


def test_options_of_an_undecided_branch_are_uncertain() -> None:
    found = program(
        'A=(--tp 2)\nif [ "$FP8" = 1 ]; then A+=(--fp8 hybrid); fi\npython train.py "${A[@]}"'
    )

    assert [(each.text, each.is_certain) for each in found.words[1:]] == [
        ("--tp", True),
        ("2", True),
        ("--fp8", False),
        ("hybrid", False),
    ]


def test_options_that_both_branches_have_are_certain() -> None:
    found = program(
        'if [ "$FLASH" = 1 ]; then\n  A="--tp 4 --bf16 --flash"\nelse\n  A="--tp 2 --bf16"\nfi\n'
        "python train.py $A --pp 2"
    )
    certain = [each.text for each in found.words[1:] if each.is_certain]
    uncertain = [each.text for each in found.words if not each.is_certain]

    assert certain == ["--bf16", "--pp", "2"]
    assert uncertain == ["--tp", "4", "--flash", "--tp", "2"]


@pytest.mark.parametrize(
    "script",
    [
        'A="--tp 2 --data $D"\nif [ "$F" ]; then A="$A --fp8 x"; fi\npython train.py $A',
        'A=""\n[ "$W" ] && A="$A --w x"\n[ "$F" ] && A="$A --fp8 x"\npython train.py $A',
        'A=()\nif [ "$U" ]; then A+=(--fp8 x); fi\nif [ "$V" ]; then A=(--fp8 x); fi\n'
        "python train.py ${A[@]}",
        "A=(--fp8 x)\nsource b.sh\npython train.py ${A[@]}",
        "python train.py ${F:+--fp8 x}",
        'if [ "$F" ]; then set -- --fp8 x; fi\npython train.py "$@"',
    ],
)
def test_options_that_may_not_be_there_are_never_certain(script: str) -> None:
    found = [each for each in program(script).words if each.text in ("--fp8", "x")]

    assert {each.text for each in found} >= {"--fp8", "x"}
    assert not any(each.is_certain for each in found)
    assert all(each.why for each in found)


def test_options_that_a_loop_appends_are_uncertain() -> None:
    found = program("A=(--tp 2)\nfor X in 1 2; do A+=(--x $X); done\npython train.py ${A[@]}")

    assert [each.is_certain for each in found.words[1:]] == [True, True, False, False]


def test_a_branch_that_ends_the_script_changes_nothing_behind_it() -> None:
    assert words("TP=2\nif [ $# -lt 1 ]; then TP=1; exit 1; fi\npython train.py $TP") == ["2"]


def test_nothing_behind_exit_is_read() -> None:
    assert read("exit 0\npython train.py") == []


def test_an_option_keeps_its_name_where_its_value_is_not_known() -> None:
    found = list(options_of(program("python train.py --bf16 --nodes=$N --tp 4").words))

    assert [each.name for each in found] == ["--bf16", "--nodes", "--tp"]
    assert [[value.text for value in each.values] for each in found] == [[], [None], ["4"]]


@pytest.mark.parametrize(
    ("script", "literal"),
    [
        ("python train.py --tp 4", "4"),
        ("python train.py --tp '4'", "4"),
        ("python train.py --tp=4", "4"),
        ("TP=4\npython train.py --tp $TP", "4"),
        ('TP=4\npython train.py --tp="${TP}"', "4"),
        ("TP=${TP:-4}\npython train.py --tp $TP", "4"),
        ('A="--x 1 \\\n --tp 4"\npython train.py $A', "4"),
        ("x=é; A=(--tp 4)\npython train.py ${A[@]}", "4"),
        ('TP=4\neval "python train.py --tp $TP"', "4"),
        ('TP=4\nbash -c "python train.py --tp $TP"', "4"),
    ],
)
def test_a_value_has_the_place_of_its_literal(script: str, literal: str) -> None:
    (option,) = [each for each in options_of(program(script).words) if each.name == "--tp"]
    place = option.values[0].place

    assert place is not None
    assert script[place.start : place.end] == literal
    assert place.line == script.count("\n", 0, place.start) + 1


@pytest.mark.parametrize("value", ["$((2*2))", "4$X", "$A$A"])
def test_a_computed_value_has_no_place(value: str) -> None:
    (option,) = options_of(program(f"A=4; X=0\npython train.py --tp {value}").words)

    assert option.values[0].text is not None
    assert option.values[0].place is None


def test_files_that_a_script_writes_are_kept() -> None:
    (found,) = read(
        "STAGE=1\nDS=ds.json\ncat > $DS <<EOF\n{\"stage\": $STAGE}\nEOF\n"
        "cat <<'EOF' > raw.json\n{\"a\": \"$STAGE\"}\nEOF\n"
        "echo '{\"b\": 2}' > ./b.json\necho \"$(date)\" > unknown.json\n"
        "python train.py --deepspeed_config $DS"
    )  # fmt: skip

    assert found.written == {
        "ds.json": '{"stage": 1}\n',
        "raw.json": '{"a": "$STAGE"}\n',
        "b.json": '{"b": 2}\n',
    }


@pytest.mark.parametrize("other", ["else\n  echo b > ds.json", ""])
def test_a_file_that_branches_write_otherwise_is_not_known(other: str) -> None:
    (found,) = read(f'if [ "$A" ]; then\n  echo a > ds.json\n{other}\nfi\npython train.py')

    assert found.written == {}


def test_a_written_file_keeps_what_is_not_known_as_a_string() -> None:
    (found,) = read(
        'cat > $DIR/ds.json <<EOF\n{"stage": $ZERO, "name": "a-$B"}\nEOF\npython train.py'
    )

    assert found.written["$DIR/ds.json"] == '{"stage": "$ZERO", "name": "a-$B"}\n'
    assert found.written["ds.json"] == found.written["$DIR/ds.json"]


def test_a_script_that_a_script_writes_is_read() -> None:
    text = "TP=4\ncat > run.sh <<EOF\npython train.py --tp $TP\nEOF\nsrun bash run.sh"

    assert words(text) == ["--tp", "4"]


def test_a_shell_of_its_own_has_the_exported_variables_alone() -> None:
    found = program("export TP=4; PP=2\nbash -c 'python train.py $TP $PP'")

    assert [each.text for each in found.words] == ["train.py", "4", None]


def test_arguments_of_a_shell_are_those_of_its_command() -> None:
    text = 'A=(--tp 4)\nbash -c \'exec python train.py "$@"\' name "${A[@]}"'

    assert words(text) == ["--tp", "4"]


def test_arguments_of_the_script_are_left_out_and_noted() -> None:
    found = program('A="$@ --tp 4"\npython train.py $A "$@"')

    assert [each.text for each in found.words] == ["train.py", "--tp", "4"]
    assert [each.said for each in found.not_understood] == ["$@"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("source model.sh\npython train.py", "source model.sh"),
        (". ./model.sh\npython train.py", ". ./model.sh"),
        ("source profile_args.sh\npython train.py", "source profile_args.sh"),
        ("for X in 1 2; do python train.py; done", "for X in 1 2; do python train.py; done"),
        ("main() { python train.py; }\nmain", "main()"),
        ("if [ $X = 1 ]; then python train.py; fi", "if [ $X = 1 ]"),
        ("$SETUP all\npython train.py", "$SETUP"),
        ("python train.py \\\n  --tp 4 \\\n  # --cp 2 \\\n  --pp 2", "--pp 2"),
    ],
)
def test_what_may_concern_the_command_is_noted(script: str, said: str) -> None:
    assert said in [each.said for each in program(script).not_understood]


@pytest.mark.parametrize(
    "file", ["~/.bashrc", "activate env", "$V/bin/activate", "/etc/profile.d/modules.sh"]
)
def test_scripts_that_set_up_an_environment_are_not_noted(file: str) -> None:
    assert program(f"source {file}\npython train.py").not_understood == ()


def test_several_programs_are_found() -> None:
    found = read("srun python a.py &\nsrun python b.py --x &\nwait")

    assert [each.command.program for each in found] == ["a.py", "b.py"]
    assert [each.command.line for each in found] == [1, 2]


def test_exported_variables_are_the_programs_environment() -> None:
    found = program("export A=1; B=2; export C=$(x)\nD=4 python train.py")

    assert found.environment == {"A": "1", "D": "4"}


def test_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    sourced = tmp_path / "sourced.sh"
    sourced.write_text(f"touch {marker}\n")
    script = tmp_path / "job.sh"
    script.write_text(
        f"X=$(touch {marker})\nY=`touch {marker}`\nsource {sourced}\n. {sourced}\n"
        f"eval 'touch {marker}'\nbash -c 'touch {marker}'\ntouch {marker}\n"
        f"cat <(touch {marker}) > {marker}\ntrap 'touch {marker}' EXIT\n"
        f"python train.py $X ${{Y:-$(touch {marker})}} $((A[$(touch {marker})]))\n"
    )

    started_programs(JobFile.open(script))

    assert not marker.exists()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("A=x\n" + "A=$A$A\n" * 60, "parts"),
        (f"A={'x' * 10_000}\n" + "A=$A$A\n" * 60, "grows"),
        ("A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60, "parts"),
        ("X='eval $X'\neval $X", "nested"),
        ('X=\'bash -c "$X"\'\nexport X\nbash -c "$X"', "nested"),
        ("echo " + "${A:-" * 1000 + "}" * 1000, "nested"),
        ("if true; then\n" * 500 + ":\n" + "fi\n" * 500, "nested"),
        (":\n" * 30_000, "statements"),
        ("".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}\n" for n in range(40)) + "f0", ""),
        ("python train.py 'a\n" + "x\n" * 10, "never closed"),
        ('A="--tp 4\npython train.py $A\n', "never closed"),
    ],
)
def test_hostile_scripts_are_refused_in_one_sentence(script: str, problem: str) -> None:
    with pytest.raises(JobFileInvalidError) as refused:
        read(script)

    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "script",
    ["(" * 100_000, "$(" * 50_000, "{" * 100_000, "x " * 150_000, "\\" * 100_000, "<<A\n" * 2_000],
)
def test_hostile_scripts_end(script: str) -> None:
    with suppress(JobFileInvalidError):
        assert read(script) == []
