"""The lines of a program's output that show why it ended, and the resource that they name.

An *error* is a traceback with its message, or a message alone that has the form of one. A text of
`failure_texts` counts in the message of the error that ended a rank, or in the error lines of a
library (NCCL, UCX, libfabric, ...) directly before it. It does not count elsewhere: a hint that
names out of memory says nothing of an error that follows.

Several ranks may share an output. Launchers and torch then put the rank before each line, which is
the line's *stream*. Of several streams the first counts whose error names a resource.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from layout_tuner.trainers.failure_texts import (
    LIBRARY,
    RAISED,
    Place,
    Resource,
    row_of,
    says_peer_ended,
)
from layout_tuner.trainers.log_patterns import without_colour

_MOST_LINES: Final = 3000
_LONGEST_LINE: Final = 2000
_LONGEST_MESSAGE: Final = 16
"""Lines."""
_LONGEST_CHAIN: Final = 16
_MOST_BEFORE: Final = 30
"""Lines of a library before an error that are looked at."""
_LAST_FRAMES: Final = 8
_LAST_LINES: Final = 5

_PREFIX: Final = re.compile(
    r"\[(?:rank|default)\d+\]:? ?"  # torch's exception hook; torchrun --tee
    r"|\[(?:[\w.-]+@)?\d+,\d+\]<std(?:err|out)>: ?"  # mpirun --tag-output; 5: with the host
    r"|\([\w.]+ pid=\d+[^)]*\) ?"  # Ray
    r"| *\d+:(?: |$)"  # srun -l
    r"| {2,4}[|+] (?=.*\(most recent call last\):| |\S+(?:Error|Exception)\b)"  # exception groups
    r"|(?P<time>\[?\d{4}-?\d\d-?\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)?\]? ?)"
)
_OTHER_PREFIX: Final = re.compile(r"(.{1,100}[ :])Traceback \(most recent call last\):$")
"""Of pdsh, NeMo-Run and loggers: it also stands before the lines that follow."""
_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\):$")
_MESSAGE: Final = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b(?:: |:?$)"
    r"|terminate called after throwing an instance of "
)
_GOES_ON: Final = re.compile(
    r"nccl\w+Error: |Last error:|(?:Cuda|HIP|ROCr) failure |\s*what\(\):"
    r"|(?:CUDA|HIP) out of memory\. Tried"
)
_CHAIN: Final = re.compile(
    r"The above exception was the direct cause|During handling of the above exception"
)
_IGNORED: Final = re.compile(r"Exception ignored |Error in atexit|--- Logging error ---")
_TRACKER: Final = re.compile(r"multiprocessing/resource_tracker\.py")
"""The first frame of a process beside the ranks, which cleans up after them."""
_ASIDE: Final = re.compile(r"Exception in thread ")
_WRAPPER: Final = re.compile(
    r"[\w.]*(?:ChildFailedError|CalledProcessError|SignalException|ProcessExitedException)\b"
    r"|SystemExit|KeyboardInterrupt|.*worker \(pid\(s\) .* exited unexpectedly"
    r"|.*Pin memory thread exited unexpectedly"
)
_OTHER_KINDS: Final = re.compile(
    r"(?:Assertion|Attribute|Index|Key|ModuleNotFound|Name|NotImplemented|Syntax|Type|Value)Error\b"
)
"""Errors in whose message a resource is only mentioned: no allocator and no system call raises
them."""
_LAUNCHER: Final = re.compile(r"[\w.]*ChildFailedError:")
_LIBRARY: Final = re.compile(
    r"NCCL WARN|UCX  (?:ERROR|WARN|FATAL)|[Ll]ibfabric|EFA internal|OpenBLAS "
)
_BETWEEN: Final = re.compile(
    r"\s*$|.*NCCL INFO |Your application will now abort|\[[EWI]\d{4} |.*\b(?:Aborted|core dumped)\b"
    r"|.*\btorch[./]distributed[./]elastic|.*\[launch\.py:"
    r"|Fatal Python error: |(?:Current t|T)hread 0x|  File |(?:srun|slurmstepd): "
)
_OF_LIBRARY: Final = re.compile(
    r"DistBackendError|AcceleratorError|nccl\w+Error|ncclComm"
    r"|(?:RuntimeError|Exception|terminate called)\b.*(?:NCCL|RCCL|CUDA|HIP|MPI|UCX|OFI)",
    re.DOTALL,
)
"""Messages of errors of which a library's failed call can be the cause."""


class FailureCause(NamedTuple):
    """The resource that an output names, and the line."""

    resource: Resource
    line: str


class _Line(NamedTuple):
    stream: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Error:
    """An error of a stream."""

    start: int
    """Its first line in the output."""
    frames: str
    """The last frames of its traceback."""
    message: tuple[str, ...]
    is_chained: bool
    """Whether it was raised in the handling of the error before it."""
    is_aside: bool
    """Whether a thread other than the main one raised it."""


class ErrorLines:
    """The last lines of an output since the rank's last step."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._steps = 0

    def take(self, line: str, steps: int) -> None:
        """Keeps a line that was printed after so many steps.

        Lines before the last step are not why the program ended: they are dropped.
        """
        if steps > self._steps:
            self._lines.clear()
            self._steps = steps
        self._lines.append(without_colour(line)[:_LONGEST_LINE].rstrip())

    def cause(self, steps: int, *, ended_itself: bool) -> FailureCause | None:
        """The resource for lack of which the program ended; None: the output names none.

        Args:
            steps: how many the program reported in all.
            ended_itself: whether it ended by an exit code or abort. Its last line then counts as a
                message where there is no error in the output.
        """
        if steps > self._steps:
            return None
        lines = _normalised(self._lines)
        streams: defaultdict[str, list[int]] = defaultdict(list)
        for place, line in enumerate(lines):
            streams[line.stream].append(place)
        errors = [list(_errors(lines, places)) for places in streams.values()]
        ends = [chain for each in errors if (chain := _end_of_stream(each))]
        if ends:
            causes = (
                _of_chain(lines, chain) for chain in sorted(ends, key=lambda chain: chain[0].start)
            )
            return next(filter(None, causes), None)
        found = [error for each in errors for error in each]
        # Errors other than wrappers report the end of a peer here.
        ended_itself &= all(_WRAPPER.match(error.message[0]) for error in found)
        first = min((error.start for error in found), default=len(lines))
        return _without_error(lines, first, ended_itself=ended_itself)


def _normalised(raw: Iterable[str]) -> list[_Line]:
    """The lines without what launchers put before them."""
    lines = []
    for each in raw:
        stream, text = "", each
        while prefix := _PREFIX.match(text):
            if not prefix["time"]:
                stream += prefix[0].strip(" |+")
            text = text[prefix.end() :]
        lines.append(_Line(stream, text))
    others = {found[1] for line in lines if (found := _OTHER_PREFIX.match(line.text))}
    if not (others := {each for each in others if _precedes_frame(each, lines)}):
        return lines
    other = re.compile("|".join(map(re.escape, sorted(others, key=len, reverse=True))))
    return [
        _Line(line.stream + found[0].strip(), line.text[found.end() :])
        if (found := other.match(line.text))
        else line
        for line in lines
    ]


def _precedes_frame(prefix: str, lines: Sequence[_Line]) -> bool:
    return any(line.text.startswith(f"{prefix}  File ") for line in lines)


def _errors(lines: Sequence[_Line], places: Sequence[int]) -> Iterator[_Error]:
    """The errors of a stream, which has these lines, in their order."""
    at, is_summary, is_chained, is_ignored, is_aside = 0, False, False, False, False

    def text() -> str:
        if at >= len(places):
            return ""
        found = lines[places[at]].text
        # torchrun's summary of a rank's error is indented.
        return found.removeprefix("  ").removeprefix("traceback : ") if is_summary else found

    while at < len(places):
        start, frames = places[at], list[str]()
        if _TRACEBACK.search(text()):
            at += 1
            while at < len(places) and (not text() or text().startswith(" ")):
                frames.append(text())
                at += 1
            if at == len(places) or _TRACEBACK.search(text()):
                continue  # it was cut off
        elif not _MESSAGE.match(text()):
            is_chained |= bool(_CHAIN.match(text()))
            is_ignored |= bool(_IGNORED.match(text()))
            is_aside |= bool(_ASIDE.match(text()))
            at += 1
            continue
        message = [text()]
        at += 1
        while len(message) < _LONGEST_MESSAGE and (
            _GOES_ON.match(text()) or (message[-1].startswith("Last error:") and text())
        ):
            message.append(text())
            at += 1
        is_summary |= bool(_LAUNCHER.match(message[0]))
        if not is_ignored and not (frames and _TRACKER.search(frames[0])):
            yield _Error(
                start=start,
                frames="\n".join(frames[-_LAST_FRAMES:]),
                message=tuple(message),
                is_chained=is_chained,
                is_aside=is_aside,
            )
        is_chained = is_ignored = is_aside = False


def _end_of_stream(errors: Sequence[_Error]) -> list[_Error]:
    """The error that ended a stream, and those in whose handling it was raised; empty: none did.

    Errors that only report another process's end are passed over.
    """
    aside: list[_Error] = []
    for last in range(len(errors) - 1, -1, -1):
        message = errors[last].message
        if _WRAPPER.match(message[0]) or says_peer_ended(" ".join(message)):
            continue
        first = last
        while errors[first].is_chained and max(last - _LONGEST_CHAIN, 0) < first:
            first -= 1
        chain = list(errors[first : last + 1][::-1])
        if not errors[last].is_aside:
            return chain
        aside = aside or chain
    return aside


def _of_chain(lines: Sequence[_Line], chain: Sequence[_Error]) -> FailureCause | None:
    """The resource that the first of these errors names that names any."""
    for error in chain:
        if _OTHER_KINDS.match(error.message[0]):
            continue
        is_of_library = _OF_LIBRARY.search("\n".join(error.message)) is not None
        places = RAISED + LIBRARY if is_of_library else RAISED
        causes = list(_causes(error.message, places, error.frames))
        if is_of_library:
            stream = lines[error.start].stream
            causes += _causes(_library_lines(lines, error.start, stream), LIBRARY)
        if cause := _most_special(causes):
            return cause
    return None


def _without_error(lines: Sequence[_Line], end: int, *, ended_itself: bool) -> FailureCause | None:
    """The resource that an output without an error names, before a launcher's own at `end`."""
    before = [_Line("", line.text) for line in lines[:end]]
    block = _library_lines(before, end, "")
    if cause := _most_special(list(_causes(block, LIBRARY))):
        return cause
    printed = [line.text for line in before if not _BETWEEN.match(line.text)]
    places = RAISED + LIBRARY if ended_itself else ()
    causes = list(_causes(printed[-1:], places))
    ends = [line.text for line in lines if line.text][-_LAST_LINES:]
    return _most_special(causes + list(_causes(ends, ("launcher",))))


def _causes(
    texts: Sequence[str], places: Sequence[Place], frames: str = ""
) -> Iterator[FailureCause]:
    for text in texts:
        if (row := row_of(text, places, frames=frames)) and row.resource != "other":
            yield FailureCause(row.resource, text.strip())


def _most_special(causes: Sequence[FailureCause]) -> FailureCause | None:
    """The first cause, those of the device's memory last.

    A library prints what failed and then for what: "out of memory" and then "shared memory segment"
    is a lack of shared memory.
    """
    return min(causes, key=lambda cause: cause.resource == "device memory", default=None)


def _library_lines(lines: Sequence[_Line], end: int, stream: str) -> list[str]:
    """The error lines of libraries directly before a line of a stream, in their order.

    Libraries write them without the rank that torch puts before its own.
    """
    block: list[str] = []
    for line in reversed(lines[max(0, end - _MOST_BEFORE) : end]):
        if not stream.startswith(line.stream):
            continue
        if _LIBRARY.search(line.text) or row_of(line.text, LIBRARY):
            block.insert(0, line.text)
        elif not _BETWEEN.match(line.text):
            break
    return block
