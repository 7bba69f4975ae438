#!/bin/bash
# Ray: `ray start --block` goes on without a server that ended by SIGTERM.
#
# Version: ray 2.60.0.
# Behaviour: --block is documented as waiting, and ending, with the node's processes. It ends the
# node when one of them is killed by SIGKILL. One that ends by SIGTERM, as a service manager or a
# batch system sends it, counts as expected: the command goes on, and a node without that server
# looks healthy to whoever watches the command alone.
# Seen: the API server ended by SIGTERM, and the command ran 5 s later; after SIGKILL of the log
# monitor the command ended.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ray==2.60.0 psutil==7.2.2
export RAY_USAGE_STATS_ENABLED=0
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

folder = Path(sys.argv[1])
command = [folder / "venv/bin/ray", "start", "--head", "--block", "--port=0", "--num-cpus=1"]
command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder}/r"]
node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def server(name):
    """The process of a server, once it runs."""
    for _ in range(600):
        for process in psutil.Process(node.pid).children():
            if name in " ".join(process.cmdline()):
                return process
        time.sleep(0.1)
    sys.exit(f"no {name} was started")


try:
    while not (folder / "r/ray_current_cluster").exists() and node.poll() is None:
        time.sleep(0.1)
    api_server, log_monitor = server("dashboard.py"), server("log_monitor.py")
    api_server.send_signal(signal.SIGTERM)
    psutil.wait_procs([api_server], timeout=30)
    time.sleep(5)
    goes_on = node.poll() is None
    print(f"after SIGTERM of the API server the command {'goes on' if goes_on else 'has ended'}")
    log_monitor.send_signal(signal.SIGKILL)
    try:
        node.wait(30)
        has_ended = True
    except subprocess.TimeoutExpired:
        has_ended = False
    print(f"after SIGKILL of the log monitor it {'has ended' if has_ended else 'goes on'}")
finally:
    if node.poll() is None:
        left = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        for process in psutil.wait_procs(left, timeout=15)[1]:
            process.kill()
sys.exit(not (goes_on and has_ended))
PROGRAM
