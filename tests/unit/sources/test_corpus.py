import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sam_rollout.config import SourcesConfig
from sam_rollout.core.limits import UNKNOWN_VOCABULARY
from sam_rollout.core.settings import ConfigError
from sam_rollout.sources import check_sources
from sam_rollout.sources.run import RunSourceConfig, check_corpus
from tests.unit.drafting.texts import counter, drafter_of, enter, identity, step
from tests.unit.sources.test_run import continued, ended, make_drafter

TEXT = np.random.default_rng(0).permutation(1000).tolist()


def write_lines(path, *texts):
    path.write_text("\n".join(json.dumps(text) for text in texts) + "\n\n")
    return str(path)


def write_traces(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts, responses = [text[:2] for text in texts], [text[2:] for text in texts]
    pq.write_table(pa.table({"prompt_ids": prompts, "response_ids": responses}), path)


def read(path, max_bytes=1 << 30, vocab_size=UNKNOWN_VOCABULARY):
    config = RunSourceConfig(corpus=str(path), max_bytes=max_bytes)
    return [text.tolist() for text in check_corpus(config, vocab_size)]


def test_lines_of_ids_and_traces_of_a_run_are_read(tmp_path):
    assert read(write_lines(tmp_path / "a.jsonl", [1, 2, 3], [4])) == [[1, 2, 3], [4]]
    write_traces(tmp_path / "run/sam/traces/0-000.parquet", [1, 2, 3], [4, 5, 6])
    write_traces(tmp_path / "run/sam/traces/1-000.parquet", [7, 8, 9])
    found = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert read(tmp_path / "run") == read(tmp_path / "run/sam/traces") == found
    assert read(tmp_path / "run/sam/traces/1-000.parquet") == found[2:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]\n[3, -1]", "line 2: token ids must be a list of"),
        ('["a"]', "line 1: token ids must be a list of"),
        ("[1, 2", "line 1: expected"),
        ("[2147483648]", "line 1: token ids must be a list of"),
        ('{"text": [1]}', "line 1: expected"),
        ("[]", "holds no tokens"),
        ("[1, 2, 512]", "token ids from 1 to 512; the model has 512"),
        (json.dumps([1] * 6554), "holds more than the 6553 tokens that fit"),
        ("[1]\n" * 13, "each text rounded up to a multiple of 512"),
    ],
)
def test_what_cannot_be_drafted_from_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        read(tmp_path / "a.jsonl", 1 << 20, 512)
    assert refused.value.field == "sam.sources.run.corpus" and "\n" not in str(refused.value)


def test_a_file_without_traces_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt_ids": [[1]]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="the columns prompt_ids and response_ids"):
        read(tmp_path / "a.parquet")


def test_the_most_tokens_follow_from_the_memory(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [1] * 6145)
    with pytest.raises(ConfigError, match=r"run\.corpus = .*: holds more than the 6553 tokens"):
        check_corpus(RunSourceConfig(corpus=path, max_bytes=1 << 20), UNKNOWN_VOCABULARY)
    assert check_corpus(RunSourceConfig(corpus=path), UNKNOWN_VOCABULARY)
    short = write_lines(tmp_path / "b.jsonl", *[[1, 2]] * (6 * 1024 + 1))
    with pytest.raises(ConfigError, match="holds more than the 3145728 tokens"):
        check_corpus(RunSourceConfig(corpus=short), UNKNOWN_VOCABULARY)
    assert RunSourceConfig().most_tokens_of_successor == 3 << 20
    with pytest.raises(ConfigError, match="the model has 1"):
        check_sources(SourcesConfig(run=RunSourceConfig(corpus=path)), 1)


def test_a_run_drafts_from_it_until_it_has_written_enough_itself(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXT)
    drafter = make_drafter(corpus=path, max_bytes=1 << 20)
    enter(drafter, "a", identity("a"), [7000, 7001])
    drafter.wait()
    step(drafter, {"a": [7000, 7001]})
    assert continued(drafter, "b", TEXT[500:504]) == TEXT[504:507]
    assert counter(drafter, "run_seeded_tokens") == 1000
    drafter.finish(["a"])
    rng = np.random.default_rng(1)
    for number in range(40):
        ended(drafter, f"r{number}", (rng.permutation(1000) + 2000).tolist())
    assert continued(drafter, "c", TEXT[500:504]) == []
    assert counter(drafter, "run_evictions") == counter(drafter, "run_failures") == 0


def test_a_corpus_switches_the_source_on_outside_a_run(tmp_path):
    drafter = drafter_of("own", run={"corpus": write_lines(tmp_path / "a.jsonl", TEXT)})
    assert "run" in [source.name for source in drafter.sources]
