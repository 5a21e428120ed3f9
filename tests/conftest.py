"""What every test starts from: interpreted kernels where there is no GPU, no settings of the user's."""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads this when a kernel module is imported, so it stands before every other import. On a machine
# with a GPU kernels are compiled.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; each with threads for all of them would wait for the others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pytest

pytest_plugins = ["model_files"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def no_user_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Settings come from the test alone, whatever the person running it has set."""
    for name in list(os.environ):
        if name.startswith("LONGBATCH_") and name != "LONGBATCH_CACHE_DIR":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture
def uninstalled_environment(root: Path) -> dict[str, str]:
    """Environment of a child process that finds longbatch in the tree, installed or not."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
