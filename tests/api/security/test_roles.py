"""The table of access: what each role may do, and that no route is forgotten."""

import pytest

from api.errors import AccessUndeclaredError
from api.security.roles import (
    AccessRule,
    refuse_undeclared,
)


def test_a_route_that_nobody_declared_is_refused_by_name() -> None:
    with pytest.raises(AccessUndeclaredError, match="read_secret: add a line to ACCESS"):
        refuse_undeclared(["read_health", "read_secret"])


def test_a_refusal_names_every_role_that_would_do() -> None:
    assert AccessRule("viewer").admitted() == "viewer or submitter or admin"
    assert AccessRule("admin").admitted() == "admin"
    assert AccessRule("worker").admitted() == "admin or worker"
