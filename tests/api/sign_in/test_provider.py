"""Signing in with a real provider: who gets in as whom, and what is refused and audited."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.api.dashboard.browser import running_browser
from tests.api.sign_in.oidc_provider import OidcProvider, come_back, oidc_provider, signed_in_by
from tests.kit.api import CAMPAIGN, HEADERS, answered
from tests.kit.persons import NAVIGATION, Person, Signing, served

pytestmark = pytest.mark.slow

ROLES = ("hpc=submitter", "operators=admin")
CROSS_SITE = {**NAVIGATION, "Sec-Fetch-Site": "cross-site"}


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OidcProvider]:
    with oidc_provider(tmp_path_factory.mktemp("provider")) as provider:
        yield provider


@pytest.fixture(scope="module")
def service(provider: OidcProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    options = provider.options(group_role=ROLES)
    with served(tmp_path_factory.mktemp("service"), sign_in=options) as signing:
        provider.urls.append(signing.url)
        provider.start()
        yield signing


@pytest.fixture
def signing(service: Signing) -> Signing:
    service.clock.now = datetime.now(UTC)  # the provider's
    return service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def whoami(person: Person) -> tuple[str, str]:
    who = answered(person.http.get("/v1/whoami", headers=person.own), 200).json()
    return who["name"], who["role"]


def refusal(signing: Signing) -> str:
    """The reason in the audit's latest entry."""
    entry = signing.store.access.audit(limit=1)[0]
    assert entry.action == "sign_in.refused"
    assert entry.address == "127.0.0.1"
    return str(entry.details["reason"])


def test_a_person_gets_the_owner_the_role_and_the_groups(
    signing: Signing, provider: OidcProvider
) -> None:
    person = signing.person()
    answer = signed_in_by(person, "ana", "/sign-in/with-provider?next=/allocations")
    assert 'content="0;url=/allocations"' in answered(answer, 200).text
    assert whoami(person) == ("ana", "submitter")
    assert signing.store.owners.groups_of("ana") == ("hpc",)
    entry = signing.store.access.audit(action="sign_in.oidc")[0]
    assert (entry.actor, entry.target) == ("ana", "ana")
    assert entry.details == {
        "source": f"{provider.issuer}#ana",
        "role": "submitter",
        "groups_left_out": 1,
    }
    for login, role in (("root", "admin"), ("eve", "viewer")):
        person = signing.person()
        answered(signed_in_by(person, login), 200)
        assert whoami(person) == (login, role)


def test_what_a_person_submits_belongs_to_the_owner(signing: Signing) -> None:
    person = signing.person()
    signed_in_by(person, "ana")
    person.http.headers["X-CSRF-Token"] = person.form_token()
    made = person.http.post("/v1/campaigns", json=CAMPAIGN, headers=person.own)
    assert answered(made, 201).json()["created_by"] == "ana"


def test_a_state_works_in_its_browser_alone_and_once(signing: Signing) -> None:
    person, thief = signing.person(), signing.person()
    back = come_back(person, "ana")
    stolen = thief.http.get(back, headers=CROSS_SITE)
    assert "not begun in this browser" in answered(stolen, 401).text
    assert "not begun in this browser" in refusal(signing)
    assert thief.cookies == {}
    answered(person.http.get(back, headers=CROSS_SITE), 200)
    again = signing.person()
    again.take_cookies_of(person)
    answered(again.http.get(back, headers=CROSS_SITE), 401)
    assert "not begun in this browser" in refusal(signing)


def test_a_stolen_code_is_of_no_use_in_another_sign_in(signing: Signing) -> None:
    person, thief = signing.person(), signing.person()
    code = parse_qs(urlsplit(come_back(person, "ana")).query)["code"][0]
    own = urlsplit(come_back(thief, "eve"))
    given = {name: values[0] for name, values in parse_qs(own.query).items()} | {"code": code}
    answer = thief.http.get(f"{own.path}?{urlencode(given)}", headers=CROSS_SITE)
    assert "does not accept the code" in answered(answer, 401).text
    assert "invalid_grant" in refusal(signing)
    assert thief.open("/").status_code == 303


def test_a_code_is_used_once_even_with_its_cookies(signing: Signing) -> None:
    person, thief = signing.person(), signing.person()
    back = come_back(person, "ana")
    thief.take_cookies_of(person)
    thief.http.cookies.delete("_session", domain="127.0.0.1")
    answered(person.http.get(back, headers=CROSS_SITE), 200)
    answered(thief.http.get(back, headers=CROSS_SITE), 401)
    assert "invalid_grant" in refusal(signing)


def test_the_providers_error_is_shown_in_words_and_escaped(signing: Signing) -> None:
    person = signing.person()
    begun = person.open("/sign-in/with-provider?next=/submit")
    state = parse_qs(urlsplit(begun.headers["Location"]).query)["state"][0]
    given = {"state": state, "error": "access_denied", "error_description": "<script>no</script>"}
    answer = person.http.get(f"/sign-in/from-provider?{urlencode(given)}", headers=CROSS_SITE)
    page = answered(answer, 401).text
    assert "does not sign you in: access_denied (&lt;script&gt;no" in page
    assert "next=%2Fsubmit" in page
    assert "access_denied" in refusal(signing)


def test_without_a_name_nobody_is_signed_in(signing: Signing) -> None:
    person = signing.person()
    page = answered(signed_in_by(person, "nameless"), 403).text
    assert "states no preferred_username" in page
    assert "states no preferred_username" in refusal(signing)
    assert "local" not in {entry.name for entry in signing.store.owners.all()}
    answered(signed_in_by(signing.person(), "local"), 403, "which the service gives itself")
    answered(signed_in_by(signing.person(), "two words"), 403, "is not 1 to 64 characters")
    assert "two words" not in {entry.name for entry in signing.store.owners.all()}


def test_an_admin_ends_all_sessions_of_an_owner(signing: Signing) -> None:
    persons = [signing.person() for _ in range(3)]
    for person, login in zip(persons, ("eve", "eve", "ana"), strict=True):
        answered(signed_in_by(person, login), 200)
    url = f"{signing.url}/v1/owners/eve/sign-out"
    ended = answered(httpx.post(url, headers=HEADERS), 200).json()
    assert ended["sessions"] >= 2
    assert [person.open("/").status_code for person in persons] == [303, 303, 200]
    entry = signing.store.access.audit(action="owner.sign_out")[0]
    assert (entry.target, entry.details) == ("eve", ended)
    missing = httpx.post(url.replace("eve", "nobody"), headers=HEADERS)
    answered(missing, 404, "there is no owner")


@pytest.mark.parametrize(
    ("clock_s", "problem"),
    [(40, None), (120, "issued in the future"), (-200, None), (-400, "expired")],
)
def test_clocks_may_differ_by_a_minute(
    signing: Signing, provider: OidcProvider, clock_s: float, problem: str | None
) -> None:
    provider.start(clock_s=clock_s)
    person = signing.person()
    answer = signed_in_by(person, "ana")
    if problem is None:
        answered(answer, 200)
    else:
        assert "clocks of provider and service differ" in answered(answer, 401).text
        assert problem in refusal(signing)
    provider.start()


def test_new_keys_of_the_provider_are_read_once(signing: Signing, provider: OidcProvider) -> None:
    before = signing.person()
    answered(signed_in_by(before, "ana"), 200)
    provider.start()
    answered(signed_in_by(signing.person(), "ana"), 200)
    assert before.open("/").status_code == 200


def test_sessions_go_on_while_the_provider_is_away(
    signing: Signing, provider: OidcProvider, caplog: pytest.LogCaptureFixture
) -> None:
    person, late = signing.person(), signing.person()
    answered(signed_in_by(person, "ana"), 200)
    back = come_back(late, "eve")
    provider.stop()
    with caplog.at_level(logging.WARNING):
        page = answered(late.http.get(back, headers=CROSS_SITE), 503).text
    assert "nobody can sign in with it now" in page
    (line,) = [each for each in caplog.messages if "nobody can sign in with" in each]
    assert provider.issuer in line
    assert whoami(person) == ("ana", "submitter")
    assert late.open("/").status_code == 303
    assert person.sign_in_by_form("lt_wrong").status_code == 401  # tokens are looked at as always
    provider.start()
    answered(signed_in_by(late, "eve"), 200)


def click_through(page: Page, login: str) -> None:
    """Signs in at the provider's pages, from the button of the sign-in page on."""
    page.get_by_role("link", name="Sign in with localhost").click()
    page.locator("input[name=login]").fill(login)
    page.locator("input[name=password]").fill("any")
    page.locator("button[type=submit]").click()
    page.locator("button[type=submit]").click()  # what the service may know


def test_a_browser_signs_in_and_out(signing: Signing, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{signing.url}/allocations")
    click_through(page, "ana")
    page.wait_for_url(f"{signing.url}/allocations")
    assert "ana submitter" in page.locator(".holder").inner_text()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name="Yes, sign me out").click()  # at the provider
    page.wait_for_url(f"{signing.url}/sign-in")
    page.goto(f"{signing.url}/allocations")
    assert page.get_by_role("link", name="Sign in with localhost").is_visible()
    page.get_by_role("link", name="Sign in with localhost").click()
    assert page.locator("input[name=login]").is_visible()  # the provider's session has ended too
    context.close()


def test_forty_sign_in_at_once_each_as_itself(signing: Signing, browser: Browser) -> None:
    persons = {f"person-{number}": signing.person() for number in range(40)}
    contexts = {f"browser-{number}": browser.new_context() for number in range(3)}
    pages = {login: context.new_page() for login, context in contexts.items()}
    with ThreadPoolExecutor(40) as pool:
        answers = {
            login: pool.submit(signed_in_by, person, login) for login, person in persons.items()
        }
        for login, page in pages.items():
            page.goto(f"{signing.url}/sign-in")
            click_through(page, login)
            page.wait_for_url(f"{signing.url}/")
    for login, person in persons.items():
        answered(answers[login].result(), 200)
        assert whoami(person) == (login, "viewer")
    for login, page in pages.items():
        assert f"{login} viewer" in page.locator(".holder").inner_text()
        contexts[login].close()
