"""Sign-in of a command line over HTTP: asked for, allowed on a page, renewed and ended."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from layout_tuner.api.security.holders import TokenBook
from layout_tuner.results_db.access.tokens import AGAIN_WITHIN, CODE_LIFE, hash_of_token
from tests.kit.api import TOKEN, answered, bearer
from tests.kit.persons import Person, Signing, served


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    with served(tmp_path_factory.mktemp("device"), wrong_codes=1000) as signing:
        yield signing


class CommandLine:
    """A command line, as far as HTTP shows it."""

    def __init__(self, signing: Signing, host: str = "login1.example.org") -> None:
        self.signing = signing
        made = answered(self.post("codes", host=host), 201).json()
        self.secret, self.code, self.interval_s = made["secret"], made["code"], made["interval_s"]
        self.token = ""

    def post(self, what: str, **body: str) -> httpx.Response:
        return httpx.post(f"{self.signing.url}/v1/device-{what}", json=body, trust_env=False)

    def take(self, secret: str | None = None) -> httpx.Response:
        """Asks for a token; keeps it with the next secret."""
        answer = self.post("tokens", secret=secret or self.secret)
        if answer.is_success:
            self.secret, self.token = answer.json()["secret"], answer.json()["token"]
        return answer

    def whoami(self, token: str | None = None) -> httpx.Response:
        headers = bearer(token or self.token)
        return httpx.get(f"{self.signing.url}/v1/whoami", headers=headers, trust_env=False)


def refused(answer: httpx.Response, word: str) -> None:
    answered(answer, 400)
    assert answer.json()["type"] == f"urn:layout-tuner:problem:{word}"


def decide(person: Person, code: str, decision: str = "allow") -> httpx.Response:
    fields = {"csrf_token": person.form_token(), "decision": decision}
    return person.send_form(f"/device?code={code}", fields)


def signed_in(signing: Signing, name: str, role: str = "submitter", **given: Any) -> Any:
    """A command line that was allowed, and the record of the token that did so."""
    record, token = signing.store.access.create_token(name, role, **given)
    line = CommandLine(signing)
    decide(signing.signed_in(token), line.code)
    answered(line.take(), 201)
    return line, record


def test_a_person_allows_a_command_line(signing: Signing) -> None:
    _, token = signing.store.access.create_token("ann-token", "submitter", owner="ann")
    person, line = signing.signed_in(token), CommandLine(signing)
    page = answered(person.open(f"/device?code={line.code}"), 200, line.code, "login1.example.org")
    assert "<strong>login1.example.org, 127.0.0.1</strong>" in page.text
    assert "the owner <strong>ann</strong> as submitter" in page.text
    refused(line.take(), "authorization_pending")
    answered(decide(person, line.code.lower().replace("-", " ")), 200, "goes on by itself")
    given = answered(line.take(), 201).json()
    assert re.fullmatch(r"ann-token\.[0-9a-f]{8}", given["name"])
    assert (given["role"], given["lives_s"]) == ("submitter", 3600)
    assert line.whoami().json()["expires_at"] == given["expires_at"]
    audit = signing.store.access.audit(target=given["name"])
    acts = [(entry.actor, entry.action) for entry in audit]
    assert acts == [(given["name"], "sign_in.device"), ("ann-token", "device.allow")]
    assert audit[1].details == {"asked_from": "login1.example.org, 127.0.0.1"}


def test_only_hashes_are_stored_and_no_token_is_listed(signing: Signing) -> None:
    line, _ = signed_in(signing, "listed")
    waiting = CommandLine(signing)
    database = Path(signing.store._db.engine.url.database)
    stored = b"".join(file.read_bytes() for file in database.parent.glob(f"{database.name}*"))
    for secret in (*line.secret.split("."), line.token, *waiting.secret.split(".")):
        assert secret.encode() not in stored
    assert waiting.code.replace("-", "").encode() not in stored
    for revoked, number in ((False, 1), (True, 2)):
        names = [each.name for each in signing.store.access.tokens(revoked=revoked)]
        assert len([name for name in names if name.startswith("listed")]) == number
        assert not [name for name in names if name.startswith("device.")]  # it waits


def test_a_denied_command_line_gets_no_token(signing: Signing) -> None:
    line, person = CommandLine(signing), signing.signed_in()
    answered(decide(person, line.code, "deny"), 200, "Denied")
    refused(line.take(), "access_denied")
    answered(decide(person, line.code), 200, "no command waits with this code")
    refused(line.take(), "access_denied")
    assert signing.store.access.audit(limit=1)[0].action == "device.deny"


def test_a_code_expires(signing: Signing) -> None:
    line, late = CommandLine(signing), CommandLine(signing)
    decide(signing.signed_in(), late.code)
    signing.clock.forward(CODE_LIFE.total_seconds())
    answered(decide(signing.signed_in(), line.code), 200, "no command waits with this code")
    for each in (line, late):
        refused(each.take(), "expired_token")


def test_a_stolen_device_code_is_worth_nothing_to_two(signing: Signing) -> None:
    line = CommandLine(signing)
    stolen = line.secret
    decide(signing.signed_in(), line.code)
    thief = answered(line.take(stolen), 201).json()
    refused(line.take(stolen), "invalid_grant")
    answered(line.whoami(thief["token"]), 401)
    refused(line.take(thief["secret"]), "invalid_grant")
    assert signing.store.access.audit(limit=1)[0].action == "token.replay"


def test_wrong_secrets_end_nothing_of_others(signing: Signing) -> None:
    line, _ = signed_in(signing, "unharmed")
    for wrong in ("", ".", "x.y", line.secret.partition(".")[2]):
        refused(line.post("tokens", secret=wrong), "invalid_grant")
    answered(line.whoami(), 200)
    answered(line.take(), 201)


def test_wrong_user_codes_are_limited(tmp_path: Path) -> None:
    with served(tmp_path, wrong_codes=4) as signing:
        line, person = CommandLine(signing), signing.signed_in()
        for _ in range(5):
            answered(person.open(f"/device?code={line.code}"), 200, "Allow")
        for _ in range(3):
            answered(person.open("/device?code=BCDF-GHJK"), 200, "no command waits")
        refusal = answered(person.open(f"/device?code={line.code}"), 429)
        assert int(refusal.headers["Retry-After"]) >= 1
        answered(decide(person, line.code), 429)
        answered(line.post("codes", host="h"), 429)
        assert int(line.post("codes", host="h").headers["Retry-After"]) >= 1


def test_only_a_session_of_a_lasting_token_allows(signing: Signing) -> None:
    line, asking = signed_in(signing, "chain")[0], CommandLine(signing)
    url, sent = f"{signing.url}/device?code={asking.code}", {"decision": "allow"}
    for token in (TOKEN, line.token):
        by_token = httpx.post(url, data=sent, headers=bearer(token), trust_env=False)
        answered(by_token, 200, "cannot allow another")
    short = signing.signed_in(line.token)
    answered(decide(short, asking.code), 200, "cannot allow another")
    person = signing.signed_in()
    answered(person.send_form(f"/device?code={asking.code}", sent), 403, "not of this session")
    foreign = {"Origin": "http://evil.example"}
    fields = {"csrf_token": person.form_token(), **sent}
    assert person.send_form(f"/device?code={asking.code}", fields, **foreign).status_code == 403
    anonymous = signing.person().open(f"/device?code={asking.code}")
    assert anonymous.headers["Location"] == f"/sign-in?next=%2Fdevice%3Fcode%3D{asking.code}"
    refused(asking.take(), "authorization_pending")


def test_a_renewed_token_replaces_the_one_before(signing: Signing) -> None:
    line, _ = signed_in(signing, "renewing")
    first = line.token
    signing.clock.forward(3000)
    answered(line.take(), 201)
    answered(line.whoami(first), 401)
    signing.clock.forward(3599)
    name = answered(line.whoami(), 200).json()["name"]
    signing.clock.forward(1)
    answered(line.whoami(), 401)
    answered(line.take(), 201)  # the command was not used for an hour
    entry, *_ = signing.store.access.audit(target=name)
    assert entry.action == "sign_in.device"  # a renewal as usual has no entry


def test_a_lost_answer_locks_nobody_out(signing: Signing) -> None:
    line, _ = signed_in(signing, "unlucky")
    lost_with = line.secret
    lost = answered(line.take(), 201).json()
    answered(line.take(lost_with), 201)
    answered(line.whoami(), 200)
    assert signing.store.access.audit(limit=1)[0].action == "token.renew"
    renewed = line.secret
    refused(line.take(lost["secret"]), "invalid_grant")  # a thief has it, or had the one before
    refused(line.take(renewed), "invalid_grant")
    answered(line.whoami(), 401)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_replayed_secret_ends_the_sign_in(signing: Signing, is_late: bool) -> None:
    line, _ = signed_in(signing, f"replayed-{is_late}")
    stolen = line.secret
    answered(line.take(), 201)
    if is_late:
        signing.clock.forward(AGAIN_WITHIN.total_seconds())
    else:
        answered(line.take(), 201)
    refused(line.take(stolen), "invalid_grant")
    answered(line.whoami(), 401)
    refused(line.take(), "invalid_grant")


def test_it_ends_with_the_token_that_allowed_it(signing: Signing) -> None:
    line, record = signed_in(signing, "leaving")
    signing.store.access.revoke_token(record.id)
    answered(line.whoami(), 401)
    refused(line.take(), "invalid_grant")
    dated = signing.clock() + 2 * AGAIN_WITHIN
    line, _ = signed_in(signing, "dated", expires_at=dated)
    assert line.take().json()["expires_at"] == dated.isoformat().replace("+00:00", "Z")
    signing.clock.forward(2 * AGAIN_WITHIN.total_seconds())
    answered(line.whoami(), 401)
    refused(line.take(), "expired_token")


def test_its_streams_end_with_the_token_that_allowed_it(signing: Signing) -> None:
    line, record = signed_in(signing, "streaming")
    book, hashed = TokenBook(signing.store, {}), hash_of_token(line.token.encode())
    assert asyncio.run(book.valid_ones({hashed})) == {hashed}
    signing.store.access.revoke_token(record.id)
    assert asyncio.run(book.valid_ones({hashed})) == set()


def test_it_ends_with_a_token_of_a_data_directory(tmp_path: Path) -> None:
    with served(tmp_path / "a") as signing:
        line = CommandLine(signing)
        decide(signing.signed_in(), line.code)
        answered(line.take(), 201)
        book = signing.store.access.token_by_hash(hash_of_token(line.token.encode()))
        assert book.allowed_by == hash_of_token(TOKEN.encode())
        assert (book.created_by, book.owner, book.role) == ("local", "local", "admin")


def test_it_lasts_as_many_days_as_set(tmp_path: Path) -> None:
    with served(tmp_path, device_days=2.0, short_token_s=7200.0) as signing:
        line, _ = signed_in(signing, "short-lived", "viewer")
        signing.clock.forward(2 * 86400 - 3600)
        assert answered(line.take(), 201).json()["lives_s"] == 3600
        signing.clock.forward(3600)
        answered(line.whoami(), 401)
        refused(line.take(), "expired_token")


def test_a_command_line_signs_out(signing: Signing) -> None:
    line, _ = signed_in(signing, "done")
    url = f"{signing.url}/v1/device-tokens"
    answered(httpx.delete(url, headers=bearer(TOKEN)), 404, "not one of `login --device`")
    answered(httpx.delete(url, headers=bearer(line.token)), 204)
    answered(line.whoami(), 401)
    refused(line.take(), "invalid_grant")


def test_an_admin_ends_it_by_the_id_of_its_token(signing: Signing) -> None:
    line, _ = signed_in(signing, "lost-laptop")
    url = f"{signing.url}/v1/tokens"
    listed = httpx.get(f"{url}?revoked=true", headers=bearer(TOKEN)).json()["tokens"]
    newest = next(each for each in listed if each["name"].startswith("lost-laptop."))
    answered(httpx.delete(f"{url}/{newest['id']}", headers=bearer(TOKEN)), 200)
    refused(line.take(), "invalid_grant")
    answered(line.whoami(), 401)


def test_codes_that_nobody_allowed_are_pruned(tmp_path: Path) -> None:
    with served(tmp_path) as signing:
        line, _ = signed_in(signing, "kept")
        denied = CommandLine(signing)
        decide(signing.signed_in(), denied.code, "deny")
        CommandLine(signing)
        signing.clock.forward(CODE_LIFE.total_seconds() - 1)
        signing.store.sign_ins.prune()
        refused(denied.take(), "access_denied")
        signing.clock.forward(1)
        signing.store.sign_ins.prune()
        refused(denied.take(), "invalid_grant")
        answered(line.take(), 201)
        assert len(signing.store.access.tokens(revoked=True)) == 2


@pytest.mark.parametrize("host", ["", "a b", "<b>\n", "x" * 256, "\u202e"])
def test_odd_hosts_are_refused(signing: Signing, host: str) -> None:
    url = f"{signing.url}/v1/device-codes"
    answered(httpx.post(url, json={"host": host}), 422, "host")


def test_user_codes_have_no_vowels(signing: Signing) -> None:
    assert re.fullmatch(
        "[BCDFGHJKLMNPQRSTVWXZ]{4}-[BCDFGHJKLMNPQRSTVWXZ]{4}", CommandLine(signing).code
    )
