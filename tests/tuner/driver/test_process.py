"""The driver as a process, and the plans that it makes beside its campaigns."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from results_db.campaigns.plans import PlanOptions
from results_db.store import Store
from search_spaces.belief.plan import make_plan
from search_spaces.campaigns.campaign import CampaignSpec
from tests.kit.postgres import upgraded
from tests.kit.python_process import printed_by
from tests.kit.waiting import wait_until
from tests.tuner.factories import FakeWorker, drive_until, ended, make_spec, submit
from tuner.driver.commands import driver as driver_command
from tuner.driver.driver import Driver

THREADS = """
import click
from tuner.driver.commands import driver
try:
    driver.main(["--data-dir", "/dev/null/nowhere"], standalone_mode=False)
except click.ClickException:
    import numpy, scipy.linalg, threadpoolctl
    print(sorted({each["num_threads"] for each in threadpoolctl.threadpool_info()}))
"""
IMPORTS = """
import sys
from tuner.driver.commands import driver
driver(["--help"], standalone_mode=False)
assert not {"sqlalchemy", "deephyper", "numpy"} & set(sys.modules)
import tuner.driver.driver, tuner.strategies.registry
assert not {"deephyper", "pandas", "optuna"} & set(sys.modules)
"""


def test_the_linear_algebra_of_a_driver_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would spin on cores that probes may have."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert printed_by(THREADS).strip() == "[1]"


def test_help_imports_no_database_and_a_driver_imports_strategies_only_when_they_are_used() -> None:
    assert "Drive the campaigns" in printed_by(IMPORTS)


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    data_dir = upgraded(tmp_path / "data")
    path = data_dir.database_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'f00d'")
    result = CliRunner().invoke(driver_command, ["--data-dir", str(data_dir.path)])
    assert result.exit_code == 1
    assert "revision f00d" in result.output
    assert "newer version of layout-tuner" in result.output
    assert result.output.count("\n") == 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("f00d",)


def requested(store: Store, spec: CampaignSpec) -> int:
    return store.plans.request(spec.to_mapping(), PlanOptions(top=3)).id


def made(store: Store, plan_id: int, driver: Driver) -> None:
    wait_until(
        "the driver has made it",
        lambda: driver.step() and store.plans.get(plan_id).state != "WAITING",
    )


def test_plans_and_campaigns_go_on_side_by_side(store: Store) -> None:
    driver, worker = Driver(store), FakeWorker(store)
    campaign = submit(store, make_spec("runs", budget={"trials": 2}))
    plans = [requested(store, make_spec(f"planned-{number}")) for number in range(2)]
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    made(store, plans[-1], driver)
    assert [store.plans.get(plan).state for plan in plans] == ["DONE"] * 2


def test_a_plan_is_made_though_no_campaign_runs_also_by_a_driver_that_takes_over(
    store: Store,
) -> None:
    spec = make_spec("planned")
    first, second = Driver(store), Driver(store)
    assert second.step(), "it looks, and finds nothing to do"
    plan = requested(store, spec)
    first.step()  # it begins, and never looks again
    assert store.plans.get(plan).state == "WAITING"
    made(store, plan, second)
    done = store.plans.get(plan)
    assert done.state == "DONE"
    assert [each["layout_key"] for each in done.answer["layouts"]] == [
        each.layout_key for each in make_plan(spec, top=3).layouts
    ]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"space": {"global_batch_size": 7, "dp": 2, "precision": "fp32"}}, "none of the 1 comb"),
        ({"cluster": None}, "cluster: the field is missing"),
        ({"budget": 5}, "budget"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why_and_stops_nothing(
    store: Store, broken: dict[str, object], said: str
) -> None:
    driver = Driver(store)
    spec = make_spec("planned")
    wrong = store.plans.request({**spec.to_mapping(), **broken}, PlanOptions()).id
    right = requested(store, spec)
    made(store, right, driver)
    failed = store.plans.get(wrong)
    assert failed.state == "FAILED"
    assert said in failed.problem
    assert store.plans.get(right).state == "DONE"
