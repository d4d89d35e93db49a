"""Ends a run when one of its processes has died.

verl's trainer waits without a limit for processes that have died. A second thread in the trainer's
process therefore calls every process of the run, and raises the first error in the trainer.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
import transfer_queue.interface as queue_interface
from ray.exceptions import ActorDiedError, RayError

from sam_rollout.integrations.verl.failures import DeadPartError, describe

logger = logging.getLogger(__name__)

LOOK_S = 2.0
END_S = 30.0  # the trainer has to end within this time after the signal
SIGNAL = signal.SIGUSR1

# Name of a process -> a call to this process. If the answer is a string that is not empty, it says
# what is wrong with the process.
Parts = Mapping[str, Callable[[], Any]]


def parts_of(trainer: Any) -> Parts:
    """Return all processes of a trainer's run that have started so far."""
    names = "llm_server_manager", "standalone_server_manager"
    managers = [one for name in names if (one := getattr(trainer, name, None)) is not None]
    replicas = [replica for manager in managers for replica in manager.get_replicas()]
    queue = (getattr(queue_interface, "_TQ_STORAGE", None) or {}).get("SimpleStorage") or {}
    rewards = getattr(trainer, "reward_loop_manager", None)
    agents = getattr(trainer, "agent_loop_manager", None)
    training = getattr(trainer, "actor_rollout_wg", None)
    actors = {
        "TransferQueue's controller": [getattr(queue_interface, "_TQ_CONTROLLER", None)],
        "TransferQueue's storage": [*queue.values()],
        "training process": getattr(training, "workers", []),
        "reward worker": getattr(rewards, "reward_loop_workers", []),
        "agent-loop worker": getattr(agents, "agent_loop_workers", []),
        "load balancer": [getattr(one, "global_load_balancer", None) for one in managers],
        # Only a replica's first server has an engine. Other servers only have to answer.
        "rollout server": [server for one in replicas for server in one.servers[1:]],
    }
    parts = {
        f"{kind} {number}": actor.__ray_ready__.remote
        for kind, group in actors.items()
        for number, actor in enumerate(group)
        if actor is not None
    }
    for replica in replicas:
        for server in replica.servers[:1]:
            parts[f"rollout server of replica {replica.replica_rank}"] = server.trouble.remote
    return parts


def look(parts: Parts, asked: dict[str, Any]) -> str:
    """Return an error text about the first process found in trouble; empty if there is none.

    `asked` has the calls that wait for an answer, and is changed in place. They have no time limit,
    because a busy process may answer late.
    """
    asked |= {name: ask() for name, ask in parts.items() if name not in asked}
    if not asked:
        return ""
    ready, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=LOOK_S)
    for name, call in list(asked.items()):
        if call not in ready:
            continue
        del asked[name]
        try:
            trouble = ray.get(call)
        except ActorDiedError as error:
            return f"{name} died: {describe(error)}"
        except RayError:  # The next `look` shows whether the process has died.
            continue
        if isinstance(trouble, str) and trouble:
            return trouble
    return ""


@contextlib.contextmanager
def watched(parts: Callable[[], Parts]) -> Iterator[None]:
    """Return a context in which the main thread gets a `DeadPartError` if a process has died."""
    stop, trouble = threading.Event(), ""
    asked: dict[str, Any] = {}

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt  # Only this exception ends a wait inside Ray's code.

    def watch() -> None:
        nonlocal trouble
        while not stop.wait(LOOK_S):
            try:
                trouble = look(parts(), asked)
            except Exception:
                logger.warning("The run's processes are no longer watched.", exc_info=True)
                return
            if trouble:
                break
        if stop.is_set():
            return
        signal.pthread_kill(main.ident, SIGNAL)  # type: ignore[arg-type]  # the thread has started
        if not stop.wait(END_S):
            print(f"The run failed: {trouble}", flush=True)
            os._exit(1)

    main = threading.main_thread()
    before = signal.signal(SIGNAL, interrupt)  # only the main thread gets signals
    thread = threading.Thread(target=watch, name="sam-watchdog", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if trouble:
            raise DeadPartError(trouble) from None
        raise
    finally:
        stop.set()
        thread.join()
        signal.signal(SIGNAL, before)
