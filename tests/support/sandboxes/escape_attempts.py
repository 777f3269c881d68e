"""Escape attempts as small programs that run inside a sandbox and print their result as JSON.

Every bomb is bounded: without its guard it exceeds the limit and stops.
"""

from __future__ import annotations

_HEAD = "import ctypes, errno, json, os, socket, struct, sys, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def program(body: str) -> str:
    return _HEAD + body


CONNECT = program("""
def reach(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        try:
            client.connect(address)
            return client.recv(100).decode()
        except OSError as error:
            return errno.errorcode.get(error.errno, "timeout")
loopback, outside, outside_port, abstract = sys.argv[1:]
print(json.dumps({
    "loopback": reach(socket.AF_INET, ("127.0.0.1", int(loopback))),
    "outside": reach(socket.AF_INET, (outside, int(outside_port))),
    "abstract": reach(socket.AF_UNIX, "\\0" + abstract),
}))
""")

SEARCH = program("""
secret, path = sys.argv[1].encode(), sys.argv[2]
found = []
try:
    if secret in open(path, "rb").read():
        found.append("path")
except OSError:
    pass
for pid in filter(str.isdecimal, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            if secret in open(f"/proc/{pid}/{name}", "rb").read() and int(pid) != os.getpid():
                found.append(name)
        except OSError:
            pass
    for root in (f"/proc/{pid}/root", f"/proc/{pid}/cwd"):
        try:
            if os.stat(root).st_ino != os.stat("/").st_ino and secret in open(f"{root}/{path}", "rb").read():
                found.append("root")
        except OSError:
            pass
print(json.dumps(sorted(set(found))))
""")

FORK = program("""
made = 0
for _ in range(int(sys.argv[1])):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    made += 1
print(json.dumps(made))
sys.stdout.flush()
os.kill(0, 9)
""")

MEMORY = program("""
kept = []
try:
    for _ in range(int(sys.argv[1]) // 8):
        kept.append(bytearray(os.urandom(1024)) * 8192)
    print(json.dumps("all"))
except MemoryError:
    print(json.dumps("refused"))
""")

MANY_MEMORIES = program("""
share, count = int(sys.argv[1]), int(sys.argv[2])
ready, readied = os.pipe()
for _ in range(count):
    if os.fork() == 0:
        kept = [bytearray(os.urandom(1024)) * 1024 for _ in range(share)]
        os.write(readied, b"x")
        time.sleep(4)
        os._exit(0)
os.close(readied)
grown = sum(len(os.read(ready, 1)) for _ in range(count))
time.sleep(2)
print(json.dumps("all" if grown == count else "refused"))
sys.stdout.flush()
os.kill(0, 9)
""")

DISK = program("""
total, limit = 0, int(sys.argv[1])
for folder in ("/work", "/tmp", "/dev/shm", "/root", "/var/tmp", "/usr", "/run"):
    try:
        with open(f"{folder}/bomb", "wb", buffering=0) as bomb:
            for _ in range(limit // 4):
                total += bomb.write(os.urandom(1 << 20))
    except OSError as error:
        pass
outside = []
for path in ("/dev/bomb", "/proc/bomb", "/sys/bomb", "/dev/pts/bomb"):
    try:
        open(path, "wb").write(b"x" * 4096)
        outside.append(path)
    except OSError:
        pass
print(json.dumps([total >> 20, [path for path in outside if path != "/sys/bomb"]]))
""")

SYSTEM_CALLS = program("""
def call(number, *arguments):
    ctypes.set_errno(0)
    packed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = libc.syscall(ctypes.c_long(number), *packed)
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
x86 = os.uname().machine == "x86_64"
def forked(number, *arguments):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, call(number, *arguments).encode())
        os._exit(0)
    os.close(writing)
    return os.read(reading, 100).decode()
def family(number):
    try:
        socket.socket(number, socket.SOCK_STREAM).close()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
master, slave = os.openpty()
def type_ahead():
    reading, writing = os.pipe()
    if os.fork() == 0:
        import fcntl
        os.setsid()
        fcntl.ioctl(slave, 0x540E, 0)
        try:
            fcntl.ioctl(slave, 0x5412, b"x")
            answer = "done"
        except OSError as error:
            answer = errno.errorcode[error.errno]
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    return os.read(reading, 100).decode()
print(json.dumps({
    "user namespace": forked(272 if x86 else 97, 0x10000000),
    "keyring": call(250 if x86 else 219, 0, -3, 0),
    "bpf": call(321 if x86 else 280, 0, 0, 0),
    "userfaultfd": call(323 if x86 else 282, 1),
    "io_uring": call(425, 1, ctypes.create_string_buffer(120)),
    "handle": call(303 if x86 else 264, -100, b"/", ctypes.create_string_buffer(struct.pack("<Ii", 0, 0)), ctypes.create_string_buffer(8), 0),
    "attach": call(101 if x86 else 117, 16, 1, 0, 0),
    "vsock": family(40),
    "alg": family(38),
    "terminal": type_ahead(),
}))
""")

OTHER_NUMBERS = program("""
import mmap
code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20 (getpid by the 32-bit numbers); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print(json.dumps(["x32", libc.syscall(ctypes.c_long(0x40000000 | 39)) > 0]))
sys.stdout.flush()
print(json.dumps(["i386", function() == os.getpid()]))
""")

POWERS = program("""
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
def tried(action):
    try:
        action()
        return True
    except OSError:
        return False
def mount():
    if libc.mount(b"none", b"/mnt", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")
print(json.dumps({
    "powers": int(status["CapEff"], 16),
    "mount": tried(mount),
    "chroot": tried(lambda: os.chroot("/tmp")),
    "raw socket": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()),
    "host name": tried(lambda: socket.sethostname("other")),
}))
""")

DAEMON = program("""
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
for descriptor in (0, 1, 2):
    os.close(descriptor)
open("/work/lives", "w").close()
time.sleep(120)
""")

REWRITE = program("""
# Wait for a process whose executable is the supervisor's interpreter, hold that file of the host's, and try to write to it.
deadline = time.monotonic() + float(sys.argv[1])
held = None
while held is None and time.monotonic() < deadline:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            path = os.readlink(f"/proc/{pid}/exe")
            if "copied-interpreter" in path:
                held = os.open(f"/proc/{pid}/exe", os.O_PATH)
                break
        except OSError:
            pass
result = "not reached"
if held is not None:
    try:
        os.close(os.open(f"/proc/self/fd/{held}", os.O_WRONLY))
        result = "writable"
    except OSError as error:
        result = errno.errorcode[error.errno]
print(json.dumps(result))
""")
