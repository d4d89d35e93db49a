import numpy as np
import pytest

from sam_rollout.config import GateConfig, SamConfig, SourcesConfig
from sam_rollout.core.limits import Limits
from sam_rollout.core.settings import ConfigError
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.sources import SOURCES, check_sources
from sam_rollout.sources.model import ModelSourceConfig
from tests.unit.drafting.texts import drive, rows_of

MAX_ROWS, MAX_LENGTH, VOCABULARY, K = 4, 64, 50, 4


def config_of(*names: str, **model) -> SamConfig:
    sections = {entry.name: {"enabled": entry.name in names} for entry in SOURCES}
    sections["model"] = {"enabled": True, "method": "ngram", "max_tokens": 3, **model}
    return SamConfig(
        max_draft_tokens=K,
        gate=GateConfig("threshold", MAX_ROWS),
        sources=SourcesConfig.from_mapping(sections),
    )


class Drafter(SamDrafter):
    def __init__(self, *names: str) -> None:
        super().__init__(config_of(*names), Limits(MAX_ROWS, MAX_LENGTH, VOCABULARY))

    def say(self, drafts: list[list[int]], chances: list[list[float]] | None = None) -> None:
        width = max(map(len, drafts))
        tokens = np.full((len(drafts), width), -1, np.int32)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = draft
        self.receive(tokens, None if chances is None else np.array(chances, np.float32))

    def drafts(self, *texts: list[int], name: str = "request") -> list[list[int]]:
        tokens, lengths = rows_of(texts, MAX_LENGTH)
        names = [f"{name} of row {row}" for row in range(len(texts))]
        return drive(self, names, tokens, lengths).to_lists()


def test_drafts_are_handed_on_for_the_step_they_were_made_for():
    drafter = Drafter()
    drafter.say([[5, 6, 7], [8], []])
    assert drafter.drafts([1], [2], [3]) == [[5, 6, 7], [8], []]
    assert drafter.drafts([1], [2], [3]) == [[], [], []], "a draft serves once"
    drafter.say([[5, 6]])
    assert drafter.drafts([1], [2]) == [[], []], "a draft of one row for two requests"
    assert drafter.counters()["draft/model_tokens"] == 6
    assert drafter.counters()["draft/model_steps"] == 2


def test_a_draft_ends_before_a_token_that_the_model_does_not_have(caplog):
    drafter = Drafter()
    largest = VOCABULARY - 1
    drafter.say([[5, largest, VOCABULARY], [2**31 - 1, 5], [largest]])
    assert drafter.drafts([1], [2], [3]) == [[5, largest], [], [largest]]
    drafter.say([[VOCABULARY], [6], []])
    assert drafter.drafts([1], [2], [3]) == [[], [6], []]
    assert drafter.counters()["draft/unknown_tokens"] == 3
    (warning,) = caplog.messages
    assert f"which has {VOCABULARY}, does not have" in warning
    assert (drafter.batch.tokens < VOCABULARY).all(), "what fills steps up may copy any of them"


def test_a_text_goes_on_where_the_model_ends():
    drafter = Drafter("own")
    drafter.say([[2, 3]])
    assert drafter.drafts([1, 2, 3, 4, 9, 1]) == [[2, 3, 4, 9]]


@pytest.mark.parametrize(("right", "token"), [("model", 40), ("text", 1)])
def test_whoever_was_right_decides(right, token):
    drafter, text, chosen = Drafter("own"), [1, 2] * 4, []
    for turn in range(30):
        drafter.say([[40]], [[0.9]])
        (draft,) = drafter.drafts(text, name=f"request {turn}")
        chosen.append(draft[0])
        drafter.drafts([*text, token], name=f"request {turn}")  # what the policy sampled
        drafter.finish([f"request {turn} of row 0"])
    assert set(chosen[-10:]) == {token}


def test_texts_that_fail_together_do_not_outvote_a_model_that_is_right_more_often():
    drafter, text, chosen = Drafter("own"), [1, 2, 3] * 4, []
    for turn in range(100):
        drafter.say([[40]], [[0.6]])
        (draft,) = drafter.drafts(text, name=f"request {turn}")
        chosen.append(draft[0])
        drafter.drafts([*text, 1 if turn % 5 < 2 else 40], name=f"request {turn}")
        drafter.finish([f"request {turn} of row 0"])
    assert set(chosen[-50:]) == {40}


@pytest.mark.parametrize(
    ("settings", "field", "allowed"),
    [
        ({"method": "eagle3"}, "path", "must name the folder"),
        ({"method": "ngram", "path": "somewhere"}, "path", "must be empty"),
        ({"method": "eagle4", "path": "x"}, "method", "must be one of 'eagle3'"),
        ({"max_tokens": 0}, "max_tokens", "1..32"),
    ],
)
def test_wrong_settings_are_refused(settings, field, allowed):
    with pytest.raises(ConfigError, match=allowed) as raised:
        ModelSourceConfig(enabled=True, **settings)
    assert raised.value.field == f"sam.sources.model.{field}"


def test_a_model_drafts_no_more_than_a_step_verifies():
    with pytest.raises(ConfigError, match=r"max_tokens = 5: must be at most .* = 4"):
        config_of(max_tokens=5)


def section(path: object, method: str = "eagle3") -> ModelSourceConfig:
    return ModelSourceConfig(enabled=True, method=method, path=str(path))


def test_a_folder_is_read_and_a_name_on_the_hub_is_left_to_the_engine(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    model = section(tmp_path)
    assert model.folder == tmp_path and model.read_files_config() == {"vocab_size": 7}
    for model in (section("RedHatAI/Qwen3-32B-speculator.eagle3"), section("", "ngram")):
        assert model.folder is None and model.read_files_config() == {}


@pytest.mark.parametrize(
    ("path", "content", "allowed"),
    [
        *((path, None, "no such folder") for path in ("/nowhere/head", "./a/b", "head", "a/b/c")),
        *((".", content, "must be a folder with") for content in (None, "{", "[1]")),
    ],
)
def test_what_is_neither_is_refused(path, content, allowed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"^sam\.sources\.model\.path = .*: {allowed}"):
        check_sources(SourcesConfig(model=section(path)))
