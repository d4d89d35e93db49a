"""The source `corpus`: built from every kind of input, refused if it does not fit, drafted from."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sam_rollout.automaton.static import SEPARATOR
from sam_rollout.automaton.static_file import open_mapped
from sam_rollout.config import ConfigError
from sam_rollout.sources import Limits
from sam_rollout.sources.corpus import CorpusSource, CorpusSourceConfig, check_corpus, check_fit
from sam_rollout.sources.support.corpus_build import CorpusInputError, build_corpus
from tests.unit.drafting.texts import draft_from, rows_of


class Words:
    """A tokenizer: a letter is its number in the alphabet."""

    fingerprint = "words"

    def encode(self, texts):
        return [[ord(letter) - ord("a") for letter in text if letter.isalpha()] for text in texts]


def documents_in(path):
    text = open_mapped(path)[0].text[:-1]
    return [part[:-1].tolist() for part in np.split(text, np.flatnonzero(text == SEPARATOR) + 1)][
        :-1
    ]


def write_inputs(folder):
    """The same two documents, `abc` and `dd`, in every format."""
    ids = [[0, 1, 2], [3, 3]]
    table = pa.table({"text": ["abc", "dd"], "ids": pa.array(ids, pa.list_(pa.int32()))})
    pq.write_table(table, folder / "a.parquet")
    traces = pa.table({"prompt_ids": [[0], [3]], "response_ids": [[1, 2], [3]]})
    pq.write_table(traces, folder / "traces.parquet")
    lines = [
        json.dumps({"text": "abc", "ids": [0, 1, 2]}),
        "",
        json.dumps({"text": "dd", "ids": [3, 3]}),
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "ids.jsonl").write_text("[0, 1, 2]\n[3, 3]\n[]\n")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.parquet", {"tokenizer": Words()}),
        ("a.parquet", {"field": "ids"}),
        ("traces.parquet", {}),
        ("a.jsonl", {"tokenizer": Words()}),
        ("a.jsonl", {"field": "ids"}),
        ("ids.jsonl", {}),
    ],
)
def test_every_input_gives_the_same_documents(tmp_path, name, options):
    write_inputs(tmp_path)
    output = tmp_path / "out" / "corpus.sam"
    info = build_corpus([tmp_path / name], output, **options)
    assert documents_in(output) == [[0, 1, 2], [3, 3]]
    assert (info.tokens, info.documents, info.vocabulary) == (7, 2, 4)
    assert info.tokenizer == ("words" if "tokenizer" in options else "")


def test_texts_and_arrays_of_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("abc\nabc\n")
    np.save(tmp_path / "b.npy", np.array([7, 8, 9], np.uint16))
    output = tmp_path / "corpus.sam"
    build_corpus([tmp_path / "a.txt", tmp_path / "b.npy"], output, tokenizer=Words())
    assert documents_in(output) == [[0, 1, 2, 0, 1, 2], [7, 8, 9]]


def test_a_long_text_is_read_in_pieces(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghi\n" * 20_000)
    output = tmp_path / "corpus.sam"
    info = build_corpus([tmp_path / "a.txt"], output, tokenizer=Words())
    assert info.documents == 4 and info.tokens == 180_004
    assert {tuple(document[:3]) for document in documents_in(output)} == {(0, 1, 2)}


def test_reading_ends_at_max_tokens(tmp_path):
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.full(100_000, ord(name)))
    seen = []
    output = tmp_path / "corpus.sam"
    info = build_corpus(
        [tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "missing.npy"],
        output,
        max_tokens=120_000,
        progress=lambda tokens, path: seen.append((tokens, path.name)),
    )
    assert info.tokens - info.documents == 120_000
    assert seen == [(65536, "a.npy"), (100_000, "a.npy"), (120_000, "b.npy")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "missing.jsonl: .*No such file"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1: expected .* 'text'"),
        ("a.jsonl", b'[1]\n{"text": \n', "line 2: expected"),
        ("a.jsonl", b"[1.5]\n", r"line 1: expected .*, not \[1.5\]"),
        ("a.jsonl", b"[7, -1]\n", r"line 1: expected .* in \[0, 2147483647\), not -1..7"),
        ("a.jsonl", b"[2147483647]\n", r"line 1: expected .* in \[0, 2147483647\), not 2147"),
        ("a.jsonl", b"[1e99999999, 1]\n", "line 1: expected"),
        ("a.jsonl", b"[99999999999999999999]\n", "line 1: expected"),
        ("a.jsonl", b"[[1], [2, 3]]\n", "line 1: expected"),
        ("a.jsonl", b'{"text": null}\n', "line 1: expected .*, not None"),
        ("a.jsonl", b'{"text": "half a \\ud83d"}\n', "line 1: .*surrogates not allowed"),
        ("a.jsonl", b'{"text": "abc"}\n', "needs a tokenizer"),
        ("a.txt", b"\xff\xfe\xfa", "a.txt: .*decode"),
        ("a.parquet", b"PAR1 not really", "a.parquet: "),
        ("a.npy", b"not really", "a.npy: "),
        ("a.npy", b"", "a.npy: "),
        ("a.npy", b"PK\x03\x04, as an .npz file begins", "a.npy: "),
        ("a.jsonl", b"[]\n", "no tokens in"),
    ],
)
def test_inputs_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusInputError, match=message):
        build_corpus([tmp_path / name], tmp_path / "corpus.sam")
    assert not (tmp_path / "corpus.sam").exists()


def test_an_output_that_cannot_be_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    source = tmp_path / "ids.jsonl"
    content = source.read_bytes()

    def refuse(output, error, message):
        seen = []
        with pytest.raises(error, match=message):
            build_corpus([source], output, progress=lambda *read: seen.append(read))
        assert not seen

    refuse(tmp_path, IsADirectoryError, "is a folder")
    refuse(source / "corpus.sam", FileExistsError, r"ids\.jsonl")
    refuse(tmp_path / ".." / tmp_path.name / "ids.jsonl", CorpusInputError, "is the output, too")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refuse(tmp_path / "corpus.sam", PermissionError, "no permission to write")
    assert source.read_bytes() == content


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    pq.write_table(pa.table({"text": ["abc"] * 100 + [None]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusInputError, match=r"a\.parquet: row 101: expected .*, not None"):
        build_corpus([tmp_path / "a.parquet"], tmp_path / "corpus.sam", tokenizer=Words())


def test_a_missing_column_is_named(tmp_path):
    write_inputs(tmp_path)
    with pytest.raises(CorpusInputError, match="no column 'body'; there are text, ids"):
        build_corpus([tmp_path / "a.parquet"], tmp_path / "corpus.sam", field="body")


@pytest.fixture
def config(tmp_path):
    write_inputs(tmp_path)
    output = tmp_path / "corpus.sam"
    build_corpus([tmp_path / "a.parquet"], output, tokenizer=Words())
    return CorpusSourceConfig(enabled=True, path=str(output))


def test_a_corpus_that_fits(config):
    info = check_corpus(config)
    check_fit(config, info, vocabulary=4, tokenizer="words")
    check_fit(config, info, vocabulary=999, tokenizer="")


def test_a_corpus_of_another_model(config):
    info = check_corpus(config)
    with pytest.raises(ConfigError, match=r"sam\.sources\.corpus\.path = .* up to 3, the model"):
        check_fit(config, info, vocabulary=3, tokenizer="words")
    with pytest.raises(ConfigError, match=r"another tokenizer \(words\) than the model's \(cafe\)"):
        check_fit(config, info, vocabulary=4, tokenizer="cafe")


def test_a_corpus_that_cannot_be_used(config, tmp_path):
    missing = CorpusSourceConfig(enabled=True, path=str(tmp_path / "nothing.sam"))
    with pytest.raises(ConfigError, match=r"corpus\.path = .*no such file; build one with"):
        check_corpus(missing)
    big = tmp_path / "big.sam"
    np.save(tmp_path / "big.npy", np.arange(100_000))
    build_corpus([tmp_path / "big.npy"], big)
    with pytest.raises(ConfigError, match=r"max_bytes = 1048576: must be at least \d+"):
        check_corpus(CorpusSourceConfig(enabled=True, path=str(big), max_bytes=1 << 20))
    big.write_bytes(big.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="its description says"):
        CorpusSource(CorpusSourceConfig(enabled=True, path=str(big)), Limits(4, 100))


def test_the_source_drafts_for_every_row(config):
    source = CorpusSource(config, Limits(4, 100))
    assert source.name == "corpus"
    source.bind(["a", "b"], [None, None])
    source.catch_up(*rows_of([[9, 0, 1], [3]]), np.ones(2, bool))
    assert draft_from(source, [[9, 0, 1], [3]]) == [(2, [2]), (1, [3, 3, 3])]
    # The same id again is a new request, whose old cursor must not count.
    source.finish(["a"])
    source.bind(["b", "a"], [None, None])
    assert [length for length, _ in draft_from(source, [[3], [9, 9, 9, 1]])] == [1, 1]
    assert source.levels()["corpus_bytes"] > 0
