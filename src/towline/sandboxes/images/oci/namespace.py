"""A one-shot program that runs one command over the image store, as root of its own namespaces.

`serve STORE NETWORK LIFE AUTH PROGRAM ARGUMENT…` creates a user namespace whose ids own nothing on the host, and in it
starts the program with bubblewrap: a root of its own with the host's programs read-only, the store at /images, private
processes and, unless NETWORK is 1, no network. So the steps of a Dockerfile, which buildah only confines to a folder, find
no file, process or address of the host, whether Towline runs as root or as an ordinary user.

Everything ends with this program, and this program ends when the pipe LIFE closes: when the node is gone. AUTH is an open
file with registry credentials, which only this program sees, or -1. Nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import socket
import sys

from towline.sandboxes import linux
from towline.sandboxes.bubblewrap.privileges import RANGE, RootUserMapping, UserMapping, find_user_mapping

STORE = "/images"
"""Where the store is inside."""
PROGRAM = (
    "from towline.sandboxes.images.oci import namespace; "
    "namespace.serve(sys.argv[1], sys.argv[2] == '1', int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])"
)
AUTH = "/run/auth.json"
"""Where the credentials are inside."""
_TEMPORARY = "/tmp"
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_SETTINGS = (
    "hosts", "resolv.conf", "nsswitch.conf", "host.conf", "gai.conf", "services", "protocols",
    "ssl", "pki", "ca-certificates", "ca-certificates.conf", "containers", "alternatives", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime",
)  # fmt: skip
"""Files and folders of /etc that programs inside see."""
USER_ID = 1000
"""The user that root inside claims to be outside; it needs a home there."""
_ACCOUNTS = {
    "/etc/passwd": f"root:x:0:0:root:{STORE}/home:/bin/sh\nbuild:x:{USER_ID}:{USER_ID}::{STORE}/home:/bin/sh\n",
    "/etc/group": f"root:x:0:\nbuild:x:{USER_ID}:\n",
}


def image_user_mapping() -> UserMapping:
    """The users inside. They are the same for every call, since they own the files of the store."""
    mapping = find_user_mapping()
    if isinstance(mapping, RootUserMapping) and mapping.slots > 1:
        # A range below those of sandboxes: no sandbox shares it.
        return RootUserMapping(mapping.first - RANGE, mapping.mapped, 1, [0])
    return mapping


def serve(store: str, network: bool, life: int, auth: int, command: list[str]) -> None:
    try:
        sys.exit(_serve(store, network, life, auth, command))
    except OSError as error:
        sys.exit(f"namespace: {error}")


def _serve(store: str, network: bool, life: int, auth: int, command: list[str]) -> int:
    mapping = image_user_mapping()
    if not mapping.rootless:
        os.chown(store, mapping.outside(0), mapping.outside(0))
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            os.close(life)
            _enter(_bubblewrap_options(network=network, auth=auth), store, theirs, command, mapping, parent)
        except BaseException as error:
            os.write(2, f"namespace: {error}\n".encode())
        finally:
            os._exit(126)
    theirs.close()
    if ours.recv(1):
        mapping.write(child, 0)
        ours.send(b"m")
    pidfd = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(life, 0)
    waiting.register(pidfd, select.POLLIN)
    if all(descriptor != pidfd for descriptor, _ in waiting.poll()):
        os.kill(child, 9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _enter(
    options: list[str], store: str, parent_socket: socket.socket, command: list[str], mapping: UserMapping, parent: int
) -> None:
    """Become the program, in its namespaces."""
    if not mapping.rootless:
        # Before the user namespace, whose root may not enter the folders above the store.
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        folder = os.open(store, os.O_PATH)
        linux.mount("tmpfs", _TEMPORARY, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=1m")
        store = f"{_TEMPORARY}/store"
        os.mkdir(store)
        linux.mount(f"/proc/self/fd/{folder}", store, flags=linux.MS_BIND)
        os.close(folder)
    linux.unshare(linux.CLONE_NEWUSER)
    parent_socket.send(b"u")
    if not parent_socket.recv(1):
        return
    if mapping.mapped > 1:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.kill_with_parent()
    if os.getppid() != parent:
        return
    os.chdir("/")
    os.execvp("bwrap", ["bwrap", *options, "--bind", store, STORE, "--chdir", STORE, "--", *command])


def _bubblewrap_options(*, network: bool, auth: int) -> list[str]:
    options = ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "build"]
    options += ["--perms", "0755", "--dir", "/etc"]
    # The first process keeps its capabilities, so that no step of a build can enter its root.
    options.append("--as-pid-1")
    if not network:
        options.append("--unshare-net")
    for path in _PROGRAMS:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    for name in _SETTINGS:
        # Resolved: a link may lead to a place that does not exist inside.
        options += ["--ro-bind-try", os.path.realpath(f"/etc/{name}"), f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for path, text in _ACCOUNTS.items():
        descriptor = os.memfd_create(path)
        os.set_inheritable(descriptor, True)
        os.write(descriptor, text.encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        options += ["--ro-bind-data", str(descriptor), path]
    if auth >= 0:
        options += ["--ro-bind-data", str(auth), AUTH]
    return [*options, "--dir", "/sys", "--dir", "/var/tmp"]
