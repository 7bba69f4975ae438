"""The lines that tests have for the reader of a run, also of one on several processes."""

from __future__ import annotations

import pytest

FOR_THE_READER = "for the reader"
"""The property under which a test records such a line."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the lines at the end of the run."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == FOR_THE_READER:
                terminalreporter.write_line(str(line))
