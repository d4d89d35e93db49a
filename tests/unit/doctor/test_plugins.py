from importlib.metadata import EntryPoint

import pytest

from sam_rollout.doctor import Question, plugins


def declare(monkeypatch, points):
    found = {group: [EntryPoint(*point, group) for point in ps] for group, ps in points.items()}
    monkeypatch.setattr(plugins, "entry_points", lambda group: found.get(group, []))


def test_here_both_are_visible(question, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    lines = [*plugins.check_entry_points(question), *plugins.check_filters(question)]
    assert [line.status for line in lines] == ["ok"] * 3


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "no entry point sam_rollout"),
        ([("sam_rollout", "sam_rollout.gone:register")], "does not exist"),
        ([("sam_rollout", "nowhere.at.all:register")], "does not exist"),
        ([("sam_rollout", "sam_rollout:a"), ("sam_rollout", "sam_rollout:b")], "several"),
    ],
)
def test_a_plugin_that_is_not_there_fails(monkeypatch, question, about, points, said):
    declare(monkeypatch, {"vllm.general_plugins": points})
    line = about(plugins.check_entry_points(question), "vllm.general_plugins")
    assert line.status == "fail" and said in line.found


def test_npus_need_their_platform_plugin(monkeypatch, about):
    ours = [("sam_rollout", "sam_rollout.cli:app")]
    declare(monkeypatch, {"vllm.general_plugins": ours, "vllm.platform_plugins": []})
    question = Question("ascend_910c")
    line = about(plugins.check_entry_points(question), "vllm.platform_plugins")
    assert line.status == "fail"
    declare(monkeypatch, {"vllm.platform_plugins": [("ascend", "vllm_ascend:register")]})
    line = about(plugins.check_entry_points(question), "vllm.platform_plugins")
    assert line.status == "ok"


@pytest.mark.parametrize(
    ("allowed", "device", "status"),
    [
        ("", "cpu", "fail"),  # vLLM loads none then
        ("other", "cpu", "fail"),
        ("other,sam_rollout", "cpu", "ok"),
        ("sam_rollout", "ascend_910c", "fail"),
        ("sam_rollout,ascend", "ascend_910c", "ok"),
    ],
)
def test_a_list_of_plugins_must_name_ours(monkeypatch, about, allowed, device, status):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert about(plugins.check_filters(Question(device)), "VLLM_PLUGINS").status == status


def test_verl_may_be_told_not_to_look(monkeypatch, question, about):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert about(plugins.check_filters(question), "VERL_USE_EXTERNAL_PLUGINS").status == "warn"
