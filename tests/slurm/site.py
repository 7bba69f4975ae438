"""A temporary Slurm site on loopback: munged, slurmctld and a slurmd for each node, below wardens.

Debian's packages are all it needs (`make test-slurm` installs them). Every daemon runs under a
warden of this process, which also adopts what the daemon's jobs start: however the tests end,
nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from layout_tuner.workers.ranks.warden import start_under_warden
from tests.kit.waiting import wait_until

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol")
UP_WITHIN_S: Final = 60.0
_TRIES: Final = 4
_PORTS: Final = range(20_000, 31_000)
"""Below the kernel's ephemeral ports, which anybody's connection may hold."""


class SlurmNotUpError(Exception):
    """The daemons did not come up."""


def why_not() -> str | None:
    """Why Slurm can't be brought up here, or None."""
    missing = [program for program in PROGRAMS if which(program) is None]
    if missing:
        return (
            f"{', '.join(missing)} not installed: `make test-slurm` as root installs Debian's Slurm"
        )
    if os.geteuid() != 0:
        return "only root can bring up Slurm's daemons"
    return None


def which(program: str) -> str | None:
    """Where a program is; daemons are not always on the path of a user."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class SlurmSite:
    """Nodes n1, n2, ... of some CPUs and pretended GPUs each, partitions `batch` and `debug`.

    GPUs are declared as AMD's, so that Slurm sets ROCR_VISIBLE_DEVICES as it does on Frontier. CPUs
    are counted, never pinned: there may be more than the machine has.
    """

    def __init__(
        self,
        *,
        num_nodes: int = 4,
        cpus: int = 8,
        gpus: int = 8,
        memory_mb: int = 4000,
        switches: str = "",
    ) -> None:
        """`switches` are the lines of topology.conf, a tree; empty: the network is flat."""
        self.num_nodes = num_nodes
        self._switches = switches
        self._cpus, self._gpus, self._memory_mb = cpus, gpus, memory_mb
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="lt-slurm-"))  # short: it holds sockets
        self.directory.chmod(0o755)  # munge wants to see that nobody else can write there
        for name in ("log", "state", "spool", "munge", "dev"):
            (self.directory / name).mkdir(mode=0o755)
        self.conf = self.directory / "slurm.conf"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with this site's addresses, without those of an outer job."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        return {**inherited, "SLURM_CONF": str(self.conf)}

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}" for index in range(1, self.num_nodes + 1)]

    def run(
        self, *command: str, timeout_s: float = 60, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on this site's login node."""
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def submit(self, *arguments: str, **environment: str) -> int:
        """Submits a job with these arguments of sbatch; returns its id."""
        output = f"--output={self.directory}/log/job-%j.out"
        return int(self.run("sbatch", "--parsable", output, *arguments, **environment).stdout)

    def job(self, job_id: int) -> dict[str, str]:
        """What scontrol says of a job."""
        words = self.run("scontrol", "show", "job", "-o", str(job_id)).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job_id: int) -> str:
        return self.job(job_id)["JobState"]

    def wait_for_end(self, job_id: int, patience_s: float = 60) -> dict[str, str]:
        """What scontrol says of a job once it, and every process of it, has ended."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")
        wait_until(
            f"job {job_id} has ended",
            lambda: self.state(job_id) not in running and not self.processes(job_id),
            patience_s,
        )
        return self.job(job_id)

    def processes(self, job_id: int | None = None) -> list[psutil.Process]:
        """The living processes of a job, or of all jobs, steps' managers not counted."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environment = process.environ()
                if environment.get("SLURM_CONF") != str(self.conf):
                    continue
                if process.status() == psutil.STATUS_ZOMBIE or "SLURM_JOB_ID" not in environment:
                    continue
                if job_id is None or environment["SLURM_JOB_ID"] == str(job_id):
                    found.append(process)
        return found

    def lose_node(self, name: str) -> None:
        """A node dies with everything that runs on it; Slurm is told at once."""
        self._end(f"slurmd.{name}")
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def return_node(self, name: str) -> None:
        """A lost node comes back."""
        self._start_node(name)
        self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def lose_controller(self) -> None:
        """The controller dies; jobs go on."""
        self._end("slurmctld")

    def cancel_everything(self) -> None:
        """Cancels every job, and ends what Slurm leaves of them.

        Slurm looks for a job's processes by their parents (proctrack/linuxproc), and misses one
        that a shell starts in the moment in which the shell is killed. What the product has to end
        is asserted by the tests themselves.
        """
        self.run("scancel", "--state=PENDING", "-u", "root")
        self.run("scancel", "-u", "root")
        wait_until("every job has ended", lambda: not self.run("squeue", "-h").stdout, 90)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                logging.warning("left of a job: %s %s", process, process.cmdline())
                process.kill()
        wait_until("no process of a job is left", lambda: not self.processes(), 30)

    def logs(self) -> str:
        """What the daemons said last."""
        tails = (
            f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}"
            for log in sorted((self.directory / "log").iterdir())
        )
        return "\n".join(tails)

    def close(self) -> None:
        """Ends every daemon and every process of every job, and removes the directory."""
        for name in sorted(self._daemons, reverse=True):  # slurmd, slurmctld, munged
            self._end(name)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self) -> None:
        self._start_munge()
        for gpu in range(self._gpus):  # gres.conf wants character devices
            (self.directory / "dev" / f"gpu{gpu}").symlink_to("/dev/null")
        for _ in range(_TRIES):
            self._write_configuration(free_ports(self.num_nodes + 1))
            self._daemon("slurmctld", "slurmctld", "-D", "-i")
            for name in self.node_names:
                self._start_node(name)
            if self._is_up():
                return
            for name in [name for name in self._daemons if name != "munged"]:
                self._end(name)
        raise SlurmNotUpError(f"Slurm did not come up in {_TRIES} tries:\n{self.logs()}")

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        flags = [f"--{option}={munge / name}" for option, name in files.items()]
        log = f"--log-file={self.directory / 'log' / 'munged.log'}"
        self._daemon("munged", "munged", "--foreground", "--num-threads=2", *flags, log)
        wait_until("munged listens", (munge / "socket").exists, UP_WITHIN_S)

    def _start_node(self, name: str) -> None:
        self._daemon(f"slurmd.{name}", "slurmd", "-D", "-N", name)

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        path = which(program)
        assert path is not None
        with (self.directory / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = start_under_warden(
                [path, *arguments],
                env=self.environment,
                has_daemons=True,  # slurmd detaches a slurmstepd for each step
                log_fd=output.fileno(),
            )

    def _end(self, name: str) -> None:
        warden = self._daemons.pop(name)
        warden.terminate()
        warden.wait(30)

    def _is_up(self) -> bool:
        """Whether every node becomes idle; False once a daemon has ended (a port was taken)."""
        give_up_at = time.monotonic() + UP_WITHIN_S
        while time.monotonic() < give_up_at:
            if any(daemon.poll() is not None for daemon in self._daemons.values()):
                return False
            idle = self.run("sinfo", "-h", "-p", "batch", "-t", "idle", "-o", "%D", check=False)
            if idle.stdout.split()[:1] == [str(self.num_nodes)]:
                return True
            time.sleep(0.1)
        return False

    def _write_configuration(self, ports: range) -> None:
        last = self.num_nodes
        gpus = f"File={self.directory}/dev/gpu[0-{self._gpus - 1}]"
        (self.directory / "gres.conf").write_text(
            f"NodeName=n[1-{last}] Name=gpu {gpus} Flags=amd_gpu_env\n"
        )
        (self.directory / "topology.conf").write_text(self._switches)
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        lines = [f"{name}={value}" for name, value in self._settings(ports[0]).items()]
        node = {
            "NodeHostname": socket.gethostname().split(".")[0],
            "NodeAddr": "127.0.0.1",
            "Port": f"[{ports[1]}-{ports[-1]}]" if last > 1 else ports[1],
            "CPUs": self._cpus,
            "RealMemory": self._memory_mb,
            "Gres": f"gpu:{self._gpus}",
        }
        lines.append(f"NodeName=n[1-{last}] " + " ".join(f"{k}={v}" for k, v in node.items()))
        lines.append("PartitionName=batch Nodes=ALL Default=YES MaxTime=02:00:00 DefaultTime=10")
        lines.append("PartitionName=debug Nodes=ALL MaxTime=00:05:00")
        self.conf.write_text("\n".join([*lines, ""]))

    def _settings(self, port: int) -> Mapping[str, Any]:
        directory = self.directory
        return {
            "ClusterName": "throwaway",
            "SlurmctldHost": f"{socket.gethostname().split('.')[0]}(127.0.0.1)",
            "SlurmctldPort": port,
            "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={directory}/munge/socket",
            "StateSaveLocation": directory / "state",
            "SlurmdSpoolDir": directory / "spool" / "%n",
            "SlurmctldPidFile": directory / "state" / "slurmctld.pid",
            "SlurmdPidFile": directory / "spool" / "%n.pid",
            "SlurmctldLogFile": directory / "log" / "slurmctld.log",
            "SlurmdLogFile": directory / "log" / "slurmd.%n.log",
            # Containers have no cgroups to give away, and no systemd.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            "DefMemPerCPU": self._memory_mb // self._cpus,
            "GresTypes": "gpu",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "FirstJobId": random.randrange(1000, 60_000),  # ports of a job follow from its id
            "TopologyPlugin": f"topology/{'tree' if self._switches else 'none'}",
            "MinJobAge": 3600,
            "KillWait": 10,
            "InactiveLimit": 0,
        }


def free_ports(number: int) -> range:
    """Ports in a row that nobody uses now; another may still be faster, so callers try again."""
    for _ in range(100):
        first = random.choice(_PORTS)
        ports = range(first, first + number)
        if all(map(_is_free, ports)):
            return ports
    raise SlurmNotUpError(f"no {number} free ports in a row among {_PORTS}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
