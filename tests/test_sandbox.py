"""sandbox.py: each limit with a real child that runs into it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from longbatch import sandbox
from longbatch.sandbox import SandboxCrash, SandboxMemory, SandboxRaised, SandboxTimeout

GIBIBYTE = 1 << 30
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a limit that only Linux has")

TARGETS = """
import os, signal, socket, subprocess, sys, time

def echo(**arguments): return arguments
def allocate(size): return len(bytearray(size))
def spin():
    while True: pass
def sleep(): time.sleep(60)
def fail(): raise LookupError("no such thing")
def crash(): print("about to crash", file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)
def leave(): print("giving up", flush=True); os._exit(3)
def hang_silently(): os.closerange(1, 64); time.sleep(60)
def write(path, size):
    with open(path, "wb") as file: file.write(bytes(size))
def environment(): return dict(os.environ)
def connect(port): socket.create_connection(("127.0.0.1", port)).close()
def look_up(): socket.getaddrinfo("localhost", 80)
def run(): subprocess.run(["true"])
def system(): os.system("true")
def fork(): os.fork()
def interfaces():
    with open("/proc/net/dev") as file: return [line.split(":")[0].strip() for line in file.readlines()[2:]]
def chatter():
    for _ in range(100_000): print("x" * 100)
    return "done"
def flood(): return "x" * (70 << 20)
def unserializable(): return object()
def leak(path):
    with open(path, "w") as file: file.write(str(os.getpid()))
    time.sleep(60)
def panic(): raise type("PanicException", (BaseException,), {})("a Rust panic")
"""


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(
    name: str, *, seconds: float = 20, memory_bytes: int = GIBIBYTE, max_file_bytes: int = 0, **arguments: Any
) -> Any:
    return sandbox.run_limited(
        f"targets:{name}", arguments, seconds=seconds, memory_bytes=memory_bytes, max_file_bytes=max_file_bytes
    )


def test_result_comes_back() -> None:
    arguments = {"text": "é\u2028\0", "list": [1, 2.5, None], "nested": {"a": [True]}}
    assert run("echo", **arguments) == arguments


def test_large_arguments_and_results() -> None:
    assert run("echo", text="x" * (5 << 20))["text"] == "x" * (5 << 20)


def test_wall_clock() -> None:
    start = time.monotonic()
    with pytest.raises(SandboxTimeout, match=r"limit of 0\.5 s"):
        run("sleep", seconds=0.5)
    assert time.monotonic() - start < 5


def test_wall_clock_of_a_child_that_closed_its_pipes() -> None:
    start = time.monotonic()
    with pytest.raises(SandboxTimeout):
        run("hang_silently", seconds=0.5)
    assert time.monotonic() - start < 5


def test_processor_time() -> None:
    with pytest.raises(SandboxTimeout):
        run("spin", seconds=1)


@linux_only
def test_memory() -> None:
    with pytest.raises(SandboxMemory, match=r"limit of 1\.1 GB"):
        run("allocate", size=4 * GIBIBYTE)
    assert run("allocate", size=GIBIBYTE // 4) == GIBIBYTE // 4


@linux_only
def test_memory_of_a_library_that_aborts() -> None:
    with pytest.raises(SandboxMemory):
        sandbox._result(-signal.SIGABRT, b"", b"memory allocation of 8589934592 bytes failed\n", 1, GIBIBYTE)


def test_exception_of_the_function() -> None:
    with pytest.raises(SandboxRaised) as caught:
        run("fail")
    assert (caught.value.type, caught.value.message) == ("LookupError", "no such thing")


def test_panic_of_a_rust_extension() -> None:
    with pytest.raises(SandboxRaised, match="PanicException: a Rust panic"):
        run("panic")


def test_result_that_is_no_json() -> None:
    with pytest.raises(SandboxRaised, match="TypeError"):
        run("unserializable")


def test_signal_names_the_last_line() -> None:
    with pytest.raises(SandboxCrash, match="was ended by SIGSEGV: about to crash"):
        run("crash")


def test_exit_without_an_answer() -> None:
    with pytest.raises(SandboxCrash, match="ended with exit status 3: giving up"):
        run("leave")


def test_what_it_prints_is_neither_kept_nor_in_the_way() -> None:
    assert run("chatter") == "done"


def test_answer_too_large() -> None:
    with pytest.raises(SandboxCrash, match="answered with more than"):
        run("flood")


def test_written_files(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    run("write", path=path, size=1 << 20, max_file_bytes=1 << 20)
    assert os.path.getsize(path) == 1 << 20
    with pytest.raises(SandboxRaised, match="File too large"):
        run("write", path=path, size=(1 << 20) + 1, max_file_bytes=1 << 20)
    with pytest.raises(SandboxRaised, match="File too large"):
        run("write", path=path, size=1)


def test_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("https_proxy", "http://user:hunter2@proxy")
    found = run("environment")
    assert "hunter2" not in str(found)
    assert "HOME" not in found


@pytest.mark.parametrize("name", ["look_up", "run", "system", "fork"])
def test_no_network_and_no_processes(name: str) -> None:
    with pytest.raises(SandboxRaised, match=r"PermissionError: .* is not allowed in a limited process"):
        run(name)


def test_no_connection_to_a_listening_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SandboxRaised, match="PermissionError"):
        run("connect", port=server.getsockname()[1])


@linux_only
def test_network_namespace_where_the_kernel_allows_one() -> None:
    allowed = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
    allowed |= subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True, check=False).returncode == 0
    if not allowed:
        pytest.skip("this kernel lets us make no network namespace")
    assert run("interfaces") == ["lo"]


def test_working_folder_supplies_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "json.py").write_text("raise SystemExit('taken over')")
    monkeypatch.chdir(hostile)
    assert run("echo", a=1) == {"a": 1}


@linux_only
def test_child_dies_with_its_parent(tmp_path: Path, root: Path) -> None:
    mark = tmp_path / "pid"
    script = (
        "from longbatch.sandbox import run_limited\n"
        f"run_limited('targets:leak', {{'path': {str(mark)!r}}}, seconds=60, memory_bytes=1 << 30, max_file_bytes=99)"
    )
    path = os.pathsep.join([str(root), str(tmp_path)])
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path})
    child = _wait_for_pid(mark)
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail("the child outlived its parent")


def _wait_for_pid(mark: Path) -> int:
    for _ in range(200):
        if mark.is_file() and mark.read_text():
            return int(mark.read_text())
        time.sleep(0.05)
    raise AssertionError("the child did not start")
