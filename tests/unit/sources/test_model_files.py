"""Where the files of a model that drafts are."""

import pytest

from sam_rollout.config import ConfigError, SourcesConfig
from sam_rollout.sources import check_sources
from sam_rollout.sources.model import ModelSourceConfig


def section(path: str, method: str = "eagle3") -> ModelSourceConfig:
    return ModelSourceConfig(enabled=True, method=method, path=path)


def test_a_name_on_the_hub_is_left_to_the_engine():
    model = section("RedHatAI/Qwen3-32B-speculator.eagle3")
    assert model.folder is None and model.read_files_config() == {}


def test_a_method_without_files_has_no_folder():
    assert section("", "ngram").folder is None


def test_a_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    model = section(str(tmp_path))
    assert model.folder == tmp_path and model.read_files_config() == {"vocab_size": 7}


@pytest.mark.parametrize("path", ["/nowhere/head", "./owner/name", "../heads", "head", "a/b/c"])
def test_what_is_neither_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^sam\.sources\.model\.path = .*: no such folder"):
        check_sources(SourcesConfig(model=section(path)))


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"^sam\.sources\.model\.path = .*: must be a folder with"
    ):
        check_sources(SourcesConfig(model=section(str(tmp_path))))
