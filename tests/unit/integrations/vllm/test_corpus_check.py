"""A corpus meets the model of an engine: the recipe's tiny one, whose tokenizer is at hand."""

from types import SimpleNamespace

import pytest

from recipes.dapo_qwen3.main import REPOSITORY
from sam_rollout.automaton.static_file import open_mapped
from sam_rollout.config import ConfigError, SamConfig, SourcesConfig
from sam_rollout.integrations.tokenizer import CorpusTokenizer, fingerprint
from sam_rollout.integrations.vllm.drafting.corpus_check import check_corpus_fits
from sam_rollout.integrations.vllm.drafting.proposer import SamProposer
from sam_rollout.integrations.vllm.settings import engine_arguments
from sam_rollout.sources.corpus import CorpusSourceConfig
from sam_rollout.sources.support.corpus_build import build_corpus

MODEL = REPOSITORY / "recipes" / "dapo_qwen3" / "tiny_qwen3"
TEXT = "Let us compute 12 + 34. The answer is 46."


@pytest.fixture(scope="module")
def tokenizer():
    return CorpusTokenizer(str(MODEL))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text(TEXT)
    build_corpus([folder / "a.txt"], folder / "a.sam", tokenizer=tokenizer)
    return folder / "a.sam"


def config(path, enabled=True):
    corpus = CorpusSourceConfig(enabled=enabled, path=str(path))
    return SamConfig(sources=SourcesConfig(corpus=corpus))


def model(vocabulary=10_000, tokenizer=MODEL):
    return SimpleNamespace(
        get_vocab_size=lambda: vocabulary, tokenizer=str(tokenizer), trust_remote_code=False
    )


def test_the_models_own_tokenizer_fits(corpus):
    check_corpus_fits(config(corpus), model())


def test_the_corpus_holds_what_the_model_would_write(corpus, tokenizer):
    text = open_mapped(corpus)[0].text
    assert text[:-2].tolist() == tokenizer.encode([TEXT])[0]


def test_another_vocabulary_is_refused(corpus, tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="the model knows 9: it was built for another model"):
        check_corpus_fits(config(corpus), model(vocabulary=9))
    other = SimpleNamespace(encode=tokenizer.encode, fingerprint="0" * 16)
    (tmp_path / "a.txt").write_text(TEXT)
    build_corpus([tmp_path / "a.txt"], tmp_path / "a.sam", tokenizer=other)
    with pytest.raises(ConfigError, match=r"another tokenizer \(0{16}\)"):
        check_corpus_fits(config(tmp_path / "a.sam"), model())


def test_a_model_without_tokenizer_is_checked_by_its_vocabulary(corpus, tmp_path, caplog):
    check_corpus_fits(config(corpus), model(tokenizer=tmp_path))
    assert "only the size of the vocabulary" in caplog.text
    with pytest.raises(ConfigError, match="the model knows 9"):
        check_corpus_fits(config(corpus), model(vocabulary=9, tokenizer=tmp_path))


def test_the_proposer_refuses_it_before_a_model_is_loaded(corpus):
    settings = config(corpus)
    engine = SimpleNamespace(
        additional_config=engine_arguments(settings)["additional_config"],
        speculative_config=SimpleNamespace(num_speculative_tokens=settings.max_draft_tokens),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=64, **vars(model(vocabulary=9))),
    )
    with pytest.raises(ConfigError, match=r"sam\.sources\.corpus\.path = .*the model knows 9"):
        SamProposer(engine)
    engine.model_config.get_vocab_size = model().get_vocab_size
    assert SamProposer(engine).describe()["sam"]["sources"]["corpus"]["enabled"]


def test_nothing_is_checked_without_a_corpus(tmp_path):
    check_corpus_fits(config(tmp_path / "nothing", enabled=False), None)


def test_the_fingerprint_is_that_of_the_vocabulary():
    one = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    same = SimpleNamespace(get_vocab=lambda: {"b": 1, "a": 0})
    other = SimpleNamespace(get_vocab=lambda: {"a": 1, "b": 0})
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
