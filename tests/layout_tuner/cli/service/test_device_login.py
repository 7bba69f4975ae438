"""`layout-tuner login --device` and `logout`, and commands that find what they keep."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layout_tuner.api.settings import Settings
from layout_tuner.cli.main import main
from layout_tuner.client.clients import Client
from layout_tuner.client.errors import ServiceError
from layout_tuner.errors import ServiceUnansweredError
from layout_tuner.protocol.connection.kept_sign_in import KeptSignIn, kept_sign_in
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store
from tests.kit.api import CAMPAIGN, TOKEN, ends
from tests.kit.live import live_server
from tests.kit.persons import Person
from tests.kit.postgres import upgraded
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.sqlite_is_enough


class Desk:
    """A person's machine: a command line with a configuration directory, and a browser."""

    def __init__(self, path: Path, store: Store, url: str) -> None:
        self.path, self.store, self.url = path, store, url
        self.environment = {
            "XDG_CONFIG_HOME": str(path / "config"),
            "LAYOUT_TUNER_DATA_DIR": str(path / "none"),
            "LAYOUT_TUNER_URL": url,
        }

    @property
    def kept(self) -> KeptSignIn:
        return kept_sign_in(self.url, self.environment)

    def run(self, *arguments: object, **environment: str) -> Result:
        words = [str(each) for each in arguments]
        return CliRunner().invoke(main, words, env={**self.environment, **environment})

    def started(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "layout_tuner", *arguments],
            env={**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def decide(self, token: str, code: str, decision: str = "allow") -> None:
        person = Person(self.url)
        with closing(person.http):
            assert person.sign_in_by_form(token).status_code == 303
            fields = {"csrf_token": person.form_token(), "decision": decision}
            assert person.send_form(f"/device?code={code}", fields).status_code == 200

    def sign_in(self, token: str) -> None:
        """What `login --device` does, without a process of its own."""
        with Client(self.url, "") as client:
            asked = client.create_device_code("h")
            self.decide(token, asked.code)
            self.kept.write(client.create_device_token(asked.secret).model_dump(mode="json"))

    def login(self, token: str, decision: str = "allow") -> tuple[int, str]:
        """Signs in as a person does; returns how the command ended, and what it said."""
        process = self.started("login", "--device")
        words = process.stdout.readline() + process.stdout.readline()
        code = re.search(r"any browser; allow (\S+):", words)[1]
        assert words.endswith(f"/device?code={code}\n")
        self.decide(token, code, decision)
        rest, _ = process.communicate(timeout=60)
        return process.returncode, words + rest


@contextmanager
def desk_at(path: Path, **settings: Any) -> Iterator[Desk]:
    data_dir = DataDir(path) if any(path.iterdir()) else upgraded(path)
    with (
        closing(Store.open(data_dir)) as store,
        live_server(Settings(token=TOKEN, device_poll_s=0.05, **settings), store) as live,
    ):
        yield Desk(path, store, live.url)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with desk_at(tmp_path_factory.mktemp("desk"), wrong_codes=1000) as desk:
        yield desk


@pytest.fixture
def token(desk: Desk, request: pytest.FixtureRequest) -> str:
    """A submitter's, with a name of the test's own."""
    name = f"ann.{len(desk.store.access.tokens(revoked=True))}"
    return desk.store.access.create_token(name, "submitter", owner="ann")[1]


def test_commands_find_the_sign_in_that_login_keeps(desk: Desk, token: str) -> None:
    code, said = desk.login(token)
    assert (code, said.count("submitter until 20")) == (0, 1)
    file = desk.kept.file
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    ends(desk.run("whoami"), 0, "submitter until 20")
    until = json.loads(desk.run("whoami", "--json").stdout)["expires_at"]
    assert until == desk.kept.read()["expires_at"]
    ends(desk.run("campaign", "list"), 0)
    ends(desk.run("allocation", "show"), 0)
    upper = desk.url.replace("http", "HTTP") + "/"
    ends(desk.run("whoami", "--url", upper), 0, "submitter")
    secret = desk.kept.read()["secret"]
    assert secret not in said + desk.run("whoami").output


def test_what_is_named_wins_over_the_sign_in(desk: Desk, token: str) -> None:
    desk.sign_in(token)
    named = desk.path / "named"
    named.write_text(TOKEN)
    ends(desk.run("whoami", "--token-file", named), 0, "local: admin")
    ends(desk.run("whoami", LAYOUT_TUNER_TOKEN_FILE=str(named)), 0, "local: admin")
    (desk.path / "data").mkdir(exist_ok=True)
    (desk.path / "data" / "token").write_text(TOKEN)
    ends(desk.run("whoami", "--url", desk.url, "--data-dir", desk.path / "data"), 0, "local: admin")
    desk.kept.file.unlink()
    own = {"LAYOUT_TUNER_DATA_DIR": str(desk.path / "data")}
    ends(desk.run("whoami", **own), 0, "local: admin")


def test_the_python_client_finds_it(
    desk: Desk, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.sign_in(token)
    for name, value in desk.environment.items():
        monkeypatch.setenv(name, value)
    with Client() as client:
        assert client.whoami().role == "submitter"
        client.revoke_device_token()
        with pytest.raises(ServiceError, match="login --device --url") as caught:
            client.whoami()
        assert not caught.value.is_temporary


def test_logout_ends_it_here_and_at_the_service(desk: Desk, token: str) -> None:
    desk.sign_in(token)
    kept = desk.kept.read()
    ends(desk.run("logout"), 0, f"signed out of {desk.url}")
    assert not desk.kept.file.exists()
    with (
        Client(desk.url, kept["token"]) as client,
        pytest.raises(ServiceError, match="no valid token"),
    ):
        client.whoami()
    ends(desk.run("logout"), 1, f"no sign-in at {desk.url} is kept")


def test_logout_deletes_what_has_ended_already(desk: Desk, token: str) -> None:
    desk.sign_in(token)
    record = desk.store.access.tokens()[0]
    desk.store.access.revoke_token(record.id)
    said = ends(desk.run("whoami"), 1).stderr
    assert f"login --device --url {desk.url}" in said
    ends(desk.run("logout"), 0)
    assert not desk.kept.file.exists()


def test_logout_keeps_it_while_the_service_is_away(tmp_path: Path) -> None:
    with desk_at(tmp_path) as desk:
        desk.sign_in(desk.store.access.create_token("ann", "viewer")[1])
    ends(desk.run("logout"), 1, "does not answer")
    assert desk.kept.file.exists()


def test_a_denied_login_keeps_nothing(desk: Desk, token: str) -> None:
    desk.kept.file.unlink(missing_ok=True)
    code, said = desk.login(token, "deny")
    assert code == 1
    assert "Error: no token (access denied)" in said
    assert not desk.kept.file.exists()


def test_a_service_elsewhere_needs_no_token_for_login(desk: Desk) -> None:
    elsewhere = ("--url", "https://service.invalid:8080")
    ends(desk.run("whoami", *elsewhere), 1, "login --device")
    ends(desk.run("login", "--device", *elsewhere), 1, "does not answer")
    ends(desk.run("logout", *elsewhere), 1, "no sign-in at https://service.invalid")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: file.chmod(0o640), "can be read by others: chmod 600"),
        (lambda file: file.write_text("{"), "cannot be read"),
        (lambda file: file.write_text("[]"), "cannot be read"),
        (lambda file: file.write_text('{"token": "x", "secret": "y"}'), "cannot be read"),
    ],
)
def test_a_file_that_is_not_well_kept_is_refused(
    desk: Desk, token: str, spoil: Callable[[Path], Any], said: str
) -> None:
    desk.sign_in(token)
    spoil(desk.kept.file)
    with Client(desk.url, desk.kept) as client, pytest.raises(ServiceError, match=said):
        client.whoami()
    ends(desk.run("whoami"), 1, said, str(desk.kept.file))
    desk.kept.file.unlink()


def test_processes_that_renew_at_once_share_one(tmp_path: Path) -> None:
    with desk_at(tmp_path, short_token_s=1.0) as desk:
        desk.sign_in(desk.store.access.create_token("ann", "viewer")[1])
        first, ends_at = desk.kept.read()["token"], time.monotonic() + 4
        processes = [desk.started("campaign", "list", "--json") for _ in range(4)]

        def ask() -> int:
            asked = 0
            with Client(desk.url, desk.kept) as client:
                while time.monotonic() < ends_at:
                    assert client.whoami().role == "viewer"
                    asked += 1
            return asked

        with ThreadPoolExecutor(8) as threads:
            asked = [each.result() for each in [threads.submit(ask) for _ in range(8)]]
        assert all("campaigns" in process.communicate(timeout=60)[0] for process in processes)
        assert {process.returncode for process in processes} == {0}
        assert min(asked) > 1
        actions = [entry.action for entry in desk.store.access.audit()]
        assert "token.replay" not in actions
        assert "token.renew" not in actions
        assert desk.kept.read()["token"] != first


def test_a_watch_outlives_its_tokens(tmp_path: Path) -> None:
    with desk_at(tmp_path, short_token_s=2.0) as desk:
        desk.sign_in(desk.store.access.create_token("ann", "submitter")[1])
        with Client(desk.url, desk.kept) as client:
            campaign = client.create_campaign(CAMPAIGN)
            watch = desk.started("campaign", "watch", "first")
            for _ in range(4):
                before = desk.kept.read()["token"]
                what = "the watch has another token"
                wait_until(what, lambda token=before: desk.kept.read()["token"] != token)
            assert watch.poll() is None
            client.cancel_campaign(campaign.id)
        said, _ = watch.communicate(timeout=60)
        assert "CANCELLED" in said.upper(), said
        assert "Error" not in said


def test_a_restart_between_loses_no_sign_in(tmp_path: Path) -> None:
    with desk_at(tmp_path) as desk:
        token = desk.store.access.create_token("ann", "viewer")[1]
        desk.sign_in(token)
        kept = desk.kept.read()
    with desk_at(tmp_path) as again:
        again.kept.write({**kept, "lives_s": 0})
        ends(again.run("whoami"), 0, ": viewer until")
        assert again.kept.read()["token"] != kept["token"]


@pytest.mark.parametrize("shift_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_leaves_no_gap(desk: Desk, token: str, shift_s: float) -> None:
    desk.sign_in(token)
    kept = desk.kept.read()
    desk.kept.write({**kept, "kept_at": kept["kept_at"] + shift_s})
    ends(desk.run("whoami"), 0, "submitter")
    assert desk.kept.read()["secret"] != kept["secret"]


def test_a_token_that_ended_early_is_renewed(desk: Desk, token: str) -> None:
    desk.sign_in(token)
    kept = desk.kept.read()
    desk.kept.write({**kept, "token": "lt_ended_early"})
    ends(desk.run("whoami"), 0, "submitter")
    assert desk.kept.read()["secret"] != kept["secret"]


def test_a_service_away_leaves_a_valid_token_in_use(desk: Desk, token: str) -> None:
    desk.sign_in(token)
    kept = desk.kept.read()
    desk.kept.write({**kept, "kept_at": time.time() - 0.9 * kept["lives_s"]})

    def renew(_: str) -> Any:
        raise ServiceUnansweredError("the service does not answer", may_be_down=True)

    assert desk.kept.token(renew) == kept["token"]
    with pytest.raises(ServiceUnansweredError):
        desk.kept.token(renew, refused=kept["token"])
