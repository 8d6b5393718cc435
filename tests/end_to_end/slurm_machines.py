"""Slurm on two simulated machines: its controller on the first, a node's daemon on each, with its own processes."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from two_machines import ADDRESSES, TwoMachines, remove_left_behind
from two_machines import why_not as why_no_machines

from vlmrl.system import fork_server

NODES = ("one", "two")
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_SETTINGS = """\
ClusterName=test
SlurmctldHost={head}({address})
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/linear
ReturnToService=2
KillWait=5
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return why this machine cannot run Slurm on two simulated machines, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{' and '.join(missing)} not installed (slurm-wlm, munge)" if missing else why_no_machines()


class SlurmMachines(TwoMachines):
    """Two machines with Slurm, and without Ray."""

    _munged: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.connect()
        for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o755)
        self.folder.chmod(0o755)  # munge's socket is for all users
        self._start_munged()
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={address} CPUs=2 State=UNKNOWN"
            for node, address in zip(NODES, ADDRESSES, strict=True)
        )
        settings = _SETTINGS.format(head=socket.gethostname(), address=ADDRESSES[0], folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(settings)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start_daemons(0, "slurmctld -D & exec slurmd -D -N one")
        self._start_daemons(1, "exec slurmd -D -N two")
        self._wait(lambda: self.slurm("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "Slurm did not start")

    def slurm(self, *words: str) -> str:
        """Run one of Slurm's commands on the first machine; return its output."""
        return self.run(0, words, env=self._variables())[1]

    def submit(self, *words: str, programs: Path = Path(sys.executable).parent) -> str:
        """Submit a job with `sbatch`, whose `vlmrl` and `ray` are in `programs`; return its id."""
        variables = self._variables() | {"VLMRL_BIN": str(programs), "VLMRL_TMP": str(self.folder)}
        code, output = self.run(0, ["sbatch", "--parsable", *words], env=variables)
        assert code == 0, output
        return output.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return what Slurm says about a job, such as JobState."""
        words = self.slurm("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def stop(self) -> None:
        super().stop()
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()

    def _variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "RAY_ADDRESS": ""}

    def _start_munged(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").touch(mode=0o400)
        (folder / "key").write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={folder / name}" for name in ("key", "log", "pid", "seed")]
        words = ["munged", "--foreground", "--force", f"--socket={folder / 'socket'}", *files]
        with (self.folder / "munged.log").open("wb") as log:
            self._munged = subprocess.Popen(words, stdout=log, stderr=log)
        self._wait((folder / "socket").exists, "munge did not start")

    def _start_daemons(self, machine: int, script: str) -> None:
        """Start daemons on a machine, which sees no processes but its own: Ray would stop those of the other."""
        script = f"mount -t tmpfs -o size=4g tmpfs /dev/shm && {script}"
        space = ["ip", "netns", "exec", self._names[machine], "unshare", "-m", "-p", "-f", "--mount-proc"]
        variables = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", fork_server.VARIABLE)}
        with (self.folder / f"{machine}.log").open("wb") as log:
            self._nodes[machine] = subprocess.Popen(
                [*space, "bash", "-c", script],
                stdout=log,
                stderr=log,
                env=variables | self._variables(),
            )


@contextmanager
def slurm_machines() -> Iterator[SlurmMachines]:
    remove_left_behind()
    folder = Path(tempfile.mkdtemp(prefix="vs", dir="/tmp"))
    machines = SlurmMachines(folder, head=0)
    try:
        machines.start()
        yield machines
    finally:
        machines.stop()
        shutil.rmtree(folder, ignore_errors=True)
