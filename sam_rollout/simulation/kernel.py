"""The loop of the simulation: one engine from its first step to its last.

Between two events (a response ends or joins, the gate opens or shuts) the batch is constant. While
the gate is shut all steps up to the next event are taken at once; while it is open, step by step,
because every request then advances by a number of its own. Compiled with numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, uint64

MAX_LEAP = 256  # steps taken at once at most: contexts, and with them costs and gates, move on

# Columns of the sums that a run returns.
TIME, TAIL_TIME, STEPS, VERIFY_STEPS, ROW_STEPS, DRAFTED, ACCEPTED = range(7)
SUMS = 7


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, and cache the machine code where numba finds a place for it."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # nowhere to write: a read-only installation without a home directory
        return njit(function)


@_compiled
def _hash_uniform(seed, request, position):
    """A number in [0, 1) that belongs to a position of a request, whatever came before it."""
    z = uint64(seed) * uint64(0x9E3779B97F4A7C15) + uint64(request) * uint64(0xBF58476D1CE4E5B9)
    z += uint64(position) * uint64(0x94D049BB133111EB)
    z = (z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB)
    z = z ^ (z >> uint64(31))
    return (z >> uint64(11)) * (1.0 / 9007199254740992.0)


@_compiled
def _cell(x, grid):
    """Left index and share of `x` on a grid: 0 below it, more than 1 above it."""
    n = len(grid)
    if n == 1 or x <= grid[0]:
        return 0, 0.0
    i = 1
    while i < n - 1 and grid[i] < x:
        i += 1
    return i - 1, (x - grid[i - 1]) / (grid[i] - grid[i - 1])


@_compiled
def along(left, right, share):
    """Between two values; beyond the right one it goes on, but never falls."""
    if share > 1.0 and right < left:
        return right
    return left + share * (right - left)


@_compiled
def step_seconds(batches, contexts, seconds, batch, k, context):
    """Time of one step of `StepCosts`, bilinear."""
    i, a = _cell(batch, batches)
    j, b = _cell(context, contexts)
    table = seconds[k]
    i1 = min(i + 1, len(batches) - 1)
    j1 = min(j + 1, len(contexts) - 1)
    low = along(table[i, j], table[i, j1], b)
    high = along(table[i1, j], table[i1, j1], b)
    return along(low, high, a)


@_compiled
def _bin(context, edges):
    """Index of the last edge that is not above `context`."""
    i = len(edges) - 1
    while i > 0 and edges[i] > context:
        i -= 1
    return i


@_compiled
def _drawn(chances, k, u):
    """How many of k drafts are accepted: as many as have a chance above `u`."""
    accepted = 0
    while accepted < k and u < chances[accepted]:
        accepted += 1
    return accepted


@_compiled
def _finish(run, running, text, prompt, length, done, ends, time):
    """Take out the requests that have all their tokens; returns how many run on, and their text."""
    s = 0
    while s < running:
        i = run[s]
        if done[i] >= length[i]:
            ends[i] = time
            text -= prompt[i] + done[i]
            running -= 1
            run[s] = run[running]
        else:
            s += 1
    return running, text


@_compiled
def run_engine(
    prompt, length, max_num_seqs, budget, budget_edges, batches, contexts, seconds, prefill_s,
    survival, survival_edges, right, offset, tail_threshold, seed,
):  # fmt: skip
    """Simulate one engine.

    Args:
        prompt, length: int64[n], tokens of prompt and response, in order of arrival.
        max_num_seqs: requests that the engine runs at once.
        budget: int64[R + 1, E], drafts a request by running requests and context.
        budget_edges: float64[E], left ends of the contexts of `budget`, from 0 on.
        batches, contexts, seconds, prefill_s: `StepCosts`.
        survival: float64[S, K], chance that at least j + 1 drafts are accepted.
        survival_edges: float64[S], left ends of the contexts of `survival`, from 0 on.
        right: int8[T], exact number of right drafts at a token, instead of chances; empty if none.
        offset: int64[n], where a response's tokens begin in `right`.
        tail_threshold: at most so many run and none waits: the long tail.
        seed: of the draws.

    Returns:
        sums float64[SUMS], ends float64[n], log float64[rows, 2]:
        time and number of running requests, whenever that changes.
    """
    n = len(length)
    sums = np.zeros(SUMS)
    ends = np.zeros(n)
    log = np.empty((2 * n + 2, 2))  # a request begins and ends once
    logged = 0
    run = np.empty(max_num_seqs, np.int64)
    done = np.zeros(n, np.int64)
    top = budget.shape[0] - 1
    arrived, running = 0, 0
    text = 0  # known tokens of all running requests
    time = 0.0
    while True:
        joined = 0
        while arrived < n and running < max_num_seqs:
            run[running] = arrived
            running += 1
            done[arrived] = 1  # computing the prompt yields the first token
            text += prompt[arrived] + 1
            joined += prompt[arrived]
            arrived += 1
        if running == 0:
            break
        if joined > 0:
            time += joined * prefill_s
            sums[TIME] += joined * prefill_s
            was = running
            running, text = _finish(run, running, text, prompt, length, done, ends, time)
            if running < was:
                continue  # responses of one token: others may join
        k = budget[min(running, top), _bin(text / running, budget_edges)]
        if logged == 0 or running != log[logged - 1, 1]:
            log[logged, 0], log[logged, 1] = time, running
            logged += 1
        tail = running <= tail_threshold and arrived == n
        if k > 0:
            leap = 1
            spent = step_seconds(batches, contexts, seconds, running, k, text / running)
            for s in range(running):
                i = run[s]
                if len(right) > 0:
                    accepted = min(k, right[offset[i] + done[i]])
                else:
                    chances = survival[_bin(prompt[i] + done[i], survival_edges)]
                    accepted = _drawn(chances, k, _hash_uniform(seed, i, done[i]))
                got = min(accepted + 1, length[i] - done[i])
                done[i] += got
                text += got
                sums[ACCEPTED] += accepted
            sums[VERIFY_STEPS] += 1
            sums[ROW_STEPS] += running
            sums[DRAFTED] += k * running
        else:
            leap = MAX_LEAP
            for s in range(running):
                leap = min(leap, length[run[s]] - done[run[s]])
            leap = max(leap, 1)
            context = text / running + 0.5 * (leap - 1)
            spent = leap * step_seconds(batches, contexts, seconds, running, 0, context)
            for s in range(running):
                i = run[s]
                got = min(leap, length[i] - done[i])
                done[i] += got
                text += got
        time += spent
        sums[TIME] += spent
        sums[STEPS] += leap
        if tail:
            sums[TAIL_TIME] += spent
        running, text = _finish(run, running, text, prompt, length, done, ends, time)
    log[logged, 0], log[logged, 1] = time, 0
    return sums, ends, log[: logged + 1]
