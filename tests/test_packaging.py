"""What is shipped: the wheel holds the tree, the public names are these, the tree runs uninstalled."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import longbatch
from longbatch.config import resolve

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {"longbatch": ROOT / "longbatch", "longbatch_kernels": ROOT / "kernels" / "longbatch_kernels"}


def shipped_files() -> set[str]:
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in SHIPPED.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy: a build folder left in the tree could hold files that are gone."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("longbatch", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES"):
        shutil.copy(ROOT / name, copy / name)
    program = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, folder], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.split()[-1])


def test_the_wheel_holds_the_tree(wheel: zipfile.ZipFile) -> None:
    code = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert code == shipped_files()
    assert {"longbatch/py.typed", "longbatch_kernels/py.typed"} <= code


def test_the_wheel_holds_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = f"longbatch-{longbatch.__version__}.dist-info"
    names = wheel.namelist()
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/THIRD_PARTY_NOTICES"} <= set(names)
    assert "longbatch = longbatch.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    for extra in ("test", "dev", "hub", "documents", "report"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_requirements_install_on_every_platform() -> None:
    """decord has wheels for Linux on x86_64, Triton for Linux on x86_64 and aarch64, torch everywhere."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]

    def names(system: str, machine: str) -> set[str]:
        environment = {"sys_platform": system, "platform_machine": machine}
        return {item.name for item in requirements if item.marker is None or item.marker.evaluate(environment)}

    optional = {"decord", "av", "triton"}
    assert names("linux", "x86_64") & optional == {"decord", "triton"}
    assert names("linux", "aarch64") & optional == {"av", "triton"}
    assert names("darwin", "arm64") & optional == {"av"}
    assert names("darwin", "arm64") >= {"torch", "pyarrow", "tokenizers"}


def test_every_third_party_import_is_required() -> None:
    """A package that is imported and only installed because something else needs it may be gone tomorrow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["hub"]]
    texts += project["optional-dependencies"]["documents"] + project["optional-dependencies"]["report"]
    required = {text.replace(";", " ").split(">")[0].split()[0].lower().replace("-", "_") for text in texts}
    required = {{"pillow": "pil"}.get(name, name) for name in required}
    own = {"longbatch", "longbatch_kernels"}
    used: dict[str, str] = {}
    for folder in SHIPPED.values():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                used.update((name.split(".")[0].lower(), f"{path}:{node.lineno}") for name in names)
    foreign = {name: place for name, place in used.items() if name not in own | set(sys.stdlib_module_names)}
    assert {name: place for name, place in foreign.items() if name not in required} == {}


def test_public_names() -> None:
    assert sorted(longbatch.__all__) == [
        "AbortError",
        "DeviceError",
        "DiskError",
        "ExitCode",
        "FidelityError",
        "InterruptedRun",
        "LongbatchError",
        "ManifestError",
        "Request",
        "Result",
        "RowError",
        "RunningError",
        "UsageError",
        "plan",
        "run",
    ]
    for name in longbatch.__all__:
        assert getattr(longbatch, name).__doc__
    with pytest.raises(AttributeError, match="Manifests"):
        longbatch.Manifests  # noqa: B018


def test_every_error_is_public() -> None:
    tree = ast.parse((ROOT / "longbatch" / "errors.py").read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes <= set(longbatch.__all__)


def test_the_functions_run_and_plan_are_not_hidden_by_the_packages() -> None:
    program = (
        "import longbatch, longbatch.plan, longbatch.run\n"
        "from longbatch.run.execute import execute\n"
        "assert callable(longbatch.run) and callable(longbatch.plan) and callable(execute)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tree_runs_uninstalled(tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    program = "import longbatch, longbatch_kernels; print(longbatch.__file__); print(longbatch_kernels.__file__)"
    for arguments in (["-c", program], ["-m", "longbatch", "--version"]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=uninstalled_environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        if arguments[0] == "-c":
            assert done.stdout.split() == [str(folder / "__init__.py") for folder in SHIPPED.values()]
        else:
            assert done.stdout == f"longbatch {longbatch.__version__}\n"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "models").glob("*.toml")), ids=lambda path: path.stem)
def test_every_model_recipe_is_a_settings_file(path: Path) -> None:
    settings = resolve({}, config_file=path, environ={}, folder=Path("/nonexistent")).settings
    assert settings.model is not None


def test_recipes_parse() -> None:
    """Whatever kind of file a recipe is, its language's own parser takes it."""
    recipes = [path for path in (ROOT / "recipes").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert recipes
    for path in recipes:
        if path.suffix == ".toml":
            tomllib.loads(path.read_text())
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".py":
            ast.parse(path.read_text())
        elif path.suffix in {".sh", ".sbatch"}:
            subprocess.run(["bash", "-n", path], check=True)
        else:
            assert path.suffix in {".md", ".txt"}, f"{path}: no check for such a file"


def test_bench_results_have_the_documented_form() -> None:
    for path in (ROOT / "recipes" / "bench" / "results").glob("*.json"):
        report = json.loads(path.read_text())
        assert set(report) - {"complete"} == {"bench", "date", "commit", "hardware", "versions", "rows"}, path
        assert report.get("complete", True), path
        for row in report["rows"]:
            assert set(row) == {"case", "metric", "value", "unit", "against", "ratio", "checked"}, path
            assert row["checked"] is True, path


def test_ci_runs_the_readmes_test_command() -> None:
    assert "python -m pytest" in (ROOT / "README.md").read_text()
    script = (ROOT / ".ci" / "run").read_text()
    assert '"$python" -m pytest' in script.splitlines()[-1]
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)
