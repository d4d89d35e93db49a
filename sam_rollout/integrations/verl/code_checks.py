"""Checks that the user's reward function and agent loops can be loaded.

verl loads the user's code in its workers, after models and engines have started. These checks load
the code earlier, in a separate interpreter.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError, RunConfig
from sam_rollout.integrations.verl.check_results import Fact, hold
from sam_rollout.integrations.verl.environment import run_variables

LIMIT_S = 600  # Time to load the user's code, which may load a model.
REWARD = "reward.custom_reward_function"
AGENT = "actor_rollout_ref.rollout.agent"
# Settings that name files, which agent loops open only after all processes have started.
_TOOL_FILES = (
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
)
_OWN_MANAGERS = {"dapo", "gdpo", "naive", "rate_limited", "remote"}  # verl 0.9.1's managers
_OWN_LOOPS = {"single_turn_agent", "tool_agent"}
# If the filter's metric has this name, verl filters by the reward itself, which every response has.
_CANONICAL_REWARD = "reward"

# This program loads a module, and a function or class in it, as verl does
# (verl.utils.import_utils.load_extern_object). Its last line is JSON: `wrong` is an error text or
# "", and `figures` lists the names of the numbers that a reward returns. It ends with the status
# `_LOADED`, because the user's module may exit with status 0.
_LOADED = 64
_LOAD = """
import importlib, importlib.util, json, os, sys
where, name = json.loads(sys.argv[1])
if where.endswith(".py"):
    spec = importlib.util.spec_from_file_location("named_by_configuration", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
else:
    module = importlib.import_module(where.removeprefix("pkg://").replace("/", "."))
wrong = ""
if not callable(getattr(module, name, None)):
    names = [n for n, o in vars(module).items() if callable(o) and not n.startswith("_")]
    wrong = f"is no function or class of it; it has {', '.join(names) or 'none'}"
print(json.dumps({"wrong": wrong, "figures": list(getattr(module, "FIGURES", ()))}), flush=True)
os._exit(64)  # without exit handlers, which may print after that line
"""


def check_reward(config: DictConfig, run: RunConfig) -> Iterator[Fact]:
    """Load the reward manager and function; check that the function gives the filter's metric."""
    manager = config.reward.reward_manager
    place, allowed = "reward.reward_manager", f"must be one of {', '.join(sorted(_OWN_MANAGERS))}"
    allowed += f", or set {place}.source=importlib and module.path"
    if manager.source == "importlib":
        _load(config, f"{place}.module.path", manager.module.path, f"{place}.name", manager.name)
    elif manager.source == "register":
        hold([(f"{place}.name", manager.name, manager.name in _OWN_MANAGERS, allowed)])
    function = config.reward.custom_reward_function
    if not function.path:
        yield Fact(f"verl's own, chosen by data_source; manager {manager.name}")
        return
    loaded = _load(config, f"{REWARD}.path", function.path, f"{REWARD}.name", function.name)
    figures, metric = loaded["figures"], config.algorithm.filter_groups.metric
    gives = run.sampling.kind == "none" or not figures or metric in {*figures, _CANONICAL_REWARD}
    allowed = f"{function.path} gives {', '.join(figures)}; {_CANONICAL_REWARD!r} is the reward"
    hold([("algorithm.filter_groups.metric", metric, gives, allowed)])
    yield Fact(f"{function.name} of {function.path}; manager {manager.name}")


def check_agent_loops(config: DictConfig) -> Iterator[Fact]:
    """Load the agent loops that the configuration adds; check that files of tools exist."""
    agent = config.actor_rollout_ref.rollout.agent
    field, known = f"{AGENT}.agent_loop_config_path", {*_OWN_LOOPS}
    if path := agent.agent_loop_config_path:
        hold([(field, path, Path(path).exists(), "there is no such file")])
        try:
            entries: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
            targets = {entry["name"]: entry["_target_"].rpartition(".") for entry in entries}
        except Exception as error:
            said = " ".join(str(error).split())
            allowed = f"must be a YAML list of entries with name and _target_ ({said})"
            raise ConfigError(field, path, allowed) from error
        for loop, (module, _, name) in targets.items():
            _load(config, f"{field}[{loop}]", module, f"{field}[{loop}]", name)
        known |= targets.keys()
    right = agent.default_agent_loop in known
    allowed = f"must be one of {', '.join(sorted(known))}; others are named in {field}"
    hold([(f"{AGENT}.default_agent_loop", agent.default_agent_loop, right, allowed)])
    for file in _TOOL_FILES:
        path = OmegaConf.select(config, file)
        hold([(file, path, not path or Path(path).expanduser().exists(), "there is no such file")])
    yield Fact(agent.default_agent_loop)


def _load(
    config: DictConfig, where: str, path: str | None, field: str, name: str
) -> dict[str, Any]:
    """Load an object with the program `_LOAD`; return what the program printed.

    `where` and `field` are the names of two settings; `path` and `name` are their values.
    """
    file = (path or "").removeprefix("file://")
    is_file = file.endswith(".py") and not file.startswith("pkg://")
    there = bool(file) and (Path(file).exists() or not is_file)
    hold([(where, path, there, "there is no such file" if file else "must name the file")])
    given = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, json.dumps([file, name])],
            capture_output=True, text=True, check=False, timeout=LIMIT_S,
            stdin=subprocess.DEVNULL, env={**run_variables(config), **given},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(where, path, f"took more than {LIMIT_S} s to load") from None
    if done.returncode != _LOADED:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1] if said else f"it ended with status {done.returncode}"
        raise ConfigError(where, path, f"cannot be loaded: {reason}")
    loaded = json.loads(done.stdout.splitlines()[-1])
    hold([(field, name, not loaded["wrong"], f"{loaded['wrong']} ({path})")])
    return loaded
