"""Runs a Python program of a verifier as a child, and believes its exit code only if the program came to its own end.

The child says over a pipe that its main program returned, or exited from its own code. Code under test that calls
`os._exit`, `sys.exit` or `os.execv` prevents that, and the parent then exits with a failure. The parent runs none of the
agent's code; its record on descriptor 9 says which programs began and ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import TracebackType
from typing import Any

LEDGER = 9


def note(word: str, mark: str, detail: str = "") -> None:
    with contextlib.suppress(OSError):
        os.write(LEDGER, f"{word} {mark} {detail}\n".encode("utf-8", "replace"))


def watch(child: int, pipe: int, mark: str, name: str) -> None:
    """Wait for the child and exit as it did, or with a failure if its exit was not its own."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: os.kill(child, received))
    said = b""
    _, status = os.waitpid(child, 0)
    os.set_blocking(pipe, False)
    with contextlib.suppress(OSError):
        said = os.read(pipe, 4096)
    if os.WIFSIGNALED(status):
        note("ended", mark, "by a signal")
        fatal = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            signal.signal(fatal, signal.SIG_DFL)
        os.kill(os.getpid(), fatal)
        os._exit(128 + fatal)
    code = os.WEXITSTATUS(status)
    if said != mark.encode():
        note("cut", mark, f"{name}: {said[:200].decode('utf-8', 'replace') or 'left without its own end'}")
        print(f"towline: the code under test ended {name}; its exit does not count", file=sys.stderr, flush=True)
        os._exit(code or 1)
    note("ended", mark)
    os._exit(code)


def run(kind: str, name: str, rest: list[str], pipe: int, mark: str) -> None:
    import runpy

    import sitecustomize  # type: ignore[import-not-found]

    config = sitecustomize.load_config()
    with contextlib.suppress(OSError):
        os.close(LEDGER)
    here = sitecustomize.HERE
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here or entry != sys.path[0]]
    folder = os.path.dirname(os.path.abspath(name)) if kind == "script" else os.getcwd()
    if sitecustomize.under(folder, config["carried"]):
        sys.path.append(folder)
    else:
        sys.path.insert(0, folder)
    sys.argv = [name if kind == "script" else f"-{kind}", *rest]
    code, said, main = 0, mark, name if kind == "script" else ""
    try:
        if kind == "script":
            runpy.run_path(name, run_name="__main__")
        elif kind == "m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        code = status_of(end)
        if left_by_agent(end.__traceback__, config, main):
            said = "the code under test left it"
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    if getattr(os, "_towline_cut", None):
        said = "the code under test stopped the test run"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.write(pipe, said.encode())
    os._exit(code)


def status_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def left_by_agent(trace: TracebackType | None, config: dict[str, Any], main: str) -> bool:
    """Whether code of the agent is among the callers of an exit."""
    import sitecustomize

    own = os.path.realpath(main) if main else ""
    while trace is not None:
        frame = trace.tb_frame
        written = frame.f_code.co_filename
        file = os.path.realpath(written)
        # Code without a file (`<frozen runpy>`) is called by code that has one.
        if (
            not written.startswith("<")
            and file != own
            and frame.f_globals.get("__name__") != "__main__"
            and sitecustomize.agents(file, config)
        ):
            return True
        trace = trace.tb_next
    return False


def start() -> None:
    kind, name, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
    mark = os.urandom(16).hex()
    shown = name if kind == "script" else f"python -{kind} {name[:60]}"
    note("began", mark, shown)
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        watch(child, read, mark, shown)
    os.close(read)
    run(kind, name, rest, write, mark)


if __name__ == "__main__":
    start()
