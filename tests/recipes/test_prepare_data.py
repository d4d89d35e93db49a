import socket

import datasets
import pandas as pd

from recipes.dapo_qwen3.prepare_data import main, prepare

COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def _rows(path):
    return pd.read_parquet(path).to_dict("records")


def _question(row):
    return row["prompt"][0]["content"]


def _dapo_records():
    def record(text, truth, index):
        return {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": text}],
            "ability": "MATH",
            "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": index},
        }

    return [record("one?", "1", "a"), record("two?", "2", "b"), record("one?", "1", "c")] * 3


def test_the_synthetic_set_has_verls_columns_and_disjoint_splits(tmp_path):
    assert main(["synthetic", "--output-dir", str(tmp_path)]) == 0
    train, test = _rows(tmp_path / "train.parquet"), _rows(tmp_path / "test.parquet")
    assert list(train[0]) == COLUMNS
    assert (len(train), len(test)) == (2048, 256)
    questions = {_question(row) for row in train}
    assert len(questions) == len(train)
    assert not questions & {_question(row) for row in test}
    row = test[5]
    assert row["data_source"] == "synthetic_math"
    assert row["reward_model"]["style"] == "rule"
    assert row["reward_model"]["ground_truth"].isdigit()
    assert (row["extra_info"]["split"], row["extra_info"]["index"]) == ("test", 5)


def test_repeated_prompts_are_dropped_and_counted(tmp_path, capsys):
    source = tmp_path / "dapo-math-17k.parquet"
    datasets.Dataset.from_list(_dapo_records()).to_parquet(source)
    arguments = ["dapo_math_17k", "--output-dir", str(tmp_path / "out"), "--source", str(source)]
    assert main(arguments) == 0
    rows = _rows(tmp_path / "out" / "train.parquet")
    assert [_question(row) for row in rows] == ["one?", "two?"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1", "2"]
    assert {row["data_source"] for row in rows} == {"dapo_math_17k"}
    assert "dropped 7 repeated prompts of 9, kept 2" in capsys.readouterr().out


def test_gsm8k_takes_the_number_after_the_mark_from_both_splits(tmp_path):
    for config in ("main", "socratic"):
        for split in ("train", "test"):
            record = {"question": f"{config} {split}?", "answer": "2+2=4\n#### 1,004"}
            target = tmp_path / "gsm8k" / config / f"{split}-00000-of-00001.parquet"
            datasets.Dataset.from_list([record]).to_parquet(target)
    train, test = prepare("gsm8k", tmp_path / "out", source=tmp_path / "gsm8k")
    (row,) = _rows(train)
    assert _question(row).startswith("main train?")
    assert "\\boxed{}" in _question(row)
    assert row["reward_model"]["ground_truth"] == "1004"
    assert _question(_rows(test)[0]).startswith("main test?")


def test_math_500_reads_json_lines(tmp_path):
    record = {"problem": "p", "solution": "s", "answer": "\\frac{1}{2}"}
    record |= {"subject": "Algebra", "level": 2, "unique_id": "test/1.json"}
    pd.DataFrame([record]).to_json(tmp_path / "test.jsonl", orient="records", lines=True)
    (path,) = prepare("math_500", tmp_path / "out", source=tmp_path / "test.jsonl")
    (row,) = _rows(path)
    assert row["reward_model"]["ground_truth"] == "\\frac{1}{2}"
    assert row["extra_info"]["subject"] == "Algebra"


def test_finished_files_are_kept_unless_forced(tmp_path, capsys):
    (path, _) = prepare("synthetic", tmp_path, limit=3)
    before = path.stat().st_mtime_ns
    prepare("synthetic", tmp_path, limit=5)
    assert path.stat().st_mtime_ns == before
    assert "--force" in capsys.readouterr().out
    prepare("synthetic", tmp_path, limit=5, force=True)
    assert len(_rows(path)) == 5
    assert {p.suffix for p in tmp_path.iterdir()} == {".parquet"}


def test_without_network_one_message_says_what_to_do(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert main(["gsm8k", "--output-dir", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "hf download openai/gsm8k" in message
    assert "--source" in message
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_missing_or_foreign_is_named(tmp_path, capsys):
    out = ["--output-dir", str(tmp_path / "out"), "--source"]
    assert main(["math_500", *out, str(tmp_path / "absent")]) == 1
    assert "does not exist" in capsys.readouterr().err
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"text": "no columns of ours"}\n')
    assert main(["math_500", *out, str(foreign)]) == 1
    assert "the columns ['text'] are not those of HuggingFaceH4/MATH-500" in capsys.readouterr().err
