"""The static sources that a configuration asks for."""

from sam_rollout.config import SamConfig
from sam_rollout.drafting.corpus import CorpusSource
from sam_rollout.drafting.history import HistorySource
from sam_rollout.drafting.sources import StaticSource


def make_static_sources(config: SamConfig, max_rows: int, max_model_len: int) -> list[StaticSource]:
    """Make the enabled ones, in order of precedence: history before corpus.

    Args:
        config: validated.
        max_rows: most requests in one batch (the engine's max_num_seqs).
        max_model_len: longest text the engine holds, in tokens.

    Raises:
        ConfigError: a path is not set, or the corpus cannot be drafted from.
    """
    sources: list[StaticSource] = []
    if config.sources.history.enabled:
        sources.append(HistorySource(config.sources.history, max_rows, max_model_len))
    if config.sources.corpus.enabled:
        sources.append(CorpusSource(config.sources.corpus, max_rows))
    return sources
