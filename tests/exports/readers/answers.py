"""What every reader does: it prints JSON, and has stand-ins for modules that it never uses."""

import contextlib
import io
import json
import os
import sys
import types


class StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(*names):
    """For modules that a trainer imports and that reading its configuration never uses."""
    sys.modules |= {name: StandIn(name) for name in names}


def print_answers(layout_of, *refusals):
    """Prints what `layout_of` says of each file, or the error with which it is refused.

    The environment says how many ranks the launch script starts: NUM_DEVICES, one number a file.
    """

    def answer(path, num_devices):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                return layout_of(path, num_devices)
        except refusals as error:
            return {"refused": f"{type(error).__name__}: {error} {said.getvalue()}"}

    ranks = [int(each) for each in os.environ["NUM_DEVICES"].split(",")]
    files = zip(sys.argv[1:], ranks, strict=True)
    sys.stdout.write(json.dumps([answer(*each) for each in files]))
