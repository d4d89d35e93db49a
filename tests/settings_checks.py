"""Checks settings, but not data and models, which are not on every machine."""

from omegaconf import DictConfig

from sam_rollout.config import RunConfig
from sam_rollout.integrations.verl import checks


def check(config: DictConfig) -> RunConfig:
    return checks.check(config, checks.SETTINGS)
