"""The table of access: what each role may do, and that no route is forgotten."""

import pytest

from api.errors import AccessUndeclaredError
from api.security.roles import (
    ACCESS,
    ADMIN,
    HOLDER,
    OPEN,
    OWN_CAMPAIGN,
    VIEWER,
    WORKER,
    AccessRule,
    refuse_undeclared,
)
from results_db.actor import TOKEN_ROLES


@pytest.mark.parametrize(
    ("rule", "admitted"),
    [
        (OPEN, set(TOKEN_ROLES)),
        (HOLDER, set(TOKEN_ROLES)),
        (VIEWER, {"viewer", "submitter", "admin"}),
        (OWN_CAMPAIGN, {"submitter", "admin"}),
        (ADMIN, {"admin"}),
        (WORKER, {"worker", "admin"}),
    ],
)
def test_a_role_may_do_what_lesser_ones_may_and_a_worker_is_apart(
    rule: AccessRule, admitted: set[str]
) -> None:
    assert {role for role in TOKEN_ROLES if rule.admits(role)} == admitted


def test_a_worker_may_do_the_worker_protocol_and_read_nothing_but_clusters_and_its_own_role() -> (
    None
):
    allowed = {name for name, rule in ACCESS.items() if rule.least and rule.admits("worker")}
    assert allowed == {
        "register_worker",
        "drain_worker",
        "lease_trials",
        "post_heartbeat",
        "post_outcome",
        "read_whoami",
        "list_clusters",
        "read_cluster",
    }


def test_a_route_that_nobody_declared_is_refused_by_name() -> None:
    with pytest.raises(AccessUndeclaredError, match="read_secret: add a line to ACCESS"):
        refuse_undeclared(["read_health", "read_secret"])


def test_a_refusal_names_every_role_that_would_do() -> None:
    assert AccessRule("viewer").admitted() == "viewer or submitter or admin"
    assert AccessRule("admin").admitted() == "admin"
    assert AccessRule("worker").admitted() == "admin or worker"
