import re

import pytest

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl import code_checks
from tests.settings_checks import check as check_settings
from tests.unit.integrations.verl.test_checks import composed

REWARD = "reward.custom_reward_function"
GOOD = "def compute_score(data_source, solution_str, ground_truth, **kwargs):\n    return 1.0\n"


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a reward module and returns a configuration that uses it."""

    def write(text, *overrides):
        (tmp_path / "mine.py").write_text(text)
        return composed(f"{REWARD}.path={tmp_path}/mine.py", *overrides)

    return write


def check(config):
    return list(code_checks.check_reward(config, check_settings(config)))


def refused(config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_recipes_reward_and_ones_own_load(written, tmp_path):
    (fact,) = check(composed())
    assert fact.text.endswith("recipes/dapo_qwen3/reward.py; manager dapo")
    (fact,) = check(written(GOOD))
    assert fact.text == f"compute_score of {tmp_path}/mine.py; manager dapo"
    check(composed(f"{REWARD}.path=null"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package\n", "path = .*ModuleNotFoundError: No module named"),
        ("def compute_score(:\n", "path = .*SyntaxError"),
        ("raise ValueError('no key')\n", "path = .*ValueError: no key"),
        ("import sys; sys.exit('ended')\n", "path = .*ended"),
        ("print('done'); raise SystemExit\n", "path = .*it ended with status 0"),
        ("def score(): pass\ndel compute_score\n", "name = 'compute_score': .*score"),
    ],
)
def test_a_module_that_cannot_be_loaded(written, text, said):
    assert re.match(rf"{REWARD}\.{said}", refused(written(GOOD + text)))
    assert refused(composed(f"{REWARD}.path=/nope.py")).startswith(f"{REWARD}.path = '/nope.py'")


def test_a_module_that_hangs_is_refused(written, monkeypatch):
    monkeypatch.setattr(code_checks, "LIMIT_S", 0.5)
    said = refused(written("import time; time.sleep(30)\n" + GOOD))
    assert said.endswith("took more than 0.5 s to load")


def test_a_module_finds_the_runs_variables_and_may_speak_at_exit(written):
    text = "import atexit, os\natexit.register(print, 'bye')\nos.environ['A'], os.environ['B']\n"
    runtime = "ray_kwargs.ray_init.runtime_env"
    check(written(text + GOOD, "+environment.A=1", f"+{runtime}.env_vars.B=x"))
    assert "cannot be loaded: KeyError: 'A'" in refused(written(text + GOOD))


def test_a_metric_that_the_reward_does_not_give(written):
    metric = "algorithm.filter_groups.metric"
    said = refused(composed(f"{metric}=seq_final_reward"))
    assert said.startswith(f"{metric} = 'seq_final_reward': ") and "gives acc, score" in said
    check(composed(f"{metric}=reward"))
    check(composed(f"{metric}=score"))
    check(composed(f"{metric}=seq_final_reward", "dynamic_sampling=none",
                   "dynamic_sampling.gen_batch_size=6"))  # fmt: skip
    check(written(GOOD, f"{metric}=anything"))  # without FIGURES, any name is accepted
    assert "gives one" in refused(written('FIGURES = ("one",)\n' + GOOD, f"{metric}=two"))


def test_a_manager_that_is_not_there(written):
    manager = "reward.reward_manager"
    assert f"{manager}.name = 'dappo': must be one of" in refused(composed(f"{manager}.name=dappo"))
    own = (f"{manager}.source=importlib", f"{manager}.module.path=/nope.py", f"{manager}.name=Mine")
    with pytest.raises(ConfigError, match="no such file"):
        check(composed(*own))
    assert "must name the file" in refused(composed(own[0], own[2]))


AGENT = "actor_rollout_ref.rollout.agent"


def loops(*overrides):
    return list(code_checks.check_agent_loops(composed(*overrides)))


def test_an_agent_loop_of_no_such_name():
    (fact,) = loops()
    assert fact.text == "single_turn_agent"
    with pytest.raises(ConfigError, match=rf"^{AGENT}\.default_agent_loop = 'mine': must be one"):
        loops(f"{AGENT}.default_agent_loop=mine")


def test_a_file_of_tools_that_is_missing():
    field = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    with pytest.raises(ConfigError, match=rf"^{field} = '/nope\.yaml': there is no such file"):
        loops(f"{field}=/nope.yaml")


def test_a_file_of_agent_loops_that_is_missing_or_something_else(tmp_path):
    field = f"{AGENT}.agent_loop_config_path"
    with pytest.raises(ConfigError, match=rf"^{field} = '/nope\.yaml'"):
        loops(f"{field}=/nope.yaml")
    (tmp_path / "loops.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match="must be a YAML list of entries with name and _target_"):
        loops(f"{field}={tmp_path}/loops.yaml")


def test_an_agent_loop_class_that_cannot_be_loaded(tmp_path, monkeypatch):
    field, file = f"{AGENT}.agent_loop_config_path", tmp_path / "loops.yaml"
    (tmp_path / "my_loops.py").write_text("class MyLoop:\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file.write_text("- name: mine\n  _target_: my_loops.MyLoop\n")
    (fact,) = loops(f"{field}={file}", f"{AGENT}.default_agent_loop=mine")
    assert fact.text == "mine"
    for target, shown in (("my_loops.OtherLoop", "OtherLoop"), ("gone.Loop", "gone")):
        file.write_text(f"- name: mine\n  _target_: {target}\n")
        with pytest.raises(ConfigError, match=re.escape(f"{field}[mine] = {shown!r}: ")):
            loops(f"{field}={file}")
