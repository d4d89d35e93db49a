import json

import pandas as pd
import pytest

from sam_rollout.config import ConfigError
from sam_rollout.integrations.verl.check_results import NotHereError
from sam_rollout.integrations.verl.data_checks import check_data
from tests.unit.integrations.verl.test_checks import composed

BATCH = 6  # data.train_batch_size of the tiny experiment


def rows(count, question="1 + 1 = ?", **changed):
    row = {
        "data_source": "synthetic_math",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    return pd.DataFrame([row | changed] * count)


@pytest.fixture
def checked(tmp_path):
    def run(train, *overrides, val=None):
        paths = []
        for name, table in (("train", train), ("val", rows(1) if val is None else val)):
            paths.append(table)
            if isinstance(table, pd.DataFrame):
                paths[-1] = tmp_path / f"{name}.parquet"
                table.to_parquet(paths[-1])
        files = [f"data.train_files={paths[0]}", f"data.val_files={paths[1]}"]
        return list(check_data(composed(*files, *overrides)))

    return run


def refused(checked, *arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_enough_rows_pass(checked, tmp_path):
    facts = checked(rows(BATCH))
    assert [fact.text for fact in facts] == [
        f"data.train_files: {tmp_path}/train.parquet",
        f"data.val_files: {tmp_path}/val.parquet",
    ]


FILTERED = "data.filter_overlong_prompts=true"
LONG = pd.concat([rows(4), rows(9, "1 + " * 200)], ignore_index=True)
OWN = rows(BATCH).rename(columns={"prompt": "question"})


@pytest.mark.parametrize(
    ("train", "overrides", "said"),
    [
        (rows(4), [], "has 4 rows, data.train_batch_size = 6"),
        (rows(9), ["data.train_max_samples=5"], "has 5 rows"),
        (rows(20), [FILTERED, "data.max_prompt_length=8"], "has 0 of 20 rows"),
        (LONG, [FILTERED], "has 4 of 13 rows"),
        (rows(BATCH, prompt="1 + 1 = ?"), [], "column 'prompt' must hold a list of messages"),
        (rows(BATCH, reward_model={"style": "rule"}), [], "reward_model.ground_truth"),
        (rows(BATCH, reward_model="2"), [], "reward_model.ground_truth"),
        (rows(BATCH).drop(columns="data_source"), [], "data_source"),
        (OWN, [], "data.prompt_key = 'prompt'"),
    ],
)
def test_training_files_that_hold_too_little(checked, train, overrides, said):
    assert said in refused(checked, train, *overrides)


@pytest.mark.parametrize(
    ("train", "overrides"),
    [
        (rows(9), ["data.train_max_samples=6"]),
        (rows(20), [FILTERED]),
        (OWN, ["data.prompt_key=question"]),
        (rows(BATCH).drop(columns="data_source"), ["reward.reward_manager.source=importlib"]),
        (
            rows(BATCH, reward_model={"style": "model"}),
            ["reward.reward_model.enable=true", "reward.custom_reward_function.path=null"],
        ),
    ],
)
def test_training_files_that_hold_enough(checked, train, overrides):
    checked(train, *overrides, val=train)


def test_validation_files_need_a_row(checked):
    assert refused(checked, rows(BATCH), val=rows(0)).startswith("data.val_files = ")
    for value in ("null", "3", "[]", "[null]"):
        assert refused(checked, rows(BATCH), f"data.val_files={value}").startswith("data.val_files")


def test_a_tokenizer_that_cannot_be_loaded_is_left_to_verl(checked, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_kind"}')
    checked(rows(BATCH), FILTERED, f"actor_rollout_ref.model.path={tmp_path}")


def test_files_that_are_missing_cut_or_something_else(checked, tmp_path):
    with pytest.raises(NotHereError, match="no such file"):
        checked(tmp_path / "gone.parquet")
    path = tmp_path / "data.parquet"
    rows(100).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-10])
    assert "cannot be read" in refused(checked, path)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "cannot be read" in refused(checked, path)
    (tmp_path / "data.csv").touch()
    assert "verl reads files that end in .parquet" in refused(checked, tmp_path / "data.csv")


def test_lines_of_json_and_several_files(checked, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(3).to_dict("records")))
    assert "has 3 rows" in refused(checked, path)
    checked(f"[{path},{path}]")


def test_files_elsewhere_and_data_sets_of_the_users_own_are_not_read(checked):
    facts = checked("hdfs://cluster/train.parquet")
    assert facts[0].text.endswith("not read here")
    checked("/nowhere.parquet", "data.custom_cls.path=mine.py")
