"""Processor time of a sign-in with a provider, in the service and of a page beside it.

Run as `python -m benchmarks.bench_sign_in`; `--record` writes the section "Sign-in" of RESULTS.md.
The provider is npm's `oidc-provider` on loopback, which the tests use (`make provider-packages`).
Persons sign in over HTTP, as many at once as are asked for; the time is that of the service's
process alone, with what it writes to its SQLite database.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.live_service import LiveService
from tests.api.sign_in.oidc_provider import OidcProvider, oidc_provider, signed_in_by
from tests.kit.persons import Person


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--persons", type=count, default=200)
    parser.add_argument("--at-once", type=count, default=40)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, oidc_provider(Path(folder)) as provider:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        provider.urls.append(f"http://127.0.0.1:{port}")
        provider.start()
        sign_in_ms, page_ms = _measured(Path(folder), provider, port, given.persons, given.at_once)
    rows = [("a sign-in", f"{sign_in_ms:.1f} ms"), ("its first page", f"{page_ms:.1f} ms")]
    text = table(("processor time of the service", "mean"), rows)
    print(text)
    if given.record:
        on = describe_machine("joserfc", "uvicorn")
        what = f"{given.persons} persons, {given.at_once} at once; {on}."
        record("Sign-in", f"{what}\n\n{text}")


def _measured(
    folder: Path, provider: OidcProvider, port: int, persons: int, at_once: int
) -> tuple[float, float]:
    """Milliseconds of the service for a sign-in, and for the page after it."""
    options = provider.options()
    environment = {
        "LAYOUT_TUNER_OIDC_ISSUER": options.oidc_issuer,
        "LAYOUT_TUNER_OIDC_CLIENT_ID": options.oidc_client_id,
        "LAYOUT_TUNER_OIDC_CLIENT_SECRET_FILE": str(options.oidc_client_secret_file),
        "LAYOUT_TUNER_OIDC_SCOPES": options.oidc_scopes,
    }
    service = LiveService(folder, environment=environment)
    service.serve.command[-1] = str(port)
    with service, ThreadPoolExecutor(at_once) as pool:
        process = psutil.Process(service.serve.pid)

        def spent_s() -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        def enter(number: int) -> Person:
            person = Person(service.url)
            signed_in_by(person, f"person-{number}").raise_for_status()
            return person

        list(pool.map(enter, range(-at_once, 0)))  # what is read once
        before = spent_s()
        signed_in = list(pool.map(enter, range(persons)))
        after = spent_s()
        for page in pool.map(lambda person: person.open("/"), signed_in):
            page.raise_for_status()
        last = spent_s()
    return 1000 * (after - before) / persons, 1000 * (last - after) / persons


if __name__ == "__main__":
    main()
