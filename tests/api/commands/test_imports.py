from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["api.client", "api.commands.campaign", "api.commands.trial"])
def test_clients_and_their_commands_do_not_import_numpy(module: str) -> None:
    """It would take a third of the time that a command is allowed."""
    checks = f"import sys, {module}; print(sorted({{'numpy', 'sqlalchemy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", checks], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
