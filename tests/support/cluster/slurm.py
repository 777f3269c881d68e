"""A real Slurm on this machine: munged, slurmctld and several slurmd, each node in namespaces of its own.

Needs root, and the Debian packages that `make test-cluster` installs. A node is a network namespace on a bridge without a
way out, with its own process ids, /tmp and /dev/shm. All share a folder, as the nodes of a real cluster do. Jobs are
submitted by an ordinary user, who exists only in the mount namespace of this cluster; interpreter, packages and repository
are bind-mounted where that user can read them. Every process is ended by its process id.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.sandboxes.ordinary_user import UID

USER = "towline-test"
PATIENCE = 120.0
CALL_SECONDS = 60.0
"""Timeout of one call of a client."""
_REPOSITORY = Path(__file__).parents[3]
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "ip", "nsenter", "unshare", "setpriv")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CONF = """\
ClusterName=towline
SlurmctldHost={host}({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge/socket,cred_expire=5
SlurmctldPort=26817
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool/%n
SlurmctldPidFile={work}/run/slurmctld.pid
SlurmdPidFile={work}/run/%n.pid
SlurmctldLogFile={work}/log/slurmctld.log
SlurmdLogFile={work}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdTimeout=30
KillWait=30
MailProg=/bin/true
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@dataclass
class SlurmCluster:
    """A running Slurm with `count` nodes, named n1, n2, …"""

    count: int
    shown: dict[str, Path] = field(default_factory=dict)
    """More folders to show to the user, by the name under which they appear in `place`."""

    def __post_init__(self) -> None:
        self._id = secrets.token_hex(3)
        # Not below /tmp, which every node has for itself. Root keeps it, so that its name stays short for sockets.
        self.place = Path(tempfile.mkdtemp(prefix="tl-slurm-", dir="/var/tmp"))
        self.place.chmod(0o755)
        self.home = self.place / "home"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._spaces: list[str] = []

    def address(self, node: int) -> str:
        """The address of a node; 0 is the controller, where users are logged in."""
        return f"10.77.0.{10 + node}"

    @property
    def python(self) -> str:
        return f"{self.place}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What the user has after login."""
        return {
            "PATH": _PATH,
            "HOME": str(self.home),
            "USER": USER,
            "SLURM_CONF": f"{self.place}/slurm.conf",
            "PYTHONPATH": f"{self.place}/repository/src:{self.place}/packages",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": f"{self.place}/python/lib",
            "COLUMNS": "200",
        }

    # Life

    def start(self) -> None:
        missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
        assert not missing, f"missing: {', '.join(missing)}; `make test-cluster` installs them"
        assert os.geteuid() == 0, "a Slurm cluster of several nodes on one machine needs root for namespaces"
        self._folders()
        self._network()
        self._mounts()
        munge = f"{self.place}/munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._daemon(0, ["munged", "--foreground", *(f"--{name}={munge}/{file}" for name, file in files.items())])
        self._until("munge accepts credentials", lambda: os.path.exists(f"{munge}/socket"))
        self._daemon(0, ["slurmctld", "-D", "-c"])
        for node in range(1, self.count + 1):
            # Own process ids, so that whatever a node started ends with it, and no other machine's /tmp and /dev/shm.
            inside = "mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; chmod 1777 /tmp /dev/shm"
            command = f"{inside}; exec slurmd -D -N n{node}"
            own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            self._nodes[node] = self._daemon(node, [*own, "sh", "-ec", command])
        self._until("all nodes are idle", lambda: self._idle() == self.count)

    def stop(self) -> None:
        """End every daemon at once, then the namespaces."""
        daemons = self._processes[1:]
        for process in daemons:
            # `unshare` ignores SIGTERM and waits for its child, the first process of a node.
            node = process in self._nodes.values()
            for pid in _children(process.pid) if node else [process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 20
        for process in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE)
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, timeout=CALL_SECONDS)
        shutil.rmtree(self.place, ignore_errors=True)

    def _folders(self) -> None:
        for name in ("munge", "state", "run", "log", "home", "python", "packages", "repository", "etc", *self.shown):
            (self.place / name).mkdir()
        for node in range(1, self.count + 1):
            (self.place / "spool" / f"n{node}").mkdir(parents=True)
        os.chown(self.home, UID, UID)
        key = self.place / "munge/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host = os.uname().nodename.partition(".")[0]
        nodes = [
            f"NodeName=n{node} NodeHostname={host} NodeAddr={self.address(node)} Port={26820 + node} CPUs=2 RealMemory=4000"
            for node in range(1, self.count + 1)
        ]
        values = {"host": host, "controller": self.address(0), "work": self.place, "nodes": "\n".join(nodes)}
        (self.place / "slurm.conf").write_text(_CONF.format(**values))
        accounts = Path("/etc/passwd").read_text()
        (self.place / "etc/passwd").write_text(f"{accounts}{USER}:x:{UID}:{UID}::{self.home}:/bin/sh\n")
        groups = Path("/etc/group").read_text()
        (self.place / "etc/group").write_text(f"{groups}{USER}:x:{UID}:\n")

    def _network(self) -> None:
        """One namespace for the controller with a bridge, one per node; no route leads out."""
        spaces = [f"tl{self._id}-{number}" for number in range(self.count + 1)]
        for space in spaces:
            _ip("netns", "add", space)
            self._spaces.append(space)
            _ip("-n", space, "link", "set", "lo", "up")
        first = spaces[0]
        _ip("-n", first, "link", "add", "br0", "type", "bridge")
        _ip("-n", first, "addr", "add", f"{self.address(0)}/24", "dev", "br0")
        _ip("-n", first, "link", "set", "br0", "up")
        for number, space in enumerate(spaces[1:], 1):
            _ip("-n", first, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", first, "link", "set", f"v{number}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _mounts(self) -> None:
        """The mount namespace of the cluster, held by a process that only sleeps."""
        binds = {
            sys.base_prefix: "python",
            sysconfig.get_paths()["purelib"]: "packages",
            str(_REPOSITORY): "repository",
            **{str(source): name for name, source in self.shown.items()},
        }
        steps = [f"mount --bind {shlex.quote(source)} {self.place}/{name}" for source, name in binds.items()]
        steps += [
            f"mount -t overlay -o lowerdir={self.place}/etc:/etc overlay /etc",
            f"touch {self.place}/run/mounted",
            "exec sleep infinity",
        ]
        self._processes.append(subprocess.Popen(["unshare", "--mount", "sh", "-ec", "\n".join(steps)]))
        self._until("the mounts are made", lambda: (self.place / "run/mounted").exists())

    def _daemon(self, node: int, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.place / f"log/daemons-{node}.log").open("ab") as log:
            where = self._where(node)
            process = subprocess.Popen(
                [*where, *command], env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._processes.append(process)
        return process

    def _where(self, node: int) -> list[str]:
        return [
            "nsenter",
            f"--net=/run/netns/{self._spaces[node]}",
            f"--mount=/proc/{self._processes[0].pid}/ns/mnt",
            "--",
        ]

    def _idle(self) -> int:
        done = self._call(["sinfo", "--noheader", "--Node", "--format=%t"], seconds=5)
        return done.stdout.split().count("idle")

    def _call(self, command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [*self._where(0), *command],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", "timeout")

    def _until(self, what: str, holds: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not holds():
            dead = [process.args for process in self._processes if process.poll() is not None]
            assert not dead, f"ended while waiting until {what}: {dead}\n{self.logs()}"
            assert time.monotonic() < until, f"not so after {PATIENCE:g} s: {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The end of every log of the cluster."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self.place.glob("log/*")
        )

    def kill_node(self, node: int) -> None:
        """Everything on a node ends at once, as when its machine loses power; its address stays without a listener."""
        process = self._nodes.pop(node)
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(PATIENCE)

    # What the user does

    def as_user(
        self, command: list[str], *, cwd: Path | None = None, seconds: float = CALL_SECONDS, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the ordinary user, logged in at the controller."""
        login = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        enter = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd or self.home)]
        return subprocess.run(
            [*self._where(0), *login, *enter, *command],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def towline(
        self, *arguments: str, cwd: Path | None = None, seconds: float = CALL_SECONDS, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `towline` as the user."""
        return self.as_user([self.python, "-m", "towline", *arguments], cwd=cwd, seconds=seconds, **variables)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=CALL_SECONDS)


@contextlib.contextmanager
def slurm_cluster(count: int, shown: dict[str, Path] | None = None) -> Iterator[SlurmCluster]:
    """A Slurm cluster that ends with the block."""
    cluster = SlurmCluster(count, shown or {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
