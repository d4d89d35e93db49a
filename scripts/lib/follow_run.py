"""Shows a training run's progress, one line per event, until the run's process ends.

python scripts/lib/follow_run.py RUN_DIR --pid PID
"""

import argparse
import re
import time
from pathlib import Path

import psutil

from sam_rollout.telemetry.records import RunFolder, RunFolderError

MILESTONES = {
    "starting Ray": "ray init kwargs",
    "loading the trainer": "train and validate dataloader initialized",
    "starting the vLLM engine": "reward loop manager initialized",
    "engine is up: {match}": r"sam_rollout: (?:no )?drafter.*",
    "training": "ready to fit",
}
COLUMNS = (
    ("reward", "critic/score/mean", "{:+.2f}"),
    ("accuracy", "sam/rounds/accuracy_unfiltered", "{:.2f}"),
    ("response", "response_length/mean", "{:.0f} tokens"),
    ("rollout", "sam/engine/rollout_s", "{:.1f} s"),
    ("long tail", "sam/tail/time_s", "{:.1f} s"),
    ("acceptance", "sam/draft/acceptance_length", "{:.2f}"),
    ("step", "timing_s/step", "{:.1f} s"),
)
POLL_S = 1.0
TAIL_LINES = 25


class Follower:
    """Prints each milestone and each training step once."""

    def __init__(self, run_dir: Path) -> None:
        self._log, self._folder = run_dir / "log.txt", RunFolder(run_dir)
        self._started = time.monotonic()
        self._to_come = dict(MILESTONES)
        self._shown = 0  # number of training steps shown
        self._complete = False

    def poll(self) -> None:
        text = self._log.read_text(errors="replace")
        for message, pattern in list(self._to_come.items()):
            if match := re.search(pattern, text):
                del self._to_come[message]
                self._say(message.format(match=match[0]))
        try:
            steps = self._folder.read_train_steps()
        except RunFolderError:
            steps = {}
        if not steps:  # no training step has ended yet
            return
        # The number of training steps is None if a number of epochs decides when the run ends.
        total = self._folder.read_starts()[-1].config["trainer"]["total_training_steps"]
        for step, metrics in sorted(steps.items())[self._shown :]:
            shown = (
                f"{n} {form.format(metrics[key])}" for n, key, form in COLUMNS if key in metrics
            )
            self._say(
                "  ".join((f"step {step}" if total is None else f"step {step}/{total}", *shown))
            )
        self._shown = len(steps)
        self._complete = total is None or max(steps) >= total

    def finish(self) -> None:
        """Print the last events, and the end of the log if the run ended before its last step."""
        self.poll()
        if not self._complete:
            lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            print(f"    the run ended before its last step; the last lines of {self._log}:")
            print("\n".join(lines), flush=True)

    def _say(self, message: str) -> None:
        print(f"    {time.monotonic() - self._started:4.0f} s  {message}", flush=True)


def is_running(pid: int) -> bool:
    """Return whether a process runs; False for a zombie process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--pid", type=int, required=True, help="process of the run")
    arguments = parser.parse_args()
    follower = Follower(arguments.run_dir)
    while is_running(arguments.pid):
        follower.poll()
        time.sleep(POLL_S)
    follower.finish()


if __name__ == "__main__":
    main()
