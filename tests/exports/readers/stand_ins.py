"""Stand-ins for modules that a trainer imports and that reading its configuration never uses."""

import sys
import types


class StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(*names):
    sys.modules |= {name: StandIn(name) for name in names}
