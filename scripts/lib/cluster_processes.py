"""Finds and ends the processes of a cluster on this node.

A process belongs to a cluster if it has inherited the cluster's environment variable (`MARK`), or
has a file open in the cluster's folder, such as its log. The variable is not enough, because Ray's
workers change their titles, which erases their environments.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import psutil
from cluster_common import ClusterError

MARK = "SAM_ROLLOUT_CLUSTER"
TERMINATE_S = 10.0  # time between SIGTERM and SIGKILL


def of_cluster(folder: Path) -> list[psutil.Process]:
    """Return the cluster's processes, without this process and its parents."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # the process has ended, or is another user's
            if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == str(folder) or any(
                Path(file.path).is_relative_to(folder) for file in process.open_files()
            ):
                found.append(process)
    return found


def end_all(processes: Iterable[psutil.Process], patience_s: float = 0.0) -> None:
    """End processes that do not end by themselves.

    They get SIGTERM after ``patience_s`` seconds. If they still run ``TERMINATE_S`` seconds later,
    they get SIGKILL.
    """
    _, alive = psutil.wait_procs(list(processes), timeout=patience_s)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(process)
        _, alive = psutil.wait_procs(alive, timeout=TERMINATE_S)


def end(process: subprocess.Popen, patience_s: float) -> None:
    """End a child process with SIGTERM, so that it can end its own children.

    If the child still runs ``patience_s`` seconds later, it gets SIGKILL.
    """
    process.terminate()
    try:
        process.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def claim(folder: Path) -> TextIO:
    """Lock a cluster's folder; the lock lasts as long as the returned file is open."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()  # any user can create this folder in /tmp
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ClusterError(f"{folder} is not ours: remove it, or choose another --port")
    file = (folder / "supervisor.pid").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ClusterError(
            f"a run of ours with this port is under way here (process {file.read()}): wait for it, "
            "end that process, or choose another --port"
        ) from None
    folder.chmod(0o700)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
