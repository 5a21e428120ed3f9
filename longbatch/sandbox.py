"""Limited child processes for work on untrusted files: GGUF, media, PDF, schemas.

The child is a fresh interpreter (`python -m longbatch.sandbox`), never a fork of a process that holds torch or
its threads. It has a wall-clock limit, limits on memory, processor time, and size of written files, an environment
without tokens, no network, no children of its own, and it dies with its parent. It is told what to run as JSON on
its standard input and answers with JSON on a pipe; what it prints is kept only to explain a crash.

Wanted on Linux; elsewhere the limits that the system lacks (memory on macOS, network namespaces) are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

_MAX_REPLY_BYTES = 64 * 1024 * 1024
_KEPT_OUTPUT_BYTES = 16 * 1024
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
# Audit events of starting processes and of touching sockets; the names are those of CPython's table of audit events.
_REFUSED_EVENTS = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
)


class SandboxError(Exception):
    """Base of what can go wrong in a limited child; the message is fit for users."""


class SandboxTimeout(SandboxError):
    """The child ran past its limit of wall-clock or processor time and was killed."""


class SandboxMemory(SandboxError):
    """The child asked for more memory than it is allowed."""


class SandboxCrash(SandboxError):
    """The child ended without an answer; the message has its signal or exit status and its last line."""


class SandboxRaised(SandboxError):
    """The function raised an exception. type: the exception's class name. message: its text."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(f"{type}: {message}")
        self.type = type
        self.message = message


def run_limited(
    target: str,
    arguments: Mapping[str, Any],
    *,
    seconds: float,
    memory_bytes: int,
    max_file_bytes: int = 0,
) -> Any:
    """Runs a function in a limited child process and returns its result.

    target: "package.module:function". arguments: its keyword arguments, and what it returns, are anything that JSON
    can hold; large results go into files whose paths are arguments. seconds: wall-clock time, and processor time of
    all threads together. memory_bytes: address space of the child, libraries included (numpy alone takes about
    0.2 GB). max_file_bytes: largest file the child may write; 0 forbids writing.
    Raises SandboxTimeout, SandboxMemory, SandboxCrash, or SandboxRaised for an exception of the function.
    """
    read_end, write_end = os.pipe()
    request = {
        "target": target,
        "arguments": dict(arguments),
        "reply": write_end,
        "parent": os.getpid(),
        "seconds": seconds,
        "memory_bytes": memory_bytes,
        "max_file_bytes": max_file_bytes,
    }
    with open(read_end, "rb", buffering=0) as reply, tempfile.TemporaryFile() as stdin:
        try:
            stdin.write(json.dumps(request).encode())
            stdin.seek(0)
            # -P: the working directory must not supply modules.
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "longbatch.sandbox"],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env=_environment(),
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        try:
            answer, output = _collect(child, reply, time.monotonic() + seconds)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise SandboxTimeout(f"stopped after its limit of {seconds:g} s") from None
        finally:
            _kill(child)
    return _result(child.returncode, answer, output, seconds, memory_bytes)


def _environment() -> dict[str, str]:
    """An allowed few variables: no tokens, no proxies, no settings of ours. One thread is enough, and thread
    pools would claim address space for each."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "RAYON")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return kept | threads | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}


def _collect(child: subprocess.Popen[bytes], reply: Any, deadline: float) -> tuple[bytes, bytes]:
    """The reply and the last output of the child, both until their end. Raises TimeoutError at the deadline."""
    assert child.stdout is not None
    answer, output = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector, child.stdout as stdout:
        selector.register(reply, selectors.EVENT_READ, answer)
        selector.register(stdout, selectors.EVENT_READ, output)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
            if len(answer) > _MAX_REPLY_BYTES:
                raise SandboxCrash(f"answered with more than {_MAX_REPLY_BYTES} bytes")
            del output[:-_KEPT_OUTPUT_BYTES]
    child.wait(max(0.0, deadline - time.monotonic()) + 1.0)
    return bytes(answer), bytes(output)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and whatever stands in its session. Harmless after its end."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _result(status: int, answer: bytes, output: bytes, seconds: float, memory_bytes: int) -> Any:
    last_line = output.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
    out_of_memory = SandboxMemory(f"needs more than its limit of {memory_bytes / 1e9:.1f} GB of memory")
    if status == 0:
        reply = json.loads(answer)
        if "result" in reply:
            return reply["result"]
        if reply["raised"] == "MemoryError":
            raise out_of_memory
        raise SandboxRaised(reply["raised"], reply["message"])
    if status == -signal.SIGXCPU:
        raise SandboxTimeout(f"stopped after its limit of {seconds:g} s of processor time")
    # Libraries in C++ and Rust abort when an allocation fails.
    if status == -signal.SIGABRT and ("bad_alloc" in last_line or "memory allocation" in last_line):
        raise out_of_memory
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    raise SandboxCrash(f"{how}: {last_line}" if last_line else how)


# --------------------------------------------------------------------------------------------- in the child


def _main() -> None:
    request = json.load(sys.stdin)
    reply = request["reply"]
    os.set_inheritable(reply, False)
    _die_with_parent(request["parent"])
    _limit(request["seconds"], request["memory_bytes"], request["max_file_bytes"])
    _leave_network()
    sys.addaudithook(_audit)
    try:
        module, _, function = request["target"].partition(":")
        result = getattr(importlib.import_module(module), function)(**request["arguments"])
        answer = json.dumps({"result": result})
    except BaseException as error:  # Panics of Rust extensions are no Exception.
        answer = json.dumps({"raised": type(error).__name__, "message": str(error)})
    with open(reply, "wb") as stream:
        stream.write(answer.encode())


def _limit(seconds: float, memory_bytes: int, max_file_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: max_file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory_bytes
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when the parent ends, and gives up new privileges."""
    if sys.platform == "linux":
        set_death_signal, set_no_new_privileges = 1, 38
        libc = ctypes.CDLL(None)
        libc.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
        libc.prctl(set_no_new_privileges, 1, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the parent process has ended")


def _leave_network() -> None:
    """Moves into a network namespace without interfaces, where the kernel lets us: as root by itself, else together
    with a user namespace. Where it does not, the audit hook alone refuses sockets."""
    if sys.platform == "linux":
        new_user, new_network = 0x10000000, 0x40000000
        libc = ctypes.CDLL(None)
        if libc.unshare(new_network) != 0:
            libc.unshare(new_network | new_user)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED_EVENTS):
        raise PermissionError(f"{event} is not allowed in a limited process")


if __name__ == "__main__":
    _main()
