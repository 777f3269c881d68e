"""The worker process: calls named functions of Towline on hostile input, one call at a time, and returns plain data.

Runs by file path in isolated mode with a bare environment; the parent (`workers.py`) names the folder of the package. A call
is one message on stdin, a reply one message on stdout. A message is a JSON header line with the sizes of its blobs, then the
JSON body, then the blobs: bytes never travel as JSON, and nothing is ever unpickled on either side.

Limits are set per call, before its input is decoded: memory as address space above what the process has, CPU time above what
it has used. A process that exceeds its CPU time is killed by the kernel, also inside one endless C function.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
from typing import IO, Any

PACKAGE = "towline."
_HEADER = 4096
"""Longest header line, in bytes; a longer one is not from this protocol."""


def encode(value: Any, blobs: list[bytes]) -> Any:
    """A value as JSON: bytes become references to blobs; tuples and dictionaries with any keys are marked."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        blobs.append(bytes(value))
        return {"b": len(blobs) - 1}
    if isinstance(value, list):
        return [encode(one, blobs) for one in value]
    if isinstance(value, tuple):
        return {"t": [encode(one, blobs) for one in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, blobs), encode(one, blobs)] for key, one in value.items()]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(value: Any, blobs: list[bytes]) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(one, blobs) for one in value]
    if isinstance(value, dict):
        if "b" in value:
            return blobs[value["b"]]
        if "t" in value:
            return tuple(decode(one, blobs) for one in value["t"])
        return {decode(key, blobs): decode(one, blobs) for key, one in value["d"]}
    return value


def write_message(stream: IO[bytes], value: Any) -> None:
    blobs: list[bytes] = []
    body = json.dumps(encode(value, blobs)).encode()
    header = json.dumps([len(body), [len(blob) for blob in blobs]]).encode()
    if len(header) >= _HEADER:
        # Many small blobs (the files of a tree) would make a long header: their sizes become a blob of their own.
        body = json.dumps([json.loads(body), [len(blob) for blob in blobs]]).encode()
        header = json.dumps([len(body), [sum(map(len, blobs))], True]).encode()
    stream.write(header + b"\n")
    stream.write(body)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def read_message(stream: IO[bytes], most: int | None = None) -> Any:
    """One message; `EOFError` if the other side is gone, `ValueError` if it is larger than `most` bytes."""
    line = stream.readline(_HEADER)
    if not line.endswith(b"\n"):
        raise EOFError
    size, sizes, *packed = json.loads(line)
    if most is not None and size + sum(sizes) > most:
        raise ValueError(f"{size + sum(sizes)} bytes exceed the limit of {most}")
    body = json.loads(_exactly(stream, size))
    blobs = [_exactly(stream, one) for one in sizes]
    if packed:
        body, sizes = body
        whole, start = memoryview(blobs[0]), 0
        blobs = []
        for one in sizes:
            blobs.append(bytes(whole[start : start + one]))
            start += one
    return decode(body, blobs)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return data


def _limit(memory: int, seconds: float) -> None:
    """Soft limits for the next call, relative to what the process uses already."""
    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, resource.RLIM_INFINITY))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, resource.RLIM_INFINITY))


def _call(name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    module, _, function = name.partition(":")
    if not module.startswith(PACKAGE):
        raise ValueError(f"{name} is not a function of this package")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    return found(*arguments, **keywords)


def _reply(call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": _call(call["function"], call["arguments"], call["keywords"])}
    except MemoryError:
        return {"limit": "memory"}
    except RecursionError:
        return {"limit": "depth"}
    except Exception as error:  # the parent decides what an error of the function means
        kind = type(error)
        return {"error": [f"{kind.__module__}:{kind.__qualname__}", str(error)]}


def main() -> None:
    """Answer calls until stdin ends. stdout is taken away from the functions, so that none can write to the channel."""
    sys.path.insert(0, sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    os.nice(int(sys.argv[2]))
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    importlib.import_module("towline.errors")
    write_message(target, {"ready": True})
    while True:
        try:
            limits = read_message(source)
        except EOFError:
            return
        _limit(limits["memory"], limits["seconds"])
        try:
            call = read_message(source)
            reply = _reply(call)
            call = None
            write_message(target, reply)
        except MemoryError:
            reply = {}
            gc.collect()
            write_message(target, {"limit": "memory"})
        except TypeError as error:
            write_message(target, {"error": ["builtins:TypeError", str(error)]})


if __name__ == "__main__":
    main()
