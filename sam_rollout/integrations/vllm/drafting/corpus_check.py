"""Refuses a corpus that was made for another model, before the model is loaded."""

from __future__ import annotations

import logging
from typing import Any

from sam_rollout.config import SamConfig
from sam_rollout.integrations.tokenizer import CorpusTokenizer
from sam_rollout.sources.corpus import check_corpus, check_fit

logger = logging.getLogger(__name__)


def check_corpus_fits(config: SamConfig, model_config: Any) -> None:
    """Compare the configured corpus, if there is one, with the engine's model.

    Args:
        config: May or may not enable the corpus.
        model_config: vLLM's ``ModelConfig``.

    Raises:
        ConfigError: The file cannot be used, or another tokenizer made it.
    """
    sources: Any = config.sources  # made of the registry, so mypy cannot know its fields
    corpus = sources.corpus
    if not corpus.enabled:
        return
    info = check_corpus(corpus)
    check_fit(
        corpus,
        info,
        vocabulary=model_config.get_vocab_size(),
        tokenizer=_fingerprint_of(model_config) if info.tokenizer else "",
    )


def _fingerprint_of(model_config: Any) -> str:
    try:
        tokenizer = CorpusTokenizer(
            model_config.tokenizer, trust_remote_code=model_config.trust_remote_code
        )
    except Exception as error:  # a tokenizer's own code may raise anything
        logger.warning(
            "The model's tokenizer cannot be read, so only the size of the vocabulary of "
            "sam.sources.corpus was checked: %s",
            error,
        )
        return ""
    return tokenizer.fingerprint
