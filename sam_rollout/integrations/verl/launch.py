"""From a composed configuration to verl's trainer.

Users write our groups (``sam``, ``rollout_sampler``, ``dynamic_sampling``,
``rollout_telemetry``); verl and vLLM read theirs. The translation happens here and nowhere else,
after everything was checked, so that a typo ends the run within a second and not after the model is
loaded.
"""

from __future__ import annotations

import dataclasses
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from sam_rollout.config import (
    CompareConfig,
    ConfigError,
    DynamicSamplingConfig,
    RolloutSamplerConfig,
    RolloutTelemetryConfig,
    SamConfig,
    check_engine_limits,
)
from sam_rollout.integrations.verl.cluster import check_cluster, rollout_layout
from sam_rollout.integrations.verl.graphs import SIZES, capture_sizes
from sam_rollout.integrations.verl.loggers import check_wandb
from sam_rollout.integrations.verl.names import (
    ROLLOUT_NAME,
    ROUTER_SETTINGS,
    SAMPLER_MODULE,
    TRAINER_NAME,
)
from sam_rollout.integrations.verl.resume import check_resume
from sam_rollout.integrations.vllm.settings import (
    ADDITIONAL_CONFIG_KEY,
    MODEL_RUNNER_ENV,
    engine_arguments,
)
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.control import ControlAssignment
from sam_rollout.telemetry.records import ASKED, RunFolderError

EXTERNAL_MODULES_ENV = "VERL_USE_EXTERNAL_MODULES"
PLUGIN_MODULE = "sam_rollout.integrations.verl.plugin"
# What Ray is told when it starts, and refuses to be told by a program that joins it.
CLUSTER_ARGUMENTS = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
# Ray's own name for a resource that its head node alone has.
HEAD_RESOURCE = "node:__internal_head__"
SAMPLER_CLASSES = {
    "rounds": "RoundsReplayBuffer",
    "refill": "RefillReplayBuffer",
    # Without a filter a round is a training batch: one code path measures all three.
    "none": "RoundsReplayBuffer",
}


class VerlRefusal(ValueError):
    """verl's own checks refuse the configuration; the text is verl's."""


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True)


def check(config: DictConfig) -> None:
    """Check every setting of ours, and those of verl that ours depend on.

    Raises:
        ConfigError: Names the field, its value and what is allowed.
    """
    sam = SamConfig.from_mapping(_plain(config.sam))
    if sam.enabled and sam.sources.corpus.enabled:
        from sam_rollout.sources.corpus import check_corpus

        check_corpus(sam.sources.corpus)
    RolloutSamplerConfig.from_mapping(_plain(config.rollout_sampler))
    telemetry = RolloutTelemetryConfig.from_mapping(_plain(config.rollout_telemetry))
    _check_verl(config)
    rollout = config.actor_rollout_ref.rollout
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if not isinstance(rollout[name], int):
            raise ConfigError(
                f"actor_rollout_ref.rollout.{name}", rollout[name], "must be set to an integer"
            )
    for note in _check_engine_limits(sam, config):
        print(f"Note: {note}", flush=True)
    sampling = DynamicSamplingConfig.from_mapping(_plain(config.dynamic_sampling))
    if sampling.kind == "none" and sampling.gen_batch_size != config.data.train_batch_size:
        raise ConfigError(
            "dynamic_sampling.gen_batch_size",
            sampling.gen_batch_size,
            f"must equal data.train_batch_size ({config.data.train_batch_size}) without filtering",
        )
    for note in environment_notes(config):
        print(f"Note: {note}", flush=True)
    check_cluster(config)
    telemetry.check_control(rollout_layout(config).replicas, refills=sampling.kind == "refill")
    never_drafts = not sam.enabled or not sam.gate.most_drafting(rollout.max_num_seqs)
    if telemetry.control_share and never_drafts:
        print(
            "Note: rollout_telemetry.control_share: there is no control without drafts", flush=True
        )
    _check_baseline(config)
    placed = deepcopy(config)
    _place_sources(placed)
    check_resume(placed)
    check_wandb(config.trainer.logger)


def _check_baseline(config: DictConfig) -> None:
    """Read the baseline that the run is to be compared with, and say where it is another run."""
    path = CompareConfig.from_mapping(_plain(config.compare)).baseline_run
    if not path:
        return
    try:
        baseline = Baseline(path)
    except (RunFolderError, OSError) as error:
        raise ConfigError(
            "compare.baseline_run", path, f"must be the folder of a finished run ({error})"
        ) from error
    if differences := list(baseline.differences(_plain(config))):
        print(
            f"Note: compare.baseline_run={path} is not the same training but for the drafts: "
            + "; ".join(differences),
            flush=True,
        )


def _check_engine_limits(sam: SamConfig, config: DictConfig) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    try:
        return check_engine_limits(
            sam,
            max_model_len=rollout.max_model_len,
            max_prompt=config.data.max_prompt_length,
            max_response=config.data.max_response_length,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
        )
    except ConfigError as error:
        if error.field != "max_model_len":
            raise
        # Under the name its user types.
        field = f"actor_rollout_ref.rollout.{error.field}"
        raise ConfigError(field, error.value, error.allowed) from None


def _check_verl(config: DictConfig) -> None:
    """Check what verl would accept but our parts cannot serve."""
    rollout = config.actor_rollout_ref.rollout
    engine_kwargs = rollout.engine_kwargs.vllm
    required = [
        # field, its value, what we need, why
        ("trainer.use_v1", config.trainer.use_v1, True, "the legacy trainer is not supported"),
        (
            "trainer.v1.trainer_mode",
            config.trainer.v1.trainer_mode,
            TRAINER_NAME,
            "only rollouts of the synchronous trainer are recorded",
        ),
        (
            "actor_rollout_ref.rollout.name",
            rollout.name,
            ROLLOUT_NAME,
            "for the baseline too: sam=off switches drafting off, not the measuring",
        ),
        (
            "actor_rollout_ref.rollout.disable_log_stats",
            rollout.disable_log_stats,
            False,
            "otherwise the engine reports nothing to record",
        ),
        ("skip.rollout_tq.enable", config.skip.rollout_tq.enable, False, "not supported"),
    ]
    if _routes_siblings(config):
        why = "sam.sources.siblings.routing = 'grouped' chooses the server"
        required += [
            (f"actor_rollout_ref.rollout.{name}", rollout[name], needed, why)
            for name, needed in (("router_config_path", None), ("full_determinism", False))
        ]
    for field, value, needed, reason in required:
        if value != needed:
            raise ConfigError(field, value, f"must be {needed!r} ({reason})")
    prefix = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    if config.sam.enabled and "speculative_config" in engine_kwargs:
        raise ConfigError(
            f"{prefix}.speculative_config",
            _plain(engine_kwargs.speculative_config),
            "must not be set with sam.enabled=true (sam=off lets other methods run)",
        )
    if ADDITIONAL_CONFIG_KEY in (engine_kwargs.get("additional_config") or {}):
        raise ConfigError(
            f"{prefix}.additional_config.{ADDITIONAL_CONFIG_KEY}",
            _plain(engine_kwargs.additional_config[ADDITIONAL_CONFIG_KEY]),
            "must not be set: it is filled from sam, rollout_sampler and rollout_telemetry",
        )


def _routes_siblings(config: DictConfig) -> bool:
    siblings = config.sam.sources.siblings
    return config.sam.enabled and siblings.enabled and siblings.routing == "grouped"


def environment_notes(config: DictConfig) -> list[str]:
    """Where the shell, often a container's image, overrules a variable of the experiment."""
    return [
        f"{name}={os.environ[name]} is set in the shell and counts; the experiment says {value} "
        f"(unset {name} to have that)"
        for name, value in config.get("environment", {}).items()
        if value is not None and os.environ.get(name, str(value)) != str(value)
    ]


def environment(config: DictConfig) -> dict[str, str]:
    """Variables of every process of the run, on every node.

    A variable already set in the shell wins; to a list of modules ours is added.
    """
    run_dir = Path(config.run_dir).absolute()
    variables = {
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        "WANDB_DIR": str(run_dir),
        "VERL_FILE_LOGGER_PATH": str(run_dir / "metrics.jsonl"),
        **{
            name: str(value)
            for name, value in config.get("environment", {}).items()
            if value is not None  # taken back by an override
        },
    }
    if config.rollout_sampler.kind != "stock":
        variables[MODEL_RUNNER_ENV] = "0"
    modules = [*filter(None, os.environ.get(EXTERNAL_MODULES_ENV, "").split(","))]
    if PLUGIN_MODULE not in modules:
        modules.append(PLUGIN_MODULE)
    return {
        **{name: os.environ.get(name, value) for name, value in variables.items()},
        EXTERNAL_MODULES_ENV: ",".join(modules),
    }


def export_environment(config: DictConfig) -> None:
    """Set the run's environment variables here and for every process of the Ray cluster.

    Must run before verl is imported.
    """
    variables = environment(config)
    os.environ.update(variables)
    with open_dict(config):
        config.run_dir = str(Path(config.run_dir).absolute())
        runtime_env = config.ray_kwargs.ray_init.runtime_env
        given = runtime_env.get("env_vars", {})
        runtime_env.env_vars = {**variables, **given}


def translate(config: DictConfig) -> None:
    """Fill verl's and vLLM's fields from our groups, in place."""
    _place_sources(config)
    if config.compare.baseline_run:
        with open_dict(config):
            config.compare.baseline_run = str(Path(config.compare.baseline_run).absolute())
    sam = SamConfig.from_mapping(_plain(config.sam))
    sampling = DynamicSamplingConfig.from_mapping(_plain(config.dynamic_sampling))
    with open_dict(config):
        engine_kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
        sampler = RolloutSamplerConfig.from_mapping(_plain(config.rollout_sampler))
        arguments = engine_arguments(sam, sampler)
        ours = arguments["additional_config"][ADDITIONAL_CONFIG_KEY]
        # No more than the server needs: vLLM compiles anew when its configuration changes.
        ours["telemetry"] = {"record_traces": config.rollout_telemetry.record_traces}
        control = control_assignment(config)
        if control.share:
            ours["control"] = dataclasses.asdict(control)
        config.actor_rollout_ref.rollout.engine_kwargs.vllm = OmegaConf.merge(
            engine_kwargs, arguments
        )
        if sizes := capture_sizes(config):
            asked = sorted(config.actor_rollout_ref.rollout.cudagraph_capture_sizes)
            if sizes != asked:
                # The drafts' doing: sides are compared by what they were to have.
                OmegaConf.update(config, f"{ASKED}.{SIZES}", asked, force_add=True)
            OmegaConf.update(config, SIZES, sizes)
        if _routes_siblings(config):
            settings = Path(config.run_dir).absolute() / ROUTER_SETTINGS
            config.actor_rollout_ref.rollout.router_config_path = str(settings)
        filter_groups = config.algorithm.filter_groups
        filter_groups.enable = sampling.kind != "none"
        sampler = config.trainer.v1.sampler
        sampler.custom_sampler.path = SAMPLER_MODULE
        sampler.custom_sampler.name = SAMPLER_CLASSES[sampling.kind]
        sampler.sampler_kwargs = {
            "filter_metric": filter_groups.metric if filter_groups.enable else None,
            "train_batch_size": config.data.train_batch_size,
            "gen_batch_size": sampling.gen_batch_size,
            "max_rounds": sampling.max_rounds,
            "max_inflight_gen_batches": filter_groups.max_inflight_gen_batches,
            "poll_interval_s": sampling.poll_interval_s,
        }
    # Resolved here: our resolvers are not registered in Ray's processes.
    OmegaConf.resolve(config)


def control_assignment(config: DictConfig) -> ControlAssignment:
    """Which requests of a checked configuration are sampled without drafts."""
    telemetry = RolloutTelemetryConfig.from_mapping(_plain(config.rollout_telemetry))
    return ControlAssignment(
        share=telemetry.control_share if config.sam.enabled else 0.0,
        unit=telemetry.control_unit,
        seed=config.actor_rollout_ref.rollout.seed,
        replicas=rollout_layout(config).replicas,
    )


def validate(config: DictConfig) -> None:
    """Let verl check a translated configuration; no device, weights or cluster is needed.

    Raises:
        VerlRefusal: With verl's words.
    """
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        validate_config(
            config=config,
            use_reference_policy=need_reference_policy(config),
            use_critic=need_critic(config),
        )
        # verl makes this one in its workers, after the model is loaded.
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    except (AssertionError, InstantiationException, NotImplementedError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else None
        raise VerlRefusal(" ".join(str(cause or error).split())) from error


def leave_to_running_cluster(config: DictConfig) -> None:
    """Drop what a Ray cluster that runs already was told when it was started."""
    ray_init = config.ray_kwargs.ray_init
    address = ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        with open_dict(ray_init):
            for name in CLUSTER_ARGUMENTS:
                ray_init.pop(name, None)


def _place_sources(config: DictConfig) -> None:
    """Make the paths of the enabled sources absolute: engines run in other working directories.

    Those of others stay as they are, because vLLM compiles anew when its configuration changes.
    """
    with open_dict(config):
        history, corpus = config.sam.sources.history, config.sam.sources.corpus
        if history.enabled:
            folder = history.path or Path(config.run_dir) / "sam" / "history"
            history.path = str(Path(folder).expanduser().absolute())
        if corpus.enabled:
            corpus.path = str(Path(corpus.path).expanduser().absolute())


def launch(config: DictConfig) -> None:
    """Run verl's V1 trainer on a checked configuration, in a Ray cluster.

    Raises:
        VerlRefusal: verl's own checks refuse the configuration.
    """
    import ray
    import verl.trainer.main_ppo as main_ppo
    from verl.utils.device import auto_set_device

    from sam_rollout.integrations.verl.progress import follow_rollouts

    class SamTaskRunner(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
        """verl's task runner with our trainer registered in its process."""

        def run(self, config: DictConfig) -> None:
            import sam_rollout.integrations.verl.trainer  # noqa: F401 - registers itself

            super().run(config)

        def init_agent_loop_manager(self) -> None:
            super().init_agent_loop_manager()
            # Their imports take half a minute; without this the first step would be charged.
            workers = self.agent_loop_manager.agent_loop_workers
            ray.get([worker.__ray_ready__.remote() for worker in workers])

    translate(config)
    leave_to_running_cluster(config)
    auto_set_device(config)
    validate(config)
    # On the head node, where the run was started: the trainer writes the run folder.
    runner = ray.remote(resources={HEAD_RESOURCE: 0.001})(SamTaskRunner)
    with follow_rollouts(config.rollout_telemetry.progress):
        main_ppo.run_ppo(config, task_runner_class=runner)
