"""Imports run one way, and the packages that must start fast load no torch. By syntax trees, then by processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "longbatch"

# Top first. A module imports from rows below its own; names in one row do not import each other.
ORDER = (
    ("__init__", "__main__"),
    ("cli",),
    ("bench",),
    ("run", "doctor"),
    ("report",),
    ("engine",),
    ("plan",),
    ("prompt",),
    ("models",),
    ("attention",),
    ("cache", "distributed"),
    ("media", "manifest"),
    ("output",),
    ("config",),
    ("sparsity",),
    ("core",),
    ("device", "sandbox", "privacy", "timing"),
    ("errors", "folders"),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
HEAVY = {"torch", "transformers"}
# Packages, modules and folders that load neither torch nor transformers when they are imported.
TORCH_FREE = (
    "__init__",
    "cli",
    "report",
    "doctor",
    "plan",
    "prompt",
    "models/__init__",
    "models/spec",
    "models/registry",
    "models/families",
    "models/quantized",
    "models/matching",
    "models/adapter",
    "media",
    "manifest",
    "output",
    "config",
    "sparsity",
    "core",
    "device",
    "folders",
    "sandbox",
    "privacy",
    "errors",
)


def modules(below: Path) -> list[Path]:
    return sorted(path for path in below.rglob("*.py") if "__pycache__" not in path.parts)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def noun(path: Path) -> str:
    """The first name below longbatch/: the unit that the order speaks of."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module or member as a dotted name, with its line; relative ones made absolute."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def faults_of(source: str, path: Path) -> list[str]:
    own = noun(path)
    found = []
    for name, line in imports(ast.parse(source), path):
        parts = name.split(".")
        if parts[0] != "longbatch" or len(parts) < 2 or parts[1] not in RANK or parts[1] == own:
            continue
        if RANK[parts[1]] <= RANK[own]:
            found.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {parts[1]}")
    return found


def test_every_module_has_a_place_in_the_order() -> None:
    assert {noun(path) for path in modules(PACKAGE)} - set(RANK) == set()


def test_imports_run_one_way() -> None:
    faults = [fault for path in modules(PACKAGE) for fault in faults_of(path.read_text(), path)]
    assert faults == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("core.py", "from longbatch.config import Settings"),
        ("config/sources.py", "import longbatch.manifest.rows"),
        ("media/pool.py", "def f():\n    from longbatch import manifest"),
        ("output/parts.py", "from ..manifest import rows"),
        ("sandbox.py", "from . import device"),
        ("plan/cost.py", "import typing\nif typing.TYPE_CHECKING:\n    from longbatch.engine import Engine"),
    ],
)
def test_an_import_the_wrong_way_is_seen(where: str, source: str) -> None:
    assert len(faults_of(source, PACKAGE / where)) == 1


def test_kernels_import_nothing_from_longbatch() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules(ROOT / "kernels")
        for name, line in imports(ast.parse(path.read_text()), path)
        if name.split(".")[0] in {"longbatch", "kernels"}
    ]
    assert faults == []


def test_only_kernels_are_untyped() -> None:
    """The type checker is told to let untyped functions in longbatch_kernels pass, for those that Triton compiles."""
    untyped = []
    for path in modules(ROOT / "kernels"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(item) for item in node.decorator_list):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if node.returns is None or any(item.annotation is None for item in arguments if item.arg != "self"):
                untyped.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert untyped == []


def test_nothing_imports_the_folder_kernels() -> None:
    """`import kernels.x` would load a second copy of a module, and `kernels` is another project's name."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in [*modules(PACKAGE), *modules(ROOT / "tests")]
        for name, line in imports(ast.parse(path.read_text()), path)
        if name.split(".")[0] == "kernels"
    ]
    assert faults == []
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()


def torch_free_modules() -> list[str]:
    found: list[str] = []
    for entry in TORCH_FREE:
        path = PACKAGE / entry
        found += [dotted(item) for item in modules(path)] if path.is_dir() else [dotted(path.with_suffix(".py"))]
    return found


def test_torch_free_packages_load_no_torch() -> None:
    """In one fresh process: the first module that brings torch or transformers along is named."""
    names = torch_free_modules()
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
        "print(len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(names)
