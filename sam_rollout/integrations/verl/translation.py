"""Translates our groups of settings into verl's and vLLM's settings."""

from omegaconf import DictConfig, OmegaConf, open_dict

from sam_rollout.config import RunConfig, SamConfig
from sam_rollout.integrations.verl.graphs import SIZES, capture_sizes
from sam_rollout.integrations.verl.model_drafter import with_first_head
from sam_rollout.integrations.verl.registered_names import ASYNC_TRAINERS
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.vllm.engine_settings import EngineSettings
from sam_rollout.telemetry.records import ASKED

ASKED_SAM = f"{ASKED}.sam"


def translate(config: DictConfig, run: RunConfig) -> None:
    """Fill verl's and vLLM's fields of a checked configuration, in place."""
    typed = read_run_config(config).sam.to_mapping()
    with open_dict(config):
        # A resumed run compares settings as the user typed them, because derived ones may change.
        OmegaConf.update(config, ASKED_SAM, typed, force_add=True)
        config.sam = run.sam.to_mapping()
        config.compare = run.compare.to_mapping()
        config.coupling = run.sampler.coupling
        _configure_engine(config, run)
        _configure_sampling(config, run)
        validation = config.actor_rollout_ref.rollout.val_kwargs
        if not validation.do_sample:  # verl 0.9.1's V1 trainer ignores this key
            validation.temperature, validation.top_p, validation.top_k = 0.0, 1.0, -1
    # References are resolved now, because Ray's processes lack our resolvers.
    OmegaConf.resolve(config)


def _configure_engine(config: DictConfig, run: RunConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    # All runs without drafts get the same settings, so that vLLM compiles the model only once.
    sam = with_first_head(config, run.sam) if run.sam.enabled else SamConfig(enabled=False)
    settings = EngineSettings(sam, run.sampler, run.telemetry.record_traces)
    arguments = settings.arguments()
    if run.sam.enabled and run.telemetry.proof.every:
        arguments["max_logprobs"] = -1  # no limit: the draft proof reads all log-probabilities
    rollout.engine_kwargs.vllm = OmegaConf.merge(rollout.engine_kwargs.vllm, arguments)
    if sizes := capture_sizes(config, run.sam):
        asked = sorted(rollout.cudagraph_capture_sizes)
        if sizes != asked:
            # The sizes that the user asked for are recorded, because comparisons of runs use them.
            OmegaConf.update(config, f"{ASKED}.{SIZES}", asked, force_add=True)
        OmegaConf.update(config, SIZES, sizes)


def _configure_sampling(config: DictConfig, run: RunConfig) -> None:
    filter_groups = config.algorithm.filter_groups
    filter_groups.enable = run.sampling.kind != "none"
    sampler = config.trainer.v1.sampler
    sampler.custom_sampler.path = "pkg://sam_rollout.integrations.verl.sampler"
    sampler.custom_sampler.name = "RoundsReplayBuffer"
    if config.trainer.v1.trainer_mode in ASYNC_TRAINERS:
        sampler.custom_sampler.name = "AsyncRefillReplayBuffer"
    elif run.sampling.kind == "refill":
        sampler.custom_sampler.name = "RefillReplayBuffer"
    sampler.sampler_kwargs = {
        "filter_metric": filter_groups.metric if filter_groups.enable else None,
        "train_batch_size": config.data.train_batch_size,
        "gen_batch_size": run.sampling.gen_batch_size,
        "max_rounds": run.sampling.max_rounds,
        "max_failed_share": run.sampling.max_failed_share,
        "max_inflight_gen_batches": filter_groups.max_inflight_gen_batches,
        "poll_interval_s": run.sampling.poll_interval_s,
    }
