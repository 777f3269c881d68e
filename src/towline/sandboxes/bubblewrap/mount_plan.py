"""From a spec to the plan that the supervisor executes: which folders become which trees, over a root or the host's.

The host's own root is an allow-list: /usr and what belongs to it, never /home, /root, /var, /opt or the real /etc. /etc
is rebuilt from a few world-readable files. Everything else a sandbox needs is a mount of its spec.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

from towline.sandboxes.base import GATEWAY_PORT, SandboxError, SandboxSpec
from towline.sandboxes.egress import PROXY_PORT, EgressRules, environment
from towline.schema import Network

HOSTNAME = "towline"
_SYSTEM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PUBLIC_ETC = [
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "default/locale",
    "fonts",
    "inputrc",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "lsb-release",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "pki",
    "profile",
    "profile.d",
    "protocols",
    "python3",
    "redhat-release",
    "services",
    "skel",
    "ssl",
    "terminfo",
    "timezone",
]
_FOLDERS = [
    "etc",
    "home",
    "media",
    "mnt",
    "opt",
    "proc",
    "dev",
    "root",
    "run",
    "srv",
    "sys",
    "tmp",
    "var/lib",
    "var/log",
    "var/cache",
    "var/tmp",
]
_PASSWD = """root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = "root:x:0:\ndaemon:x:1:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n"
_PORTS = {Network.NONE: [], Network.GATEWAY: [GATEWAY_PORT], Network.OPEN: [GATEWAY_PORT, PROXY_PORT]}
"""The ports on which the node listens inside."""
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"


def make_host_skeleton(folder: Path, host: Path = Path("/")) -> None:
    """The part of an allow-listed root that is not /usr: folders, symlinks, and an /etc without secrets."""
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name).chmod(0o755)
    for name in ("tmp", "var/tmp"):
        (folder / name).chmod(0o1777)
    (folder / "root").chmod(0o700)
    for name in _SYSTEM_FOLDERS:
        source = host / name
        if source.is_symlink():
            (folder / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (folder / name).mkdir()
    for name in _PUBLIC_ETC:
        _copy_public(host / "etc" / name, folder / "etc" / name)
    texts = {"passwd": _PASSWD, "group": _GROUP, "nsswitch.conf": _NSSWITCH}
    for name, text in texts.items():
        _write_text(folder / "etc" / name, text)


def make_hosts_layer(folder: Path, *, resolve: bool, host: Path = Path("/")) -> None:
    """The layer with /etc/hosts, /etc/hostname and, with the host's own network, its resolver."""
    (folder / "etc").mkdir(parents=True, exist_ok=True)
    _write_text(folder / "etc/hosts", f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost ip6-localhost ip6-loopback\n")
    _write_text(folder / "etc/hostname", f"{HOSTNAME}\n")
    resolver = host / "etc/resolv.conf"
    _write_text(folder / "etc/resolv.conf", resolver.read_text() if resolve and resolver.is_file() else "")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o644)


def _copy_public(source: Path, target: Path) -> None:
    """Copy world-readable files, and nothing else."""
    try:
        status = source.lstat()
        if stat.S_ISLNK(status.st_mode):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(source))
        elif stat.S_ISDIR(status.st_mode) and status.st_mode & 0o005 == 0o005:
            target.mkdir(parents=True, exist_ok=True)
            target.chmod(0o755)
            for entry in source.iterdir():
                _copy_public(entry, target / entry.name)
        elif stat.S_ISREG(status.st_mode) and status.st_mode & 0o004:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o644)
    except FileNotFoundError:
        return


class _Sources:
    """The folders that are passed to the spawner, each once."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []

    def add(self, path: Path, *, mapped: bool) -> int:
        """Its index. `mapped` makes the folder's owner root inside, also for files that only the owner may read."""
        entry = {"path": str(path), "map": mapped}
        if entry not in self.listed:
            self.listed.append(entry)
        return self.listed.index(entry)


def make_plan(
    spec: SandboxSpec,
    identifier: str,
    root: Path | None,
    skeleton: Path,
    names: Path,
    egress: EgressRules = EgressRules(),  # noqa: B008 - immutable
) -> dict[str, Any]:
    """What the supervisor needs to create a sandbox. `root` is None for the host's own."""
    sources = _Sources()
    layers = [_existing_folder(layer) for layer in spec.layers]
    base = skeleton if root is None else root
    top = [base, *layers, names]
    trees = [{"target": "/", "lowers": [sources.add(path, mapped=True) for path in top], "diff": True}]
    if root is None:
        for name in _SYSTEM_FOLDERS:
            host = Path("/") / name
            if host.is_dir() and not host.is_symlink():
                # Not mapped: a file below /usr that only the host's root may read stays unreadable.
                lowers = [sources.add(host, mapped=False)]
                lowers += [sources.add(layer / name, mapped=True) for layer in layers if (layer / name).is_dir()]
                trees.append({"target": f"/{name}", "lowers": lowers, "diff": True})
    binds = []
    for mount in spec.mounts:
        source = mount.existing_source()
        if not mount.target.startswith("/") or ".." in mount.target.split("/") or mount.target.strip("/") == "":
            raise SandboxError(f"cannot mount at {mount.target!r}: use an absolute path below /")
        index = sources.add(source, mapped=True)
        if mount.writable and source.is_dir():
            trees.append({"target": mount.target, "lowers": [index], "diff": False})
        elif mount.writable:
            raise SandboxError(f"cannot mount the file {mount.source} writable: only folders can be writable")
        else:
            binds.append({"source": index, "target": mount.target})
    of_host = shares_network(spec, egress)
    return {
        "id": identifier,
        "sources": sources.listed,
        "trees": trees,
        "binds": binds,
        "network": "host" if of_host else spec.network.value,
        "ports": [] if of_host else _PORTS[spec.network],
        "hostname": HOSTNAME,
        "workdir": spec.workdir,
        "user": spec.user,
        "env": [list(pair) for pair in environment(spec, egress).items()],
        "seconds": spec.seconds,
    }


def shares_network(spec: SandboxSpec, egress: EgressRules) -> bool:
    """Whether a sandbox has the host's own network, and asks its name servers; otherwise a proxy resolves names."""
    return spec.network is Network.OPEN and egress.unfiltered


def _existing_folder(path: Path) -> Path:
    if not path.is_dir():
        raise SandboxError(f"the layer {path} is not a folder")
    return path.resolve()
