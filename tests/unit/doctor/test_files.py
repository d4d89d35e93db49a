import json

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from sam_rollout.doctor import Question, files


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.parquet"
    pd.DataFrame({"prompt": ["1 + 1"] * 100}).to_parquet(path)
    return path


@pytest.fixture
def model(tmp_path):
    """A checkpoint of two files with an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    index = {}
    for name, tensors in (("a.safetensors", ["x", "y"]), ("b.safetensors", ["z"])):
        save_file({tensor: np.ones((4, 4), np.float32) for tensor in tensors}, folder / name)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def data_line(path):
    (line,) = files.check_data(Question("cpu", {"data": {"train_files": str(path)}}))
    return line


def model_line(path):
    config = {"actor_rollout_ref": {"model": {"path": str(path)}}}
    (line,) = files.check_model(Question("cpu", config))
    return line


def test_whole_files_are_right(data, model):
    assert data_line(data).status == "ok"
    assert model_line(model).found.endswith("qwen3, 2 weight file(s), 0 MiB")


def test_data_that_is_missing_cut_or_something_else(data):
    assert data_line(data.with_name("gone.parquet")).found.endswith("No such file or directory")
    data.write_bytes(data.read_bytes()[:-10])
    assert "is cut" in data_line(data).found
    data.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "no parquet file" in data_line(data).found
    data.write_bytes(b"")
    assert data_line(data).status == "fail"


def test_several_data_files_and_remote_ones(data):
    names = [str(data), "hdfs://cluster/train.parquet"]
    lines = files.check_data(Question("cpu", {"data": {"val_files": names}}))
    assert [line.status for line in lines] == ["ok", "skip"]


def cut(folder):
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0"


def lose_tensor(folder):
    save_file({"other": np.ones(1, np.float32)}, folder / "b.safetensors")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "b.safetensors").unlink(), "lacks b.safetensors (1 of 2)"),
        (cut, "its header says"),
        (lambda folder: (folder / "b.safetensors").write_text(LFS_POINTER), "git-lfs"),
        (lose_tensor, "z is in no file"),
        (lambda folder: (folder / "b.safetensors").write_bytes(b""), "no readable header"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "any file"),
    ],
)
def test_a_damaged_checkpoint_fails(model, damage, said):
    damage(model)
    line = model_line(model)
    assert line.status == "fail" and said in line.found


def test_a_folder_that_is_not_there(tmp_path):
    assert model_line(tmp_path / "gone").status == "fail"
    assert model_line("./gone").status == "fail"


def test_a_model_of_the_hub(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert model_line("Qwen/Qwen3-32B").status == "warn"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert model_line("Qwen/Qwen3-32B").status == "fail"
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-32B" / "snapshots" / "0"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    assert model_line("Qwen/Qwen3-32B").status == "ok"
