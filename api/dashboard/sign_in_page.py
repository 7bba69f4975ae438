"""The sign-in page, and the requests that begin and end a session."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from fastapi import Form, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.dependencies import CredentialDep, StoreDep
from layout_tuner.api.errors import SignInRefusedError, SignInTooOftenError
from layout_tuner.api.html.rendering import render
from layout_tuner.api.http.browser_guard import why_foreign
from layout_tuner.api.http.error_responses import STATUS_OF, problem_response
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.security.authentication import (
    Authentication,
    address_of,
    begin_guess,
    begin_session,
    gone_on_from_here,
    local_target,
)
from layout_tuner.api.security.owner_header import ProxiedOwner, proxied_owner
from layout_tuner.api.security.owner_sign_in import OwnerSignIn
from layout_tuner.documents.json_and_yaml import JSON_TYPE, media_type_of
from layout_tuner.results_db.access.tokens import hash_of_token
from layout_tuner.results_db.store import Store

router = LazyRouter()


@router.get("/sign-in")
async def show_sign_in(request: Request) -> Response:
    """The page to sign in on; a browser that is signed in goes on to `next`, if there is one."""
    given = request.query_params.get("next")
    if given is not None and await _authentication(request).session_holder(request.scope):
        return _gone_on(request, local_target(given))
    if given is not None and (named := proxied_owner(request.scope)):
        return await _begun(request, given, named)
    return _page(request, local_target(given or "/"))


@router.get("/sign-in/with-provider")
async def begin_owner_sign_in(request: Request) -> Response:
    """Sends the browser to the provider, with a cookie for the way back."""
    target = local_target(request.query_params.get("next", "/"))
    try:
        return await _sign_in(request).begin(request, target)
    except SignInRefusedError as error:
        return _refused(request, error, target)


@router.get("/sign-in/from-provider")
async def finish_owner_sign_in(request: Request) -> Response:
    """Begins a session for the owner whom the provider names."""
    # The state ends with the path that was asked for.
    return await _begun(request, request.query_params.get("state", "").partition(".")[2])


async def _begun(request: Request, given: str, named: ProxiedOwner | None = None) -> Response:
    """The answer with a new session, or with why there is none."""
    sign_in, target = _sign_in(request), local_target(given)
    try:
        session = await sign_in.session(request, named)
    except SignInRefusedError as error:
        answer = _refused(request, error, target)
    else:
        await _end_session(request, request.app.state.store)
        # Another site sent the browser here: only requests of this page have the Strict cookie.
        answer = gone_on_from_here(request.scope.get("root_path", "") + target)
        _authentication(request).cookie.put(request.scope, answer, session)
    sign_in.begun.remove(request.scope, answer)
    return answer


@router.post("/sign-in")
async def sign_in(request: Request, store: StoreDep) -> Response:
    """Begins a session with the code of an address, sent by the page's script, or with a form.

    The form accepts a token too, which is used once and not stored.
    """
    is_script = media_type_of(request.headers.get("content-type", "")) == JSON_TYPE
    authentication = _authentication(request)
    why = why_foreign(request.headers, authentication.cookie.is_behind_proxy)
    if why is not None:
        return problem_response(HTTPStatus.FORBIDDEN, f"only this service's page signs in: {why}")
    given = await (_fields_of_script(request) if is_script else _fields_of_form(request))
    # Somebody may paste the whole address.
    secret, target = given["secret"].rpartition("#code=")[2].strip(), local_target(given["next"])
    try:
        session = await begin_session(
            store, authentication, secret, address=address_of(request.scope), codes_only=is_script
        )
    except SignInRefusedError as error:
        return _refused(request, error, target, is_script=is_script)
    await _end_session(request, store)  # that of before, if there was one
    answer: Response
    if is_script:
        answer = JSONResponse({"next": request.scope.get("root_path", "") + target})
    else:
        answer = _gone_on(request, target)
    answer.headers["Cache-Control"] = "no-store"
    authentication.cookie.put(request.scope, answer, session)
    return answer


@router.api_route("/device", methods=["GET", "POST"])
async def show_device(
    request: Request,
    credential: CredentialDep,
    store: StoreDep,
    code: Annotated[str, Query(max_length=80)] = "",
    decision: Annotated[Literal["", "allow", "deny"], Form()] = "",
) -> Response:
    """Shows the command line that waits with a code, and lets a session allow or deny it."""
    limit, address = _authentication(request).guess_limit, address_of(request.scope)
    holder, life = credential.holder, timedelta(days=request.app.state.settings.device_days)
    ends_at = min(store.now() + life, holder.expires_at or datetime.max.replace(tzinfo=UTC))
    asked, refusal = None, ""
    if code:
        begin_guess(limit, address)
        asked = await run_in_threadpool(store.access.device_asked, code)
        refusal = "no command waits with this code: it is wrong, has expired, or was decided"
    if asked:
        limit.was_no_guess(address)
        by = credential.token_hash if decision == "allow" else None
        decide = partial(store.access.decide_device, code, by, ends_at)
        if credential.session_secret is None or holder.ends_at:
            refusal = "a command line cannot allow another: sign in with a token, or a code of one"
        elif not decision or await run_in_threadpool(decide):
            refusal = ""  # otherwise it was decided meanwhile
    said: dict[str, Any] = {"asked": asked, "code": code, "decision": decision, "refusal": refusal}
    return render(request, "device.html", ends_at=ends_at, **said)


@router.post("/sign-out")
async def sign_out(request: Request, store: StoreDep) -> Response:
    id_token = await _end_session(request, store)
    elsewhere = id_token and _sign_in(request).sign_out_address(request, id_token)
    answer = gone_on_from_here(elsewhere) if elsewhere else _gone_on(request, "/sign-in")
    # Pages that the browser keeps in memory are gone too, and do not come back with its button.
    answer.headers["Clear-Site-Data"] = '"cache"'
    _authentication(request).cookie.remove(request.scope, answer)
    return answer


async def _end_session(request: Request, store: Store) -> str | None:
    """Ends the browser's session; returns the ID token with which it began, if there was one."""
    secret = _authentication(request).cookie.secret(request.scope)
    if secret is None:
        return None
    ended = await run_in_threadpool(store.sign_ins.end_session, hash_of_token(secret.encode()))
    request.app.state.hub.streams.check_soon()
    return ended


def _authentication(request: Request) -> Authentication:
    found: Authentication = request.app.state.authentication
    return found


def _sign_in(request: Request) -> OwnerSignIn:
    found: OwnerSignIn = request.app.state.owner_sign_in
    return found


def _gone_on(request: Request, target: str) -> Response:
    url = request.scope.get("root_path", "") + target
    return RedirectResponse(url, HTTPStatus.SEE_OTHER, headers={"Cache-Control": "no-store"})


def _page(
    request: Request, target: str, status: HTTPStatus = HTTPStatus.OK, refusal: str = ""
) -> Response:
    # A page of another site may have opened this address, with a code of somebody else's.
    is_own_step = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    page = render(
        request,
        "sign_in.html",
        status=status,
        target=target,
        refusal=refusal,
        why=request.query_params.get("why"),
        is_own_step=is_own_step,
        provider_name=_sign_in(request).options.provider_name,
        proxied=proxied_owner(request.scope),
    )
    page.headers["Cache-Control"] = "no-store"
    return page


def _refused(
    request: Request, error: SignInRefusedError, target: str, *, is_script: bool = False
) -> Response:
    status = STATUS_OF[type(error)]
    if is_script:
        answer = problem_response(status, str(error), kind="sign-in-refused")
    else:
        answer = _page(request, target, status, str(error))
    if isinstance(error, SignInTooOftenError):
        answer.headers["Retry-After"] = str(max(1, math.ceil(error.wait_s)))
    return answer


async def _fields_of_script(request: Request) -> dict[str, str]:
    try:
        document = json.loads(await request.body())
    except (ValueError, RecursionError):
        document = None
    fields = document if isinstance(document, dict) else {}
    return {"secret": _text(fields.get("code")), "next": _text(fields.get("next"))}


async def _fields_of_form(request: Request) -> dict[str, str]:
    body = (await request.body()).decode("utf-8", "replace")
    try:
        fields = parse_qs(body, max_num_fields=10)
    except ValueError:
        fields = {}
    return {name: fields.get(name, [""])[0] for name in ("secret", "next")}


def _text(value: Any) -> str:
    """A text that can be encoded: JSON may have half of a surrogate pair."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
