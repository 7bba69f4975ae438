"""The whole product once, on this machine: `make demo`.

Every line that starts with `$` is a command that you can type yourself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from layout_tuner.api.process.supervisor import end_with

HERE = Path(__file__).resolve().parent
COMMAND = str(Path(sys.executable).with_name("layout-tuner"))
STEPS = 20
EXPECTED_WITHIN = 0.15
UP_PATIENCE_S = 60.0
DOWN_PATIENCE_S = 60.0


class DemoError(RuntimeError):
    """Something in the demonstration did not work; the message says what."""


def main() -> int:
    """Runs the demonstration; 0 when everything worked."""
    folder = Path(tempfile.mkdtemp(prefix="layout-tuner-demo-"))
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "LAYOUT_TUNER_DATA_DIR": str(folder),
        "LAYOUT_TUNER_DEMO": mark,
    }
    started = time.monotonic()
    try:
        try:
            service = start_service(environment)
            try:
                tune_and_train(folder, environment)
            finally:
                stop_service(service)
        finally:
            check_that_nothing_is_left(mark)
    except DemoError as error:
        print(
            f"\nthe demonstration failed: {error}\nwhat it left to look at is in {folder}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    shutil.rmtree(folder)
    print(f"done in {time.monotonic() - started:.0f} s; no process was left behind.")
    return 0


def start_service(environment: dict[str, str]) -> subprocess.Popen[str]:
    """Starts `layout-tuner up` on a free port and waits until it says that it is ready."""
    print("$ layout-tuner up --port 0 &")
    service = subprocess.Popen(
        [COMMAND, "up", "--port", "0"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this script, which then ends it in order
        preexec_fn=end_with(os.getpid()),  # and kill -9 of this script ends it too
    )
    assert service.stdout is not None
    for line in service.stdout:
        print(line, end="", flush=True)
        if line.startswith("ready"):
            return service
    raise DemoError(f"layout-tuner up ended with exit code {service.wait()}")


def tune_and_train(folder: Path, environment: dict[str, str]) -> None:
    """The campaign, its leaderboard, the export of its winner, and the job that was exported."""
    campaign = str(HERE / "tiny.yaml")
    run(environment, "campaign", "submit", campaign)
    run(environment, "campaign", "watch", "tiny")
    run(environment, "leaderboard", "tiny")
    run(environment, "export", "tiny", "--format", "trainer", "--out", str(folder / "job"))
    job = folder / "job" / "job.json"
    trained = ask(environment, "train", "--config", str(job), "--steps", str(STEPS), "--json")
    best = ask(environment, "leaderboard", "tiny", "--json")["trials"][0]
    compare(best["measurement"]["tokens_per_s"], trained["tokens_per_s"])


def ask(environment: dict[str, str], *arguments: str) -> Any:
    """Shows a command, and runs it for its JSON; what it says beside that is seen."""
    print(f"\n$ layout-tuner {' '.join(arguments)}", flush=True)
    done = subprocess.run(
        [COMMAND, *arguments],
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        preexec_fn=end_with(os.getpid()),
    )
    if done.returncode:
        raise DemoError(f"layout-tuner {arguments[0]} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def run(environment: dict[str, str], *arguments: str) -> None:
    """Shows a command and what it prints."""
    print(f"\n$ layout-tuner {' '.join(arguments)}", flush=True)
    done = subprocess.run(
        [COMMAND, *arguments], env=environment, check=False, preexec_fn=end_with(os.getpid())
    )
    if done.returncode:
        raise DemoError(f"layout-tuner {arguments[0]} ended with exit code {done.returncode}")


def compare(probed: float, trained: float) -> None:
    """Puts the job's throughput beside the leaderboard's."""
    ratio = trained / probed
    print(f"\nleaderboard   {probed:>10,.0f} tokens/s, measured by the probe")
    print(f"training job  {trained:>10,.0f} tokens/s, over {STEPS} steps of the exported job")
    print(f"ratio         {ratio:>10.2f}")
    if abs(ratio - 1) > EXPECTED_WITHIN:
        print(f"more than {EXPECTED_WITHIN:.0%} apart: something else kept this machine busy")


def stop_service(service: subprocess.Popen[str]) -> None:
    """Ends the service as Ctrl-C would, and waits until it has ended."""
    print("\nstopping the service", flush=True)
    service.send_signal(signal.SIGINT)
    try:
        code = service.wait(DOWN_PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"layout-tuner up (pid {service.pid}) did not end") from error
    if code:
        raise DemoError(f"layout-tuner up ended with exit code {code}")


def check_that_nothing_is_left(mark: str) -> None:
    """Looks for processes that inherited our environment."""
    deadline = time.monotonic() + 5
    while left := _processes_with(mark):
        if time.monotonic() > deadline:
            raise DemoError(f"processes were left behind: {'; '.join(left)}")
        time.sleep(0.1)


def _processes_with(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            inherited = mark.encode() in (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended meanwhile, or is not ours
        if inherited:
            found.append(f"{process.name} {command.strip()}")
    return found


if __name__ == "__main__":
    sys.exit(main())
