"""The loop of the simulation: one server's engines from their first step to their last.

Between two events (a response ends or joins, a gate opens or shuts) the batch is constant. While
no gate is open all steps up to the next event are taken at once; while one is open, step by step,
because every request then advances by a number of its own. Compiled with numba.

The engines of one server step together and wait for the slowest (expert parallelism makes data
parallel engines do so); a server of one engine is the ordinary case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, uint64

MAX_LEAP = 256  # steps taken at once at most: contexts, and with them costs and gates, move on
BLOCK = 16  # tokens of a block of the KV cache, as vLLM sets free for every running request

# Columns of the sums that a run returns.
TIME, TAIL_TIME, STEPS, TAIL_STEPS, VERIFY_STEPS, ROW_STEPS, DRAFTED, ACCEPTED, PREEMPTED = range(9)
SUMS = 9
# Columns of the log: one row whenever the number of running requests or the gate changes.
LOG_TIME, LOG_RUNNING, LOG_OPEN = range(3)


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
def _queues(engine, engines):
    """Requests engine by engine, in order of arrival, and where each engine's begin."""
    queue = np.empty(len(engine), np.int64)
    begin = np.zeros(engines + 1, np.int64)
    for e in engine:
        begin[e + 1] += 1
    for e in range(engines):
        begin[e + 1] += begin[e]
    fill = begin.copy()
    for i in range(len(engine)):
        queue[fill[engine[i]]] = i
        fill[engine[i]] += 1
    return queue, begin


@_compiled
def _drawn(chances, k, u):
    """How many of k drafts are accepted: as many as have a chance above `u`."""
    accepted = 0
    while accepted < k and u < chances[accepted]:
        accepted += 1
    return accepted


@_compiled
def _last_to_join(run, order, running, engine, crowded):
    """Slot of the request that joined an engine last."""
    out = -1
    for s in range(running):
        if engine[run[s]] == crowded and (out < 0 or order[s] > order[out]):
            out = s
    return out


@_compiled
def _finish(run, order, running, engine, prompt, length, done, rows, text, ends, time):
    """Take out the requests that have all their tokens; returns how many still run."""
    s = 0
    while s < running:
        i = run[s]
        if done[i] >= length[i]:
            ends[i] = time
            rows[engine[i]] -= 1
            text[engine[i]] -= prompt[i] + done[i]
            running -= 1
            run[s], order[s] = run[running], order[running]
        else:
            s += 1
    return running


@_compiled
def run_server(
    engine, prompt, length, kind, engines, max_num_seqs, kv_tokens,
    agreed, budget, budget_edges, batches, contexts, seconds, prefill_s,
    survival, survival_edges, right, offset, tail_threshold, seed,
):  # fmt: skip
    """Simulate one server.

    Args:
        engine: int64[n], engine of each request, in order of arrival.
        prompt, length: int64[n], tokens of prompt and response.
        kind: int64[n], first index into `survival`.
        engines: engines of the server.
        max_num_seqs: requests that one engine runs at once.
        kv_tokens: tokens that one engine's KV cache holds; 0 for no limit.
        agreed: whether the budget of the busiest engine holds for all, the first among equals.
        budget: int64[R + 1, E], drafts a request by running requests and context.
        budget_edges: float64[E], left ends of the contexts of `budget`, from 0 on.
        batches, contexts, seconds, prefill_s: `StepCosts`.
        survival: float64[kinds, S, K], chance that at least j + 1 drafts are accepted.
        survival_edges: float64[S], left ends of the contexts of `survival`, from 0 on.
        right: int8[T], exact number of right drafts at a token, instead of chances; empty if none.
        offset: int64[n], where a response's tokens begin in `right`; -1 for none.
        tail_threshold: at most so many run in every engine, and none waits: the long tail.
        seed: of the draws.

    Returns:
        sums float64[SUMS], ends float64[n], log float64[rows, 3].
    """
    n = len(length)
    sums = np.zeros(SUMS)
    ends = np.zeros(n)
    log = np.empty((4 * n + 64, 3))
    logged = 0
    queue, begin = _queues(engine, engines)
    head = begin[:-1].copy()
    preempted = np.empty(n, np.int64)  # last one first
    num_preempted = 0
    slots = engines * max_num_seqs
    run = np.empty(slots, np.int64)
    order = np.empty(slots, np.int64)  # when a slot was filled: the last one is preempted first
    admitted = 0
    running = 0
    done = np.zeros(n, np.int64)
    rows = np.zeros(engines, np.int64)
    text = np.zeros(engines, np.int64)  # known tokens of all rows of an engine
    ks = np.zeros(engines, np.int64)
    joined = np.zeros(engines, np.int64)
    top = budget.shape[0] - 1
    # Room that whoever joins leaves each request: at least a step's, or it would be put out again.
    spare = max(BLOCK, budget.max() + 1)
    time = 0.0
    last_running, last_open = -1, -1
    while True:
        # Who joins: those that were preempted, then the queue, as far as memory lasts.
        joined[:] = 0
        full = False
        for pick in range(num_preempted - 1, -1, -1):
            i = preempted[pick]
            e = engine[i]
            known = prompt[i] + done[i]
            if rows[e] >= max_num_seqs or (
                kv_tokens > 0
                and rows[e] > 0
                and text[e] + known + spare * (rows[e] + 1) > kv_tokens
            ):
                full = True
                break
            run[running], order[running] = i, admitted
            admitted += 1
            running += 1
            rows[e] += 1
            text[e] += known
            joined[e] += known
            num_preempted -= 1
        if not full:
            for e in range(engines):
                while head[e] < begin[e + 1] and rows[e] < max_num_seqs:
                    i = queue[head[e]]
                    if (
                        kv_tokens > 0
                        and rows[e] > 0
                        and (text[e] + prompt[i] + spare * (rows[e] + 1) > kv_tokens)
                    ):
                        break
                    head[e] += 1
                    run[running], order[running] = i, admitted
                    admitted += 1
                    running += 1
                    rows[e] += 1
                    done[i] = 1  # computing the prompt yields the first token
                    text[e] += prompt[i] + 1
                    joined[e] += prompt[i]
        if running == 0:
            break
        slowest = 0
        for e in range(engines):
            slowest = max(slowest, joined[e])
        if slowest > 0:
            time += slowest * prefill_s
            sums[TIME] += slowest * prefill_s
            was = running
            running = _finish(
                run, order, running, engine, prompt, length, done, rows, text, ends, time
            )
            if running < was:
                continue  # responses of one token: others may join
        # Which gates are open.
        is_open = 0
        k_max = 0
        most = 0
        busiest = 0
        waits = num_preempted > 0
        for e in range(engines):
            ks[e] = 0
            if rows[e] > most:
                most, busiest = rows[e], e
            waits = waits or head[e] < begin[e + 1]
            if rows[e] > 0:
                ks[e] = budget[min(rows[e], top), _bin(text[e] / rows[e], budget_edges)]
        for e in range(engines):
            if agreed and rows[e] > 0:
                ks[e] = ks[busiest]
            if ks[e] > 0:
                is_open = 1
                k_max = max(k_max, ks[e])
        if (running != last_running or is_open != last_open) and logged < len(log):
            log[logged, LOG_TIME] = time
            log[logged, LOG_RUNNING] = running
            log[logged, LOG_OPEN] = is_open
            logged += 1
            last_running, last_open = running, is_open
        tail = most <= tail_threshold and not waits
        # How many steps the KV cache allows; without room, the last to join leaves.
        leap = MAX_LEAP
        crowded = -1
        if kv_tokens > 0:
            for e in range(engines):
                if rows[e] > 1:
                    room = (kv_tokens - text[e]) // (rows[e] * (k_max + 1))
                    if room < 1:
                        crowded = e
                    leap = min(leap, room)
        if crowded >= 0:
            out = _last_to_join(run, order, running, engine, crowded)
            i = run[out]
            rows[crowded] -= 1
            text[crowded] -= prompt[i] + done[i]
            preempted[num_preempted] = i
            num_preempted += 1
            sums[PREEMPTED] += 1
            running -= 1
            run[out], order[out] = run[running], order[running]
            continue
        leap = max(leap, 1)
        if is_open:
            step = 0.0
            for e in range(engines):
                if rows[e] > 0:
                    step = max(
                        step,
                        step_seconds(batches, contexts, seconds, rows[e], ks[e], text[e] / rows[e]),
                    )
            for s in range(running):
                i = run[s]
                e = engine[i]
                k = ks[e]
                accepted = 0
                if k > 0:
                    if len(right) > 0 and offset[i] >= 0:
                        accepted = min(k, right[offset[i] + done[i]])
                    else:
                        chances = survival[kind[i], _bin(prompt[i] + done[i], survival_edges)]
                        accepted = _drawn(chances, k, _hash_uniform(seed, i, done[i]))
                    sums[ROW_STEPS] += 1
                    sums[DRAFTED] += k
                    sums[ACCEPTED] += accepted
                got = min(accepted + 1, length[i] - done[i])
                done[i] += got
                text[e] += got
            leap = 1
            time += step
            sums[VERIFY_STEPS] += 1
            spent = step
        else:
            for s in range(running):
                leap = min(leap, length[run[s]] - done[run[s]])
            leap = max(leap, 1)
            step = 0.0
            for e in range(engines):
                if rows[e] > 0:
                    context = text[e] / rows[e] + 0.5 * (leap - 1)
                    step = max(step, step_seconds(batches, contexts, seconds, rows[e], 0, context))
            for s in range(running):
                i = run[s]
                got = min(leap, length[i] - done[i])
                done[i] += got
                text[engine[i]] += got
            spent = step * leap
            time += spent
        sums[TIME] += spent
        sums[STEPS] += leap
        if tail:
            sums[TAIL_TIME] += spent
            sums[TAIL_STEPS] += leap
        running = _finish(run, order, running, engine, prompt, length, done, rows, text, ends, time)
    if logged < len(log):
        log[logged, LOG_TIME] = time
        log[logged, LOG_RUNNING] = 0
        log[logged, LOG_OPEN] = 0
        logged += 1
    return sums, ends, log[:logged]
