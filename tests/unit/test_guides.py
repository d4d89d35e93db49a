"""Checks the training commands of the guides for clusters.

A shell runs the pages' commands, but every program is replaced and only prints its arguments.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import cache

import pytest

from recipes.dapo_qwen3.dry_run import memory_plan
from sam_rollout.integrations.verl.layouts import check_layout
from tests.pages import PARSER, ROOT
from tests.settings_checks import check
from tests.unit.test_configs import composed

pytestmark = pytest.mark.slow

PAGES = ("README.md", "docs/clusters.md", "docs/ascend_zh.md")
DEVICES = ("ascend_910c", "cuda")  # values of DEVICE in the pages
PROGRAMS = ("bash", "python", "sam-rollout")
FOLDER = "${OUTPUT_DIR:+run_dir=$OUTPUT_DIR}"  # the folder's override in scripts/compare.sh
STUBS = "\n".join(
    f"{name}() {{ printf 'RUN {name}'; printf ' %q' \"$@\" {FOLDER}; echo; }}" for name in PROGRAMS
)
COMPARE = "scripts/compare.sh"  # not all of its words are overrides
ITS_OWN = ("repeats", "skip_first")


@dataclass(frozen=True)
class Training:
    command: str
    overrides: tuple[str, ...]

    def __getitem__(self, name: str) -> str | None:
        values = [o.partition("=")[2] for o in self.overrides if o.partition("=")[0] == name]
        return values[-1] if values else None

    @property
    def config(self):
        return composed(*self.overrides)


def snippets(page: str) -> list[str]:
    code = []
    for token in PARSER.parse((ROOT / page).read_text()):
        if token.type == "fence" and token.info == "bash":
            code.append(token.content)
        spans = [c.content for c in token.children or [] if c.type == "code_inline"]
        code += [span for span in spans if "run_dir=" in span and " " in span]
    return code


@cache
def trainings(page: str) -> tuple[Training, ...]:
    return tuple(dict.fromkeys(one for device in DEVICES for one in trainings_on(device, page)))


def trainings_on(device: str, page: str) -> list[Training]:
    script = "\n".join([STUBS, "docker() { :; }", *snippets(page)])
    command, env = ["/bin/bash", "--norc", "-c", script], {"PATH": "/nowhere", "DEVICE": device}
    shell = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)
    found = []
    for line in shell.stdout.splitlines():
        words = shlex.split(line.removeprefix("RUN "))
        trains = any(word.startswith("experiment=") for word in words)
        if not trains or {"--dry-run", "--doctor", "doctor"} & set(words):
            continue
        behind = words.index("--config") + 1 if "--config" in words else 0
        overrides = [word for word in words[behind:] if re.match(r"\+*[a-z_][\w.]*=", word)]
        if COMPARE in words:
            overrides = [word for word in overrides if word.partition("=")[0] not in ITS_OWN]
            overrides += ["trainer.resume_mode=disable"]  # a fresh folder has no checkpoint
        found.append(Training(line, tuple(overrides)))
    return found


CLUSTER = [
    pytest.param(page, training, id=f"{page}-{number}")
    for page in PAGES
    for number, training in enumerate(trainings(page))
    if not training["experiment"].startswith("tiny_")
]


@pytest.mark.parametrize(("page", "training"), CLUSTER)
def test_a_training_command_is_accepted_and_shares_no_checkpoints(page, training):
    """With any positive save_freq, verl also saves a checkpoint after the last step."""
    config = training.config
    sam, layout = check(config).sam, check_layout(config)
    most = config.actor_rollout_ref.rollout.max_model_len
    assert not memory_plan(config, sam, layout).errors(layout.hardware.memory_gib, most)
    assert (training["run_dir"] or "").startswith("/data/"), "all nodes share its folder"
    same = [other for other in trainings(page) if other["run_dir"] == training["run_dir"]]
    assert {other["sam"] for other in same} == {training["sam"]}
    if config.trainer.total_training_steps:  # a short run neither saves nor resumes
        assert config.trainer.save_freq <= 0 and config.trainer.resume_mode == "disable"
