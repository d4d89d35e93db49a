"""Starts verl's trainer from a checked configuration."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from copy import deepcopy

from omegaconf import DictConfig, open_dict

from sam_rollout.config import ConfigError, RunConfig
from sam_rollout.integrations.verl.check_results import Note
from sam_rollout.integrations.verl.model_drafter import write_first_head
from sam_rollout.integrations.verl.translation import translate
from sam_rollout.integrations.verl.weight_buckets import fit_bucket

# Arguments for starting a Ray cluster. Ray refuses them if the program joins a running cluster.
CLUSTER_ARGUMENTS = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
HEAD_RESOURCE = "node:__internal_head__"


class VerlRefusal(ConfigError):
    """verl's own checks refuse the configuration; the message comes from verl."""

    def __str__(self) -> str:
        return f"verl refuses it: {self.allowed}"


def validate(config: DictConfig) -> None:
    """Let verl check a translated configuration; this needs no device, weights or cluster."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        validate_config(
            config=config,
            use_reference_policy=need_reference_policy(config),
            use_critic=need_critic(config),
        )
        # verl's workers build this dataclass only after they have loaded the model.
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    except (AssertionError, InstantiationException, NotImplementedError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else None
        raise VerlRefusal("", "", " ".join(str(cause or error).split())) from error


def check_with_verl(config: DictConfig, run: RunConfig) -> Iterator[Note]:
    """Let verl check a translated copy of the configuration; yield a note if that is impossible.

    In a process that starts a run, do not call this before the run's environment variables are set:
    this imports verl, and verl chooses its device at import.
    """
    copy = deepcopy(config)
    translate(copy, run)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the doctor may print JSON to stdout
            validate(copy)
    except ImportError as error:
        yield Note(f"verl's own checks were not run, because verl cannot be imported: {error}")


def prepare_run(config: DictConfig, run: RunConfig) -> None:
    """Fill verl's and vLLM's fields of a checked configuration, and let verl check it."""
    from verl.utils.device import auto_set_device

    for line in (*run.decisions, *fit_bucket(config)):
        print(line, flush=True)
    translate(config, run)
    ray_init = config.ray_kwargs.ray_init
    if (ray_init.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local":
        with open_dict(ray_init):  # the run joins a running cluster
            for name in CLUSTER_ARGUMENTS:
                ray_init.pop(name, None)
    auto_set_device(config)
    validate(config)


def launch(config: DictConfig, run: RunConfig) -> None:
    """Run verl's V1 trainer on a prepared configuration, in a Ray cluster.

    If the run fails, its last line names the first error.
    """
    import ray
    import verl.trainer.main_ppo as main_ppo

    from sam_rollout.integrations.verl.failures import describe
    from sam_rollout.integrations.verl.status_line import follow_rollouts

    class SamTaskRunner(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
        """verl's task runner with our trainer registered in its process."""

        def run(self, config: DictConfig) -> None:
            import sam_rollout.integrations.verl.trainer  # noqa: F401 - registers itself

            super().run(config)

        def init_agent_loop_manager(self) -> None:
            super().init_agent_loop_manager()
            # The first rollout's time must not include the workers' imports (half a minute).
            workers = self.agent_loop_manager.agent_loop_workers
            ray.get([worker.__ray_ready__.remote() for worker in workers])

    # The trainer writes the run folder, so it runs on the node where the run was started.
    runner = ray.remote(resources={HEAD_RESOURCE: 0.001})(SamTaskRunner)
    try:
        write_first_head(config, run.sam)
        with follow_rollouts(run.telemetry.progress):
            main_ppo.run_ppo(config, task_runner_class=runner)
    except Exception as error:
        traceback.print_exc()
        ray.shutdown()
        sys.stdout.flush()
        sys.exit(f"The run failed: {describe(error)}")
