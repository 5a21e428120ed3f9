"""What people ask and get is in results, parts and journals, and nowhere else: no log, status, plan or crash file.

Every text that could get out holds the word below, each with an ending of its own, so that a leak says where it began.
"""

from __future__ import annotations

import gzip
import http.server
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow.parquet as pq
import pytest
from run_folders import results, tiny_model, words, write_manifest

from longbatch.errors import DiskError, ExitCode, RowError
from longbatch.privacy import LogFormatter, error_text, traceback_text

__all__ = ["tiny_model"]

SECRET = re.compile(rb"canary\w*", re.IGNORECASE)
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY")
PUBLIC = re.compile(r"(results|parts)/[^/]+|_work/[^/]+/journal-[^/]+")
ROWS: list[dict[str, Any] | str] = [
    {"id": "plain", "prompt": f"canaryprompt {words(9)}", "note": "canarycarried"},
    {"id": "chat", "messages": [{"role": "user", "content": f"canarycontent {words(4)}"}]},
    {"id": "system", "system": "canarysystem", "prompt": words(3)},
    {"id": "document", "prompt": words(3), "document": {"path": "report.txt"}},
    {"id": "inline", "prompt": words(3), "document": "canaryinline"},
    {"id": "stop", "prompt": words(3), "stop": ["canarystop"]},
    {"id": "score", "task": "score", "prompt": words(3), "continuation": "canarycontinuation w5"},
    {"id": "label", "task": "classify", "prompt": words(3), "labels": ["canarylabel", "w5"]},
    {"id": "many", "prompt": words(5), "n": 2, "temperature": 1.0, "logprobs": True},
    {"id": "long", "prompt": f"canarylong {words(3000)}"},
    {"id": "plain", "prompt": "canarytwice"},
    {"id": "type", "prompt": words(3), "temperature": "canarytype"},
    {"id": "value", "prompt": words(3), "task": "canarytask"},
    {"id": "role", "messages": [{"role": "canaryrole", "content": "x"}]},
    {"id": "part", "messages": [{"role": "user", "content": [{"type": "canarypart", "text": "x"}]}]},
    {"id": "image", "prompt": "x", "image": "https://host/a.png?token=canaryimage"},
    {"id": "url", "prompt": "x", "document": {"path": "https://host/a.txt?token=canarydocument"}},
    {"id": "missing", "prompt": "x", "document": {"path": "canarymissing.txt"}},
    {"id": "outside", "prompt": "x", "document": {"path": "../canaryoutside.txt"}},
    {"id": "binary", "prompt": "x", "document": {"path": "report.pdf"}},
    {"id": "extra", "custom_id": "b", "body": {"messages": [], "tools": ["canarytools"]}},
    {"id": ["canaryid"], "prompt": "x"},
    {"id": "format", "prompt": "x", "response_format": {"type": "canaryformat"}},
    '{"id": "torn", "prompt": "canarytorn',
    '["canarylist"]',
    '{"id": "bytes", "prompt": "canarybytes \udcff"}',
    '{"id": "deep", "prompt": ' + "[" * 2000 + '"canarydeep"' + "]" * 2000 + "}",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a manifest, its documents, and a folder for caches."""
    folder = tmp_path_factory.mktemp("private")
    lines = [row if isinstance(row, str) else json.dumps(row) for row in ROWS]
    (folder / "rows.jsonl").write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    (folder / "report.txt").write_text(f"canaryreport {words(20)}")
    (folder / "report.pdf").write_text("%PDF canarypdf")
    return folder


@pytest.fixture
def environment(uninstalled_environment: dict[str, str], place: Path) -> dict[str, str]:
    secrets = {name: f"canary{zlib.crc32(name.encode())}" for name in TOKENS}
    return {**uninstalled_environment, **secrets, "LONGBATCH_CACHE_DIR": str(place / "cache"), "LONGBATCH_GPUS": "0"}


def call(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """A command of longbatch, with the arguments given; or a program, where the first one is -c."""
    start = [] if arguments[0] == "-c" else ["-m", "longbatch"]
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)], env=environment, capture_output=True, timeout=200, check=False
    )


def run_flags(model: Path, out: Path) -> list[str | Path]:
    return ["-o", out, "--model", model, "--max-tokens", "8", "--progress", "log", "--abort-on-failures", "off"]


def found_in(content: bytes) -> set[str]:
    return {match.decode() for match in SECRET.findall(content)}


def leaks(folder: Path) -> dict[str, set[str]]:
    """By file what is found in a folder where it must not be, its names and packed contents included."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        content = name.encode()
        if path.is_file() and not PUBLIC.fullmatch(name):
            content += path.read_bytes()
            if path.suffix == ".parquet":
                table = pq.read_table(path)
                content += repr((table.schema.metadata, table.to_pydict())).encode()
        if secrets := found_in(content):
            found[name] = secrets
    return found


def assert_private(out: Path, *outputs: bytes) -> None:
    """Nothing got out, and what was asked is where it belongs."""
    assert leaks(out) == {}
    for output in outputs:
        assert found_in(output) == set(), output.decode()


# ------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def out(
    place: Path, tiny_model: Path, uninstalled_environment_of_module: dict[str, str]
) -> tuple[Path, subprocess.CompletedProcess[bytes]]:
    """A finished run over all rows, with every logger at its most talkative."""
    folder = place / "out"
    done = call(
        uninstalled_environment_of_module,
        *("run", place / "rows.jsonl", *run_flags(tiny_model, folder), "--keep-columns", "note", "--json"),
    )
    return folder, done


@pytest.fixture(scope="module")
def uninstalled_environment_of_module(root: Path, place: Path) -> dict[str, str]:
    """Where `sitecustomize` opens all loggers of every process, into files of `place/debug`."""
    (place / "site").mkdir()
    (place / "debug").mkdir()
    (place / "site" / "sitecustomize.py").write_text(
        "import logging, os\n"
        f"handler = logging.FileHandler(f'{place}/debug/{{os.getpid()}}.log')\n"
        "logging.getLogger().addHandler(handler)\n"
        "logging.getLogger().setLevel(logging.DEBUG)\n"
        "logging.getLogger('longbatch').setLevel(logging.DEBUG)\n"
    )
    paths = [str(root), str(root / "kernels"), str(place / "site")]
    secrets = {name: f"canary{zlib.crc32(name.encode())}" for name in TOKENS}
    return {
        **os.environ,
        **secrets,
        "PYTHONPATH": os.pathsep.join(paths),
        "LONGBATCH_CACHE_DIR": str(place / "cache"),
        "LONGBATCH_GPUS": "0",
    }


def test_a_run_keeps_everything_to_itself(out: tuple[Path, subprocess.CompletedProcess[bytes]], place: Path) -> None:
    folder, done = out
    assert done.returncode == ExitCode.FAILED_ROWS, done.stderr.decode()
    assert_private(folder, done.stdout, done.stderr)
    assert_private(place / "cache")
    assert len(list((place / "debug").iterdir())) >= 2, "supervisor and worker"
    assert_private(place / "debug")
    assert list((folder / "logs").glob("worker-*"))
    rows = {row["id"]: row for row in results(folder)}
    assert rows["plain"]["note"] == "canarycarried", "it was there to be found"
    assert {row["status"] for row in rows.values()} == {"ok", "error"}
    assert (folder.stat().st_mode & 0o777) == 0o700


def test_error_rows_quote_nothing(out: tuple[Path, subprocess.CompletedProcess[bytes]]) -> None:
    """Their messages are shown in plans, reports and logs."""
    for row in results(out[0]):
        if row["error"] is not None:
            assert found_in(json.dumps(row["error"]).encode()) == set(), row["id"]


def test_answers_are_in_no_other_file(out: tuple[Path, subprocess.CompletedProcess[bytes]], place: Path) -> None:
    folder, done = out
    answers = [row["text"].encode() for row in results(folder) if row["text"]]
    assert min(len(answer.split()) for answer in answers) == 8
    others = [
        path for path in folder.rglob("*") if path.is_file() and not PUBLIC.fullmatch(str(path.relative_to(folder)))
    ]
    contents = [done.stdout, done.stderr, *(path.read_bytes() for path in (*others, *(place / "debug").iterdir()))]
    assert not any(answer in content for answer in answers for content in contents)


@pytest.mark.parametrize(
    "command", ["status OUT", "status OUT --json", "status OUT --watch", "verify OUT", "merge OUT", "stop OUT",
                "validate ROWS", "validate ROWS --json", "plan ROWS FLAGS", "plan ROWS FLAGS --json",
                "retry OUT --type invalid_type --keep-columns note"],
)  # fmt: skip
def test_commands_on_it_say_nothing(
    command: str,
    out: tuple[Path, subprocess.CompletedProcess[bytes]],
    place: Path,
    tiny_model: Path,
    environment: dict[str, str],
) -> None:
    words = {"OUT": [out[0]], "ROWS": [place / "rows.jsonl"], "FLAGS": ["--model", tiny_model]}
    arguments = [part for word in command.split() for part in words.get(word, [word])]
    done = call(environment, *arguments)
    assert done.returncode in (ExitCode.OK, ExitCode.FAILED_ROWS), done.stderr.decode()
    assert done.stdout + done.stderr
    assert_private(out[0], done.stdout, done.stderr)


def test_doctor_shows_no_token(environment: dict[str, str], place: Path) -> None:
    for arguments in (["doctor"], ["doctor", "--json"], ["config", "--show"]):
        done = call(environment, *arguments)
        assert done.returncode == ExitCode.OK, done.stderr.decode()
        assert_private(place / "cache", done.stdout, done.stderr)


def test_settings_with_texts(place: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    """Template, system message and the command at the end; then another template, which is refused by its hash."""
    folder = place / "texts"
    flags = [*run_flags(tiny_model, folder), "--on-finish", "true canaryhook", "--prompt-format", "raw"]
    rows = write_manifest(place / "texts.jsonl", [{"id": "a", "text": "w5 w6"}])
    done = call(environment, "run", rows, *flags, "--prompt", "canarytemplate {text}")
    assert done.returncode == ExitCode.OK, done.stderr.decode()
    assert_private(folder, done.stdout, done.stderr)
    other = call(environment, "run", rows, *flags, "--prompt", "canaryother {text}")
    assert other.returncode == ExitCode.USAGE
    assert b"prompt: " in other.stderr
    again = call(environment, "retry", folder)
    assert again.returncode == ExitCode.USAGE
    assert b"--prompt, which is not stored" in again.stderr
    assert_private(folder, other.stderr, again.stderr)


def test_a_killed_run(place: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    folder = place / "killed"
    rows = [{"id": f"r{i}", "prompt": f"canarykilled {words(30, i)}"} for i in range(40)]
    manifest = write_manifest(place / "killed.jsonl", rows)
    flags = [*run_flags(tiny_model, folder), "--max-tokens", "200", "--decode-batch", "2", "--wave-tokens", "64"]
    command = [sys.executable, "-m", "longbatch", "run", str(manifest), *map(str, flags)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while not list((folder / "_work").glob("*/journal*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        _, log = process.communicate(timeout=60)
    assert list((folder / "_work").glob("*/inflight.json"))
    assert_private(folder, log)


def test_a_compressed_manifest_leaves_no_copy(place: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    folder = place / "packed"
    packed = place / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((place / "rows.jsonl").read_bytes()))
    done = call(environment, "run", packed, *run_flags(tiny_model, folder))
    assert done.returncode == ExitCode.FAILED_ROWS, done.stderr.decode()
    assert_private(folder, done.stdout, done.stderr)


# -------------------------------------------------------------------------------------------- from the web


class Handler(http.server.BaseHTTPRequestHandler):
    """Rows for those who bring the token."""

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, whole: bool) -> None:
        url = urlsplit(self.path)
        known = parse_qs(url.query).get("token") == ["canarytoken"] and url.path == "/rows.jsonl"
        content = b'{"id": "a", "prompt": "w5 w6 canaryweb"}\n' if known else b"canaryrefusal"
        self.send_response(200 if known else 403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if whole:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_url_with_a_token(place: Path, tiny_model: Path, uninstalled_environment_of_module: dict[str, str]) -> None:
    pytest.importorskip("aiohttp")
    folder = place / "web"
    environment = uninstalled_environment_of_module
    with web_server() as address:
        url = f"{address}/rows.jsonl?token=canarytoken"
        done = call(environment, "run", url, *run_flags(tiny_model, folder))
        assert done.returncode == ExitCode.OK, done.stderr.decode()
        assert_private(folder, done.stdout, done.stderr)
        assert results(folder)[0]["id"] == "a"
        wrong = call(
            environment, "run", f"{address}/rows.jsonl?token=canarywrong", *run_flags(tiny_model, place / "no")
        )
        assert wrong.returncode == ExitCode.MANIFEST, wrong.stderr.decode()
    gone = call(environment, "run", url, *run_flags(tiny_model, place / "no"))
    assert gone.returncode == ExitCode.MANIFEST, gone.stderr.decode()
    assert found_in(done.stderr + wrong.stderr + gone.stderr) == set(), (wrong.stderr, gone.stderr)
    again = call(environment, "retry", folder)
    assert again.returncode == ExitCode.USAGE
    assert found_in(again.stderr) == set()


# ------------------------------------------------------------------------------------------------- bugs


# Tracebacks show lines of code, so the word is not written out in these.
BUGS = """
from longbatch.run.worker import load_engine
WORD = "can" + "ary"

class Odd(RuntimeError):
    pass

def at_start(job, setup):
    raise ValueError(f"{WORD}start")

def between_waves(job, setup):
    engine = load_engine(job, setup)
    def run(waves, tick):
        next(iter(waves))
        try:
            raise KeyError(f"{WORD}first")
        except KeyError as error:
            raise ValueError(f"{WORD}second") from error
        yield
    engine.run = run
    return engine

def in_a_prompt(job, setup):
    return load_engine(job, setup)

def in_a_forward(job, setup):
    engine = load_engine(job, setup)
    def logits(*_):
        raise Odd(f"{WORD}forward")
    engine.model.logits = logits
    return engine
"""
# Prompts are made before the engine is there, so this one is there from the start of a worker.
PROMPT_BUG = """
import sys
if "longbatch.run.worker" in sys.orig_argv:
    from longbatch.prompt import PromptBuilder
    def build(self, request):
        raise LookupError(request.messages)
    PromptBuilder.build = build
"""
PROGRAM = """
import sys
from longbatch.cli import app
from longbatch.config import resolve
from longbatch.run.execute import execute
out, model, rows, engine = sys.argv[1:]
values = dict(out=out, model=model, gpus="0", max_tokens=8, abort_on_failures="off")
app.app = lambda **_: execute(resolve(values, environ={}).settings, [rows], engine=engine)
sys.exit(app.main([]))
"""


@pytest.mark.parametrize("bug", ["at_start", "between_waves", "in_a_prompt", "in_a_forward"])
def test_a_bug_in_a_worker(bug: str, tmp_path: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    (tmp_path / "bugs.py").write_text(BUGS)
    if bug == "in_a_prompt":
        (tmp_path / "sitecustomize.py").write_text(PROMPT_BUG)
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    rows = write_manifest(tmp_path / "rows.jsonl", [{"id": "a", "prompt": "canarybug w5"}])
    done = call(environment, "-c", PROGRAM, tmp_path / "out", tiny_model, rows, f"bugs:{bug}")
    assert done.returncode in (ExitCode.FAILED_ROWS, ExitCode.DEVICE), done.stderr.decode()
    assert_private(tmp_path / "out", done.stdout, done.stderr)
    log = "".join(path.read_text() for path in (tmp_path / "out" / "logs").iterdir())
    assert re.search(r'File ".*/(bugs|sitecustomize).py", line \d+, in ', log), "the place is named"
    assert re.search("^(ValueError|LookupError|Odd)$", log, re.MULTILINE)


def test_a_bug_in_the_command(tmp_path: Path, environment: dict[str, str]) -> None:
    program = (
        "import sys, longbatch.manifest\n"
        "def fail(*_): raise ValueError('canarymanifest')\n"
        "longbatch.manifest.Manifest.open = fail\n"
        "from longbatch.cli import main\n"
        "sys.exit(main(['validate', 'x']))\n"
    )
    environment["LONGBATCH_CACHE_DIR"] = str(tmp_path)
    done = call(environment, "-c", program)
    assert done.returncode == ExitCode.INTERNAL
    (path,) = (tmp_path / "logs").iterdir()
    assert done.stderr.decode() == f"error: internal error: ValueError\nhint: the traceback is in {path}\n"
    # The program's own line is not in it: it comes from the command line and has no file.
    assert path.read_text().endswith("ValueError\n")
    assert leaks(tmp_path) == {}


# ------------------------------------------------------------------------------------------- error texts


class OutOfCore(RuntimeError):
    """Somebody else's."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("secret"), "ValueError"),
        (KeyError("secret"), "KeyError"),
        (OutOfCore("secret"), "OutOfCore"),
        (UnicodeDecodeError("utf-8", b"secret", 0, 1, "secret"), "UnicodeDecodeError"),
        (FileNotFoundError(2, "no such file", "secret"), "FileNotFoundError: ENOENT"),
        (OSError("secret"), "OSError"),
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        (MemoryError(), "MemoryError"),
        (DiskError("cannot write x"), "DiskError: cannot write x"),
        (RowError("io_error", "it is gone"), "RowError: it is gone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_texts(error: Exception, text: str) -> None:
    assert error_text(error) == text


def test_torch_may_say_what_is_wrong() -> None:
    import torch

    assert error_text(torch.OutOfMemoryError("tried to allocate 2 GiB")).endswith(": tried to allocate 2 GiB")


def test_tracebacks_name_places_and_causes() -> None:
    def fail() -> None:
        try:
            try:
                raise KeyError("secret")
            except KeyError as error:
                raise ValueError("secret") from error
        except ValueError:
            raise RuntimeError("a plain one")  # noqa: B904

    with pytest.raises(RuntimeError) as caught:
        fail()
    text = traceback_text(caught.value)
    assert "secret\n" not in text.replace('"secret")', "")
    assert [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback"))] == [
        "KeyError", "which was the cause of:", "ValueError", "while that was handled:", "RuntimeError: a plain one",
    ]  # fmt: skip
    assert text.count("in fail") == 3


def test_hidden_contexts_stay_hidden_and_circles_end() -> None:
    error, other = ValueError("x"), KeyError("y")
    error.__context__, other.__context__ = other, error
    assert traceback_text(error).count("Traceback") == 2
    error.__suppress_context__ = True
    assert traceback_text(error) == "Traceback (most recent call last):\nValueError\n"


def test_log_records_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("canary")
    except ValueError:
        logging.getLogger("longbatch").exception("row %d failed", 3)
    (record,) = caplog.records
    record.exc_text = None  # what the capture's own formatter left there
    text = LogFormatter("%(levelname)s %(message)s").format(record)
    assert text.startswith("ERROR row 3 failed\nTraceback")
    assert text.endswith("\nValueError")
