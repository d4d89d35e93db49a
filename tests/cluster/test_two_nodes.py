import json
import subprocess

from sam_rollout.telemetry.records import RunFolder
from tests.cluster import runs

START_S = 900  # time until a launch has trained a step; imports take minutes on two cores
LOSS_S = 300  # time until the launch ends after a machine has died
# With these values, Ray declares a silent node dead after about 20 s. With Ray's own defaults,
# this takes a minute.
HEALTH_CHECK_MS = {"initial_delay": 1000, "period": 1000, "timeout": 4000}
SOONER = [
    *(f"--env=RAY_health_check_{name}_ms={ms}" for name, ms in HEALTH_CHECK_MS.items()),
    "--env=RAY_health_check_failure_threshold=4",
    "--loss-grace=5",
]
SHORT = [
    "data.max_response_length=96",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=240",
    "reward.reward_kwargs.overlong_buffer_cfg.len=32",
]
REPLICAS = {0, 1}
TEXTS = "sam.texts.path=/tmp/texts"
HEAD = ("sam=trained", "sam.sources.model.train.budget=0.3")


def processes(machine) -> list[str]:
    done = subprocess.run(
        machine.enter("ps", "-eo", "pid=,args="), capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 1) for line in done.stdout.splitlines()]
    return [words for pid, words in lines if pid != "1" and not words.startswith("ps ")]


def assert_both_replicas_worked(folder: RunFolder, step: int) -> None:
    engine = folder.read("engine_steps").to_pandas()
    tokens = engine[engine.step == step].groupby("replica").generation_tokens.sum()
    assert set(tokens.index) == REPLICAS
    assert (tokens > 0).all()
    metrics = folder.read_train_steps()[step]
    assert tokens.sum() == metrics["sam/engine/generation_tokens"]
    assert metrics["actor/grad_norm"] > 0
    requests = folder.read("requests").to_pandas()
    requests = requests[requests.step == step]
    assert set(requests.replica) == REPLICAS
    assert requests.replica.value_counts(normalize=True).max() < 0.75
    assert metrics["sam/draft/shared_tokens"] > 0
    assert metrics["sam/draft/shared_lost"] == 0, "no piece is lost"
    assert metrics["sam/draft/accepted_model"] > 0
    assert metrics["sam/head_training/length"] > 2
    assert metrics["sam/head_training/failures"] == 0


def test_a_run_that_loses_a_node_ends_clearly_and_is_resumed(lan, folder):
    run_dir = folder / "run"
    overrides = [*runs.small_run(folder), *SHORT, *HEAD, TEXTS]
    overrides.append(f"run_dir={run_dir}")

    endless = [*overrides, "trainer.total_training_steps=99"]
    with runs.Launch(lan, folder, *SOONER, "--config", *endless) as launch:
        launch.wait_for(lambda: runs.has_trained(run_dir, 1), START_S)
        assert "==> 2/2 nodes, 2/2 GPU, waiting" in launch.output
        assert_both_replicas_worked(RunFolder(run_dir), 1)
        each = {"head": 1, lan.addresses["node-2"]: 1}
        for actor in ("SamHttpServer", "WorkerDict"):
            assert runs.actors_by_node(launch.output, actor) == each

        lan.power_off("node-2")
        status = launch.wait(LOSS_S)
        assert status == 4, launch.output[-6000:]
        assert "error: node-2 left the cluster while the job ran" in launch.output
        assert "run the same command with trainer.resume_mode=auto" in launch.output
        assert processes(lan.machines["node-1"]) == []

    saved, before = runs.last_checkpoint(run_dir), runs.trained_steps(run_dir)
    assert saved >= 1
    lan.start("node-2")
    overrides += ["trainer.resume_mode=auto", f"trainer.total_training_steps={saved + 1}"]
    with runs.Launch(lan, folder, "--config", *overrides) as launch:
        assert launch.wait(START_S) == 0, launch.output[-6000:]
        assert len(RunFolder(run_dir).read_starts()) == 2
        assert runs.trained_steps(run_dir)[len(before) :] == [saved + 1]
        assert_both_replicas_worked(RunFolder(run_dir), saved + 1)
        record = json.loads((run_dir / "checkpoints" / "draft_head" / "training.json").read_text())
        steps = RunFolder(run_dir).read_train_steps()
        learned = [steps[n]["sam/head_training/updates"] for n in range(1, saved + 2)]
        assert record["updates"] == sum(learned) > learned[-1]
        for machine in lan.machines.values():
            assert processes(machine) == []
