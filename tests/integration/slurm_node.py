"""A Slurm cluster of one node on this machine, in a directory of its own.

Programs reach it by a directory for ``PATH``, whose commands know the cluster's configuration. It
needs Debian's packages slurm-wlm and munge, and no account: jobs run as the user of the tests.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from fedplugins.studies.execution import _run
from fedplugins.studies.plan import PlannedRun

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun", "sacct")
NODE = "node0"
STARTING_S = 60.0
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CredType=cred/munge
MpiDefault=none
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
ReturnToService=2
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000
PartitionName=main Nodes={node} Default=YES PriorityTier=1
PartitionName=spot Nodes={node} PriorityTier=1 PreemptMode=CANCEL
PartitionName=urgent Nodes={node} PriorityTier=9
"""


def missing() -> str:
    """Return which programs of Slurm this machine lacks; empty where there are all."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return " ".join(name for name in (*DAEMONS, *COMMANDS) if not shutil.which(name, path=path))


class SlurmNode:
    """The cluster; it ends with :meth:`close`."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path must be short
        self.bin, self._daemons = self.place / "bin", list[subprocess.Popen[bytes]]()
        for name in ("bin", "state", "spool"):
            (self.place / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        facts = {"host": host, "user": getpass.getuser(), "place": self.place, "node": NODE}
        (self.place / "slurm.conf").write_text(CONFIG.format(ports=_free_ports(2), **facts))
        for name in COMMANDS:
            program = shutil.which(name)
            script = f'#!/bin/sh\nSLURM_CONF={self.place}/slurm.conf exec {program} "$@"\n'
            (self.bin / name).write_text(script)
            (self.bin / name).chmod(0o755)
        key = self.place / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        try:
            self._start("munged", "--foreground", "--force", *self._munge_options(key))
            self._until((self.place / "munge.socket").exists)
            self._start("slurmctld", "-D", "-f", f"{self.place}/slurm.conf")
            self._start_slurmd()
        except BaseException:
            self.close()
            raise

    def tell(self, command: str, *words: str) -> str:
        """Return what a command of Slurm says on standard output."""
        done = subprocess.run([self.bin / command, *words], capture_output=True, text=True)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job."""
        return self.tell("squeue", "--noheader", "--format=%T", f"--jobs={job}")

    def start_soon(self, job: str) -> None:
        """Start a job that Slurm has queued again, which would wait for two minutes.

        Its node refuses it within the second in which it was taken away.
        """
        self.tell("scontrol", "update", f"jobid={job}", "starttime=now+2")

    def fail(self) -> None:
        """Have the node fail as a machine does, and come back."""
        slurmd = self._daemons.pop()
        slurmd.kill()
        slurmd.wait()
        self._kill_jobs()
        self.tell("scontrol", "update", f"nodename={NODE}", "state=down", "reason=test")
        self._start_slurmd()

    def close(self) -> None:
        """End every job and every daemon; remove the directory."""
        for daemon in self._daemons:
            daemon.kill()
        self._kill_jobs()
        for daemon in self._daemons:
            daemon.wait(STARTING_S)
        shutil.rmtree(self.place, ignore_errors=True)

    def _start_slurmd(self) -> None:
        self._start("slurmd", "-D", "-f", f"{self.place}/slurm.conf", "-N", NODE)
        self._until(lambda: "idle" in self.tell("sinfo", "-h", "-o", "%T"))

    def _kill_jobs(self) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name() == "slurmstepd" and self._is_ours(process):
                    for one in (process, *process.children(recursive=True)):
                        one.kill()

    def _is_ours(self, process: psutil.Process) -> bool:
        """Tell whether a job's process belongs to this cluster, by its socket."""
        sockets = process.net_connections("unix")
        return any(str(one.laddr).startswith(f"{self.place}/spool/") for one in sockets)

    def _munge_options(self, key: Path) -> Iterable[str]:
        for name in ("socket", "pid-file", "log-file", "seed-file"):
            yield f"--{name}={self.place}/munge.{name.partition('-')[0]}"
        yield f"--key-file={key}"

    def _start(self, daemon: str, *options: str) -> None:
        program = shutil.which(daemon, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert program is not None
        with (self.place / f"{daemon}.log").open("wb") as log:
            self._daemons.append(subprocess.Popen([program, *options], stdout=log, stderr=log))

    def _until(self, is_so: Callable[[], object]) -> None:
        until = time.monotonic() + STARTING_S
        while not is_so():
            logs = "\n".join(log.read_text()[-2000:] for log in self.place.glob("*.log"))
            assert time.monotonic() < until, f"Slurm did not start in {STARTING_S:.0f} s:\n{logs}"
            assert all(daemon.poll() is None for daemon in self._daemons), logs
            time.sleep(0.05)


def _free_ports(many: int) -> list[int]:
    """Return ports that nothing listens on."""
    opened = [socket.socket() for _ in range(many)]
    for one in opened:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return found


def wait_for_a_word(run: PlannedRun, say: Callable[[str], None]) -> str:
    """Stand for a run: note that it begins, and end with the file ``answer``, or when told to."""
    run.directory.mkdir(exist_ok=True)
    script = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('stopped as asked'))\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "with (here / 'begun').open('a') as begun: begun.write('x')\n"
        "while not (here / 'answer').exists(): time.sleep(0.02)\n"
    )
    command = [sys.executable, "-c", script, str(run.directory)]
    log = run.directory / "log"
    return "it failed" if _run(command, log, str(run.directory)) else ""
