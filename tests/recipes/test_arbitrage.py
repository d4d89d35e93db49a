import asyncio

import numpy as np
import pandas as pd
import pytest

from benchmarks.results_page import over
from recipes.arbitrage import __main__ as command
from recipes.arbitrage.router import annotated, balance, calibrate, collect, labels, quality, train
from recipes.arbitrage.steps import DRAFT, TARGET, Solution, Step, choice_of, solve
from sam_rollout.core.identity import identify

LENGTHS = (3, 1, 2)  # number of steps of each answer


class Scripted:
    def __init__(self, name, slow=()):
        self.name = name
        self.slow = slow
        self.waiting = []
        self.asked = []

    async def write(self, solution, sample=0):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((solution, sample, answer))
        return await answer

    def work(self):
        others = [one for one in self.waiting if one[0].question not in self.slow]
        served = others or self.waiting
        self.waiting = [one for one in self.waiting if one not in served]
        if served:
            self.asked.append([solution.question for solution, _, _ in served])
        for solution, sample, answer in served:
            number = len(solution.steps)
            last = number + 1 == LENGTHS[int(solution.question)]
            answer.set_result(Step((sample,), f"{self.name}{number}\n", self.name, last))


def answers():
    return [
        Solution(str(n), [n], identify([n], seed=0, step=-1, sibling=0, split="val"))
        for n in range(len(LENGTHS))
    ]


def scored(table):
    async def score(_solution, step):
        return table.get(step.text, 0.5)

    return score


def solved(mode, tau=0.0, **judges):
    draft, target, solutions = Scripted(DRAFT), Scripted(TARGET), answers()
    solve(solutions, draft, choice_of(mode, tau, target, judges), [target, *judges.values()])
    return [one.text for one in solutions], draft, target


def test_answers_are_written_together_until_each_ends():
    author, solutions, ended = Scripted(DRAFT), answers(), []
    solve(solutions, author, progress=lambda: ended.append(len(author.asked)))
    assert author.asked == [["0", "1", "2"], ["0", "2"], ["0"]]
    assert ended == [1, 2, 3]
    assert [len(one.steps) for one in solutions] == list(LENGTHS)
    assert solutions[2].text == "draft0\ndraft1\n"
    assert solutions[2].tokens == [0, 0]


def test_no_answer_waits_for_a_long_step_of_another():
    author, solutions = Scripted(DRAFT, slow={"0"}), answers()
    solve(solutions, author)
    assert author.asked == [["1", "2"], ["2"], ["0"], ["0"], ["0"]]


def test_an_error_ends_the_answering():
    async def broken(_solution, _step):
        raise ValueError("no such question")

    with pytest.raises(ValueError, match="no such question"):
        solved("rsd", 0.5, reward=broken)


def test_rsd_rewrites_steps_of_low_reward():
    texts, _, target = solved("rsd", 0.5, reward=scored({"draft0\n": 0.4, "draft1\n": 0.5}))
    assert texts == ["target0\ndraft1\ndraft2\n", "target0\n", "target0\ndraft1\n"]
    assert target.asked == [["0", "1", "2"]]  # the target is asked only once


def test_the_router_sends_steps_above_its_threshold():
    texts, _, target = solved("router", 0.7, router=scored({"draft1\n": 0.8, "draft2\n": 0.7}))
    assert texts == ["draft0\ntarget1\ndraft2\n", "draft0\n", "draft0\ntarget1\n"]
    assert target.asked == [["0", "2"]]


def test_the_oracle_takes_the_better_step_and_the_draft_at_a_tie():
    rewards = {"draft0\n": 0.2, "target0\n": 0.9, "draft1\n": 0.6, "target1\n": 0.6}
    texts, _, target = solved("oracle", reward=scored(rewards))
    assert texts == ["target0\ndraft1\ndraft2\n", "target0\n", "target0\ndraft1\n"]
    assert [len(asked) for asked in target.asked] == [3, 2, 1]
    texts, _, _ = solved("oracle", 0.8, reward=scored(rewards))
    assert texts[1] == "draft0\n"  # the target's step is better, but not by more than tau


def test_collecting_averages_several_steps_of_the_target():
    draft, target, solutions = Scripted(DRAFT), Scripted(TARGET), answers()

    async def reward(_solution, step):  # of the target's two tries, the second is better
        return step.tokens[0] if step.author == TARGET else 0.4

    pairs = collect(solutions, draft, target, reward, samples=2, seed=1)
    assert len(pairs) == sum(LENGTHS)
    assert set(pairs["target"]) == {0.5}
    assert set(pairs["draft"]) == {0.4}
    assert labels(pairs).tolist() == [1] * 6
    assert pairs["problem"].nunique() == 3
    assert {step.author for one in solutions for step in one.steps} == {DRAFT, TARGET}


def test_the_router_reads_who_wrote_what():
    solution = answers()[0]
    solution.steps = [Step((1,), "one\n", TARGET, False)]
    text = annotated(solution, Step((2,), "two\n", DRAFT, False))
    assert text == "0\n[target] one\n[draft] two\n"


def made_pairs(count=200, better=0.2):
    rng = np.random.default_rng(3)
    gains = np.where(rng.random(count) < better, 0.5, 0.0)
    return pd.DataFrame(
        {
            "problem": [f"p{n // 10}" for n in range(count)],
            "text": [f"q\n[draft] {'no' if gain else 'yes'} {n}" for n, gain in enumerate(gains)],
            "draft": np.where(gains > 0, 0.5, 1.0),
            "target": 0.5 + np.where(gains > 0, 0.5, 0.5),
        }
    )


def test_balancing_keeps_the_rarer_label_whole():
    pairs = made_pairs()
    kept = balance(pairs)
    rare = int(labels(pairs).sum())
    assert labels(kept).value_counts().to_dict() == {0: rare, 1: rare}
    assert not kept.index.duplicated().any()
    with pytest.raises(ValueError, match="all of one label"):
        balance(pairs[labels(pairs) == 0])


def test_thresholds_send_the_share_that_was_asked():
    pairs = made_pairs().assign(chance=np.linspace(0, 1, 200))
    taus = calibrate(pairs, [0.1, 0.5])
    sent = [(pairs["chance"] > tau).mean() for tau in taus["router"]]
    assert sent == pytest.approx([0.1, 0.5], abs=0.01)
    low = float((pairs["draft"] < 1).mean())
    sent = [(pairs["draft"] < tau).mean() for tau in taus["rsd"]]
    assert sent == [pytest.approx(low), pytest.approx(low)]  # rewards take two values only
    (none, everything) = calibrate(pairs, [0.0, 0.9])["rsd"]
    assert (pairs["draft"] < none).sum() == 0
    assert (pairs["draft"] < everything).all()


def test_a_router_learns_what_a_text_shows(tmp_path):
    arguments = {"num_train_epochs": 6, "learning_rate": 1e-3}
    arguments |= {"use_cpu": True, "disable_tqdm": True}
    found = train(made_pairs(better=0.4), command.TINY_DRAFT, tmp_path / "router", **arguments)
    assert found["balanced_accuracy"] > 0.9
    held_out = pd.read_json(tmp_path / "router" / "held_out.jsonl", lines=True)
    assert quality(held_out) | {"trained": found["trained"]} == pytest.approx(found)
    assert (tmp_path / "router" / "model.safetensors").exists()


def row(mode, share, accuracy):
    return {"mode": mode, "target_share": share, "accuracy": {"value": accuracy}}


ROWS = [row("rsd", 0.5, 0.5), row("router", 0.25, 0.4), row("router", 0.75, 0.5)]
ROWS += [row(DRAFT, 0.0, 0.2), row(TARGET, 1.0, 0.6)]


def test_a_mode_is_held_against_another_at_its_own_share():
    (first, gained), (second, lost) = over(ROWS, "router", "rsd")
    assert (first, second) == (0.25, 0.75)
    assert gained == pytest.approx(0.4 - 0.35)
    assert lost == pytest.approx(0.5 - 0.55)
    ((_, behind),) = over(ROWS, "rsd", "router")
    assert behind == pytest.approx(0.5 - 0.45)


@pytest.mark.parametrize("mode", ["rsd", "router"])
def test_modes_with_thresholds_ask_for_the_router_in_one_line(mode, capsys):
    assert command.main(["report", "--modes", mode, "--limit", "2"]) == 2
    assert "error: --router: name its folder" in capsys.readouterr().err
