"""What every reader does: it answers in JSON, and has stand-ins for modules that it never uses."""

import contextlib
import enum
import gc
import io
import json
import os
import sys
import traceback
import types
from functools import reduce
from pathlib import Path


class StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(*names):
    """For modules that a trainer imports and that reading its configuration never uses."""
    sys.modules |= {name: StandIn(name) for name in names}


def asked_fields(path, configuration):
    """The fields of a configuration that a file fields.json beside the exported one names."""
    file = Path(path).with_name("fields.json")
    names = json.loads(file.read_text()) if file.exists() else []
    return {name: _plain(reduce(getattr, name.split("."), configuration)) for name in names}


def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, enum.Enum):
        return value.name
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def print_answers(layout_of, *refusals, forks=False):
    """Answers each line of the input, [file, number of ranks], by one line of JSON.

    An answer is what `layout_of` says of the file, or the error with which it is refused. With
    `forks` a process of its own gives each answer, so that none finds the process groups of
    another.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the trainer prints is no answer

    def answer(path, num_devices):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                return layout_of(path, num_devices)
        except refusals as error:
            return {"refused": f"{type(error).__name__}: {error} {said.getvalue()[-2000:]}"}

    def in_fork(path, num_devices):
        source, target = os.pipe()
        if not os.fork():
            try:
                found = answer(path, num_devices)
            except Exception:
                found = {"failed": traceback.format_exc()}
            with os.fdopen(target, "w") as pipe:
                json.dump(found, pipe)
            os._exit(0)
        os.close(target)
        with os.fdopen(source) as pipe:
            said = pipe.read()
        os.wait()
        return json.loads(said or '{"failed": "the process that reads has ended"}')

    gc.freeze()  # of what is imported nothing is garbage, in no fork
    for line in sys.stdin:
        out.write(json.dumps((in_fork if forks else answer)(*json.loads(line))) + "\n")
        out.flush()
