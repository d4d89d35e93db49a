"""Whether the code that a configuration names can be loaded: reward, agent loops and others.

verl loads such code in its workers, when models and engines are up. Here it is loaded beforehand,
in an interpreter of its own: what a user's module does while it is imported stays there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from sam_rollout.config import ConfigError, RunConfig
from sam_rollout.integrations.verl.check_results import Fact, Note
from sam_rollout.integrations.verl.environment import experiment_variables

LIMIT_S = 60
REWARD = "reward.custom_reward_function"
FILTER_METRIC = "algorithm.filter_groups.metric"
AGENT = "actor_rollout_ref.rollout.agent"
# Code that a configuration names by a file or module, and the object in it.
_OTHER_CODE = (
    ("data.custom_cls.path", "data.custom_cls.name"),
    ("data.sampler.class_path", "data.sampler.class_name"),
    ("actor_rollout_ref.model.external_lib", None),
)
# Files that a configuration names and verl opens when everything is up.
_OTHER_FILES = (
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
)
_OWN_MANAGERS = {"dapo", "gdpo", "naive", "rate_limited", "remote"}  # verl 0.9.1 registers them
_OWN_LOOPS = {"single_turn_agent", "tool_agent"}
# verl's key for the reward itself, whatever a reward function calls it.
_CANONICAL_REWARD = "reward"

# Loads one object as verl does (verl.utils.import_utils.load_extern_object) and prints one line of
# JSON: what is wrong with the object's name, and which figures its module says it returns.
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
if name is not None and not callable(getattr(module, name, None)):
    names = [n for n, o in vars(module).items() if callable(o) and not n.startswith("_")]
    wrong = f"is no function or class of it; it has {', '.join(names) or 'none'}"
print(json.dumps({"wrong": wrong, "figures": list(getattr(module, "FIGURES", ()))}), flush=True)
os._exit(0)  # what the module does at exit would come behind that line
"""
# Loads agent loops as verl's workers do.
_LOAD_LOOPS = """
import json, sys
import hydra.utils
import verl.experimental.agent_loop
for name, target in json.loads(sys.argv[1]):
    try:
        hydra.utils.get_class(target)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        sys.exit(f"{name}: {target} cannot be loaded: {type(error).__name__}: {error}")
"""


class _LoadError(RuntimeError):
    """Code cannot be loaded; the text is the last line of its interpreter."""


def check_reward(config: DictConfig, run: RunConfig) -> Iterator[Fact | Note]:
    """Load the reward function and its manager; hold the filter's metric against its figures.

    Raises:
        ConfigError: The function cannot be loaded, or does not give the filter's metric.
    """
    manager = config.reward.reward_manager
    if manager.source == "importlib":
        _load(
            config,
            "reward.reward_manager.module.path",
            manager.module.path,
            "reward.reward_manager.name",
            manager.name,
        )
    elif manager.source == "register" and manager.name not in _OWN_MANAGERS:
        raise ConfigError(
            "reward.reward_manager.name",
            manager.name,
            f"must be one of {', '.join(sorted(_OWN_MANAGERS))}, or set "
            "reward.reward_manager.source=importlib and module.path",
        )
    function = config.reward.custom_reward_function
    if not function.path:
        yield Fact(f"verl's own, chosen by data_source; manager {manager.name}")
        return
    loaded = _load(config, f"{REWARD}.path", function.path, f"{REWARD}.name", function.name)
    if loaded is None:
        yield Note(f"{REWARD}.path = {function.path} took more than {LIMIT_S} s to load")
        return
    figures, metric = loaded["figures"], config.algorithm.filter_groups.metric
    filters = run.sampling.kind != "none"
    if filters and figures and metric not in {*figures, _CANONICAL_REWARD}:
        raise ConfigError(
            FILTER_METRIC,
            metric,
            f"{function.path} gives {', '.join(figures)}; {_CANONICAL_REWARD!r} is the reward "
            "itself",
        )
    yield Fact(f"{function.name} of {function.path}; manager {manager.name}")


def check_agent_loops(config: DictConfig) -> Iterator[Fact]:
    """Load the agent loops that the configuration adds to verl's own.

    Raises:
        ConfigError: A class cannot be loaded, or the default loop is none of those there are.
    """
    agent = config.actor_rollout_ref.rollout.agent
    loops = dict(_named_loops(agent.agent_loop_config_path))
    if loops:
        try:
            _run(config, _LOAD_LOOPS, [*loops.items()])
        except _LoadError as error:
            field = f"{AGENT}.agent_loop_config_path"
            raise ConfigError(field, agent.agent_loop_config_path, str(error)) from None
    known = {*_OWN_LOOPS, *loops}
    if agent.default_agent_loop not in known:
        raise ConfigError(
            f"{AGENT}.default_agent_loop",
            agent.default_agent_loop,
            f"must be one of {', '.join(sorted(known))}; others are named in "
            f"{AGENT}.agent_loop_config_path",
        )
    yield Fact(agent.default_agent_loop)


def check_other_code(config: DictConfig) -> Iterator[Fact]:
    """Load data sets and samplers of the user's own, and look for the files of tools.

    Raises:
        ConfigError: There is no such file, or code cannot be loaded.
    """
    for where, name in _OTHER_CODE:
        if path := OmegaConf.select(config, where):
            wanted = OmegaConf.select(config, name) if name else None
            for one in path if isinstance(path, ListConfig) else [path]:
                _load(config, where, str(one), name or where, wanted)
                yield Fact(f"{where}: {one}")
    for field in _OTHER_FILES:
        path = OmegaConf.select(config, field)
        if path and not Path(path).expanduser().exists():
            raise ConfigError(field, path, "there is no such file")


def _named_loops(path: str | None) -> Iterator[tuple[str, str]]:
    """Read name and class of each agent loop of verl's file."""
    field = f"{AGENT}.agent_loop_config_path"
    if not path:
        return
    if not Path(path).exists():
        raise ConfigError(field, path, "there is no such file")
    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        yield from [(entry["name"], entry["_target_"]) for entry in entries]
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            field, path, f"must be a YAML list of entries with name and _target_ ({said})"
        ) from error


def _load(
    config: DictConfig, where: str, path: str | None, field: str, name: str | None
) -> dict[str, Any] | None:
    """Load one object in a fresh interpreter; return what it says, None if it takes too long.

    Args:
        config: As composed; its variables are set.
        where: The setting that names the file or module.
        path: Its value.
        field: The setting that names the object.
        name: Its value; None for a module.

    Raises:
        ConfigError: There is no such file, or the object cannot be loaded.
    """
    if not path:
        raise ConfigError(where, path, "must name the file that holds the code")
    file = path.removeprefix("file://")
    if file.endswith(".py") and not file.startswith("pkg://") and not Path(file).exists():
        raise ConfigError(where, path, "there is no such file")
    try:
        said = _run(config, _LOAD, [file, name])
    except _LoadError as error:
        raise ConfigError(where, path, f"cannot be loaded: {error}") from None
    loaded = None if said is None else json.loads(said)
    if loaded and loaded["wrong"]:
        raise ConfigError(field, name, f"{loaded['wrong']} ({path})")
    return loaded


def _run(config: DictConfig, program: str, argument: Any) -> str | None:
    """Run a program with one argument; return the last line it prints, or None if it hangs.

    Raises:
        _LoadError: The program failed.
    """
    given = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    variables = {**experiment_variables(config), **os.environ, **given}
    command = [sys.executable, "-c", program, json.dumps(argument)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, env=variables,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise _LoadError(said[-1] if said else f"it ended with status {done.returncode}")
    return (done.stdout.splitlines() or [""])[-1]
