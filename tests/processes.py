"""Runs functions in several processes of one torch.distributed group."""

import multiprocessing
import queue
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed

LIMIT_S = 100  # less than the time limit of a test
# The first call starts a process that imports these modules; all processes fork from it.
IMPORTED_ONCE = ["sam_rollout.heads.online", "sam_rollout.integrations.verl.state_capture"]


def in_processes(function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in several processes; return their results, by rank.

    `count` is the number of processes. Tensors in results become arrays. The call fails if a result
    takes longer than LIMIT_S.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [
            context.Process(
                target=_run, args=(function, rank, count, folder, results, arguments), daemon=True
            )
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            found = dict(results.get(timeout=LIMIT_S) for _ in processes)
        except queue.Empty:
            raise AssertionError(f"a process did not answer within {LIMIT_S} s") from None
        finally:
            for process in processes:
                process.kill()
    for rank, result in found.items():
        assert not isinstance(result, str), f"process {rank}: {result}"
    return [found[rank] for rank in range(count)]


def _run(
    function: Callable[..., Any], rank: int, count: int, folder: str, results: Any, arguments: Any
) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(Path(folder) / "store"), count)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        results.put((rank, _plain(function(rank, *arguments))))
    except Exception:
        results.put((rank, traceback.format_exc()))
    results.close()
    results.join_thread()


def _plain(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found.detach().numpy()
    if isinstance(found, tuple | list):
        return type(found)(map(_plain, found))
    return found
