"""From a checked configuration to verl's trainer."""

from __future__ import annotations

import contextlib
import io
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

# What Ray is told when it starts, and refuses to be told by a program that joins it.
CLUSTER_ARGUMENTS = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
# Ray's own name for a resource that its head node alone has.
HEAD_RESOURCE = "node:__internal_head__"


class VerlRefusal(ConfigError):
    """verl's own checks refuse the configuration; the text is verl's."""

    def __str__(self) -> str:
        return f"verl refuses it: {self.allowed}"


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
        raise VerlRefusal("", "", " ".join(str(cause or error).split())) from error


def check_with_verl(config: DictConfig, run: RunConfig) -> Iterator[Note]:
    """Let verl check a copy of the configuration, translated; its warnings become notes.

    It imports verl, which settles on a device then: not for a process that starts a run.

    Raises:
        VerlRefusal: With verl's words.
    """
    copy = deepcopy(config)
    translate(copy, run)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            validate(copy)
    except ImportError as error:
        yield Note(f"verl cannot be asked: {error}")
    marks = ("WARNING: ", "NOTICE: ")
    for line in said.getvalue().splitlines():
        yield from (Note(line.removeprefix(mark)) for mark in marks if line.startswith(mark))


def leave_to_running_cluster(config: DictConfig) -> None:
    """Drop what a Ray cluster that runs already was told when it was started."""
    ray_init = config.ray_kwargs.ray_init
    address = ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        with open_dict(ray_init):
            for name in CLUSTER_ARGUMENTS:
                ray_init.pop(name, None)


def prepare_run(config: DictConfig, run: RunConfig) -> None:
    """Fill in what verl and vLLM read of a checked configuration, and let verl check it.

    Args:
        config: As composed; the run's environment variables must be set.
        run: Its settings of ours.

    Raises:
        VerlRefusal: verl's own checks refuse the configuration.
    """
    from verl.utils.device import auto_set_device

    for line in (*run.decisions, *fit_bucket(config)):
        print(line, flush=True)
    translate(config, run)
    leave_to_running_cluster(config)
    auto_set_device(config)
    validate(config)


@contextlib.contextmanager
def naming_the_first_error() -> Iterator[None]:
    """End a run that fails with its traceback and, behind it, one line: what failed first.

    Between them Ray is shut down: other processes' logs would come behind that line.
    """
    import ray

    from sam_rollout.integrations.verl.failures import describe

    try:
        yield
    except Exception as error:
        traceback.print_exc()
        ray.shutdown()
        sys.stdout.flush()
        sys.exit(f"The run failed: {describe(error)}")


def launch(config: DictConfig, run: RunConfig) -> None:
    """Run verl's V1 trainer on a prepared configuration, in a Ray cluster."""
    import ray
    import verl.trainer.main_ppo as main_ppo

    from sam_rollout.integrations.verl.status_line import follow_rollouts

    write_first_head(config, run.sam)

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

    # On the head node, where the run was started: the trainer writes the run folder.
    runner = ray.remote(resources={HEAD_RESOURCE: 0.001})(SamTaskRunner)
    with follow_rollouts(run.telemetry.progress):
        main_ppo.run_ppo(config, task_runner_class=runner)
