"""models/hub.py against a real HTTP server on 127.0.0.1 that speaks the hub's endpoints, in real processes (the hub
package reads its settings when it is imported)."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from longbatch.errors import DiskError
from longbatch.models import hub as hub_module

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"---\nlicense: mit\n---\n",
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"raise SystemExit",
    "consolidated.safetensors": b"twice",
    "original/model.safetensors": b"twice",
}
FETCHED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


class Hub(ThreadingHTTPServer):
    """Repositories org/model (whole), org/pickled, org/gguf, and one for each refusal."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        self.server.requests.append(f"{self.command} {self.path}")

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        refusals = {
            "private": (401, "", "Invalid username or password."),
            "token": (401, "", "Invalid credentials in Authorization header"),
            "gated": (403, "GatedRepo", "Access to model org/gated is restricted"),
            "forbidden": (403, "", "Forbidden"),
            "missing": (404, "RepoNotFound", "Repository not found"),
            "broken": (418, "", "teapot"),
        }
        for name, (status, code, message) in refusals.items():
            if f"org/{name}" in path:
                self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message}, body)
                return
        if path.startswith("/api/models/"):
            self._repository(path, body)
            return
        content = FILES.get(path.partition(f"/resolve/{COMMIT}/")[2] or path.partition("/resolve/main/")[2])
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        self._send(200, content, {"ETag": f'"{hash(content) & 0xFFFFFFFF:x}"', "X-Repo-Commit": COMMIT}, body)

    def _repository(self, path: str, body: bool) -> None:
        names = set(FILES)
        if "org/pickled" in path:
            names = {"config.json", "pytorch_model.bin"}
        if "org/gguf" in path:
            names = {"model-Q4_K_M.gguf"}
        if "/revision/" in path and not path.endswith(("/main", COMMIT)):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            return
        if "/tree/" in path:
            files = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "0"} for name in sorted(names)]
            self._send(200, json.dumps(files).encode(), {}, body)
            return
        content = {
            "id": "/".join(path.split("/")[3:5]),
            "sha": COMMIT,
            "siblings": [{"rfilename": name} for name in sorted(names)],
            "cardData": {"license": "mit"},
        }
        self._send(200, json.dumps(content).encode(), {}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


SCRIPT = """
import json, sys
from pathlib import Path
from longbatch.errors import LongbatchError
from longbatch.models import hub
try:
    result = eval(sys.argv[1])
    print(json.dumps({"result": result}, default=str))
except LongbatchError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
"""


def call(expression: str, endpoint: str, home: Path, root: Path, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, expression],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(root),
            "HOME": str(home),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_pull_into_folder(hub: Hub, tmp_path: Path, root: Path) -> None:
    folder = tmp_path / "model"
    expression = f"hub.pull('org/model', folder=Path({str(folder)!r}))"
    path, source = call(expression, hub.url, tmp_path, root)["result"]
    assert path == str(folder)
    assert source == f"Source(repo_id='org/model', revision='main', commit='{COMMIT}', license='mit')"
    names = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    assert names == FETCHED | {"longbatch-source.json"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    found = call(f"hub.read_source(Path({str(folder)!r})).commit", hub.url, tmp_path, root)
    assert found["result"] == COMMIT


def test_pull_into_cache_then_resolve_offline(hub: Hub, tmp_path: Path, root: Path) -> None:
    path, _ = call("hub.pull('org/model')", hub.url, tmp_path, root)["result"]
    assert {file.name for file in Path(path).iterdir()} == FETCHED
    offline = {"HF_HUB_OFFLINE": "1"}
    assert call("hub.resolve('org/model')", "http://127.0.0.1:9", tmp_path, root, **offline)["result"] == path
    assert call("hub.resolve('org/model@main')", "http://127.0.0.1:9", tmp_path, root, **offline)["result"] == path
    found = call("hub.read_source(hub.resolve('org/model')).license", hub.url, tmp_path, root)
    assert found["result"] == "mit"
    other = call("hub.resolve('org/model@v2')", hub.url, tmp_path, root)
    assert other["hint"] == "fetch it: longbatch models pull org/model --revision v2"
    scanned = call("[len(__import__('huggingface_hub').scan_cache_dir().warnings)]", hub.url, tmp_path, root)
    assert scanned["result"] == [0]


def test_pull_again_fetches_nothing(hub: Hub, tmp_path: Path, root: Path) -> None:
    call("hub.pull('org/model')", hub.url, tmp_path, root)
    before = len(hub.requests)
    call("hub.pull('org/model')", hub.url, tmp_path, root)
    assert not [request for request in hub.requests[before:] if request.startswith("GET") and "/resolve/" in request]


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        ("org/private", "does not exist, or it is private", "HF_TOKEN"),
        ("org/token", "the token is not valid (HTTP 401)", "HF_TOKEN"),
        ("org/gated", "access to org/gated is not granted (HTTP 403)", "ask for access"),
        ("org/forbidden", "access to org/forbidden is not granted (HTTP 403)", "ask for access"),
        ("org/missing", "org/missing does not exist on the hub (HTTP 404)", "check the id"),
        ("org/broken", "the hub answered HTTP 418", "try again later"),
        ("org/pickled", "no weights in safetensors", "model.safetensors"),
        ("org/gguf", "holds no config.json", "longbatch convert"),
        ("no-organization", "is no model id", "ORGANIZATION/NAME"),
        ("org/a..b", "is no model id", "ORGANIZATION/NAME"),
    ],
)
def test_refusals_name_the_mend(model: str, message: str, hint: str, hub: Hub, tmp_path: Path, root: Path) -> None:
    answer = call(f"hub.pull({model!r})", hub.url, tmp_path, root)
    assert answer["error"] == "UsageError"
    assert message in answer["message"]
    assert hint in answer["hint"]


def test_unknown_revision(hub: Hub, tmp_path: Path, root: Path) -> None:
    answer = call("hub.pull('org/model', 'v9')", hub.url, tmp_path, root)
    assert answer["message"] == "org/model has no revision 'v9'"


def test_unreachable_hub(tmp_path: Path, root: Path) -> None:
    answer = call("hub.pull('org/model')", "http://127.0.0.1:9", tmp_path, root)
    assert "the hub cannot be reached" in answer["message"]
    assert "HF_ENDPOINT" in answer["hint"]


def test_offline_setting(hub: Hub, tmp_path: Path, root: Path) -> None:
    answer = call("hub.pull('org/model')", hub.url, tmp_path, root, HF_HUB_OFFLINE="1")
    assert answer["hint"] == "unset HF_HUB_OFFLINE"


def test_folder_that_cannot_be_written(hub: Hub, tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").touch()
    answer = call(f"hub.pull('org/model', folder=Path({str(tmp_path / 'file')!r}))", hub.url, tmp_path, root)
    assert answer == {"error": "UsageError", "message": f"{tmp_path / 'file'} is a file", "hint": "name a folder"}


def test_full_disk() -> None:
    error = hub_module._explained(OSError(errno.ENOSPC, "No space left on device"), "org/model", "main")
    assert isinstance(error, DiskError)
    assert error.message == "org/model was not fetched: No space left on device"


def test_resolve_refusals(hub: Hub, tmp_path: Path, root: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    before = len(hub.requests)
    assert call(f"hub.resolve({str(tmp_path)!r})", hub.url, tmp_path, root)["result"] == str(tmp_path)
    file = call(f"hub.resolve({str(tmp_path / 'model.gguf')!r})", hub.url, tmp_path, root)
    assert "longbatch convert" in file["hint"]
    absent = call("hub.resolve('./nowhere')", hub.url, tmp_path, root)
    assert absent["message"] == "there is no model folder ./nowhere"
    unpulled = call("hub.resolve('org/model')", hub.url, tmp_path, root)
    assert unpulled["hint"] == "fetch it: longbatch models pull org/model"
    assert len(hub.requests) == before, "resolving asked the network"
