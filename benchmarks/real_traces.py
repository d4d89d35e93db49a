"""Rebuilds, from public repositories, the sets of real responses that drafters are measured on.

    git clone https://github.com/OWNER/NAME CLONES/NAME    # for each repository of `SOURCES`
    python -m benchmarks.real_traces CLONES --output FOLDER
    sam-rollout bench drafter --traces FOLDER --json benchmarks/results/drafter.json

The sets are not part of this project, because licences differ. A rebuilt set has the same token ids
as the set that was measured. Texts are read from the commit that `SOURCES` names, even if another
commit is checked out. All texts are tokenized with tekken (131k tokens, a file of mistral-common)
instead of the models' own tokenizers. Responses of `ta_r1distill` begin with the question, as in
the repository's files.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TOKENIZER = "tekken_240911.json"

# A response: group, sibling, step, parts of the prompt (to be tokenized one by one), text.
Response = tuple[str, int, int, tuple[str, ...], str]


@dataclass(frozen=True)
class Clone:
    folder: Path
    commit: str

    def load(self, path: str) -> Any:
        return json.loads(self._git("show", f"{self.commit}:{path}"))

    def paths(self) -> list[str]:
        return self._git("ls-tree", "-r", "--name-only", self.commit).splitlines()

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(self.folder), *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{self.folder}: {done.stderr.strip()}")
        return done.stdout


@dataclass(frozen=True)
class Source:
    """The origin of a set, and the function that reads its responses."""

    repository: str  # owner/name on GitHub
    commit: str
    files: str
    model: str
    sampling: str
    licence: str
    read: Callable[[Clone], Iterator[Response]]


def _question(text: str) -> tuple[str, str]:
    return f"<|user|>\n{text}", "\n<|assistant|>\n"


def _thought_anchors(clone: Clone) -> Iterator[Response]:
    numbers = [re.fullmatch(r"cots/problem_(\d+)/solutions\.json", path) for path in clone.paths()]
    for number in sorted(int(found[1]) for found in numbers if found)[::12]:
        folder = f"cots/problem_{number}"
        prompt = _question(clone.load(f"{folder}/problem.json")["question"])
        for sibling, solution in enumerate(clone.load(f"{folder}/solutions.json")):
            yield f"problem_{number}", sibling, 0, prompt, solution["solution"]


def _reasoning_gym(clone: Clone) -> Iterator[Response]:
    """Yield 16 of the 50 responses to every second problem."""
    folder = "reasoninggym-paper-experiments/math-evals/llama-3b-instruct"
    for step, run in ((400, "vllm_20250502_081607"), (800, "vllm_20250502_090637")):
        found = clone.load(f"{folder}/step_{step}/aime2024/{run}/results.json")
        problems = found["categories"][0]["datasets"][0]["results"]
        for number, problem in list(enumerate(problems))[::2]:
            prompt = _question(problem["question"])
            for sibling, one in enumerate(problem["completions"][:16]):
                yield f"aime24-{number}", sibling, step, prompt, one["full_model_response"]


def _misguided_attention(clone: Clone) -> Iterator[Response]:
    found = clone.load("eval/results_long_eval/output_queries_q3_30ba3-think.json")
    for query in found["results"][::3]:
        prompt = _question(query["prompt"])
        for sibling, (thought, said) in enumerate(
            zip(query["thinking"], query["output"], strict=True)
        ):
            yield query["prompt_id"], sibling, 0, prompt, f"<think>\n{thought}\n</think>\n\n{said}"


def _tau_bench(clone: Clone) -> Iterator[Response]:
    """Yield the agent's turns in every fifth task; a turn's prompt is the conversation so far."""
    for conversation in clone.load("historical_trajectories/gpt-4o-airline.json"):
        task, trial = conversation["task_id"], conversation["trial"]
        if task % 5:
            continue
        said, turn = "", 0
        for message in conversation["traj"]:
            text, is_agent = _turn(message), message["role"] == "assistant"
            said += f"<|{message['role']}|>\n"
            if is_agent:
                yield f"tau-{task}", trial, turn, (said,), text
            turn += is_agent
            said += text


def _turn(message: dict[str, Any]) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", '
        f'"arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in message.get("tool_calls") or ()
    ]
    return "".join([message["content"] or "", *calls, "<|end|>\n"])


SOURCES = {
    "ta_r1distill": Source(
        "interp-reasoning/thought-anchors", "e5c4c1d5990d8bf7a91f828e443a1c3cf853036c",
        "cots/*/solutions.json", "R1-Distill", "T = 0.6, general reasoning", "MIT",
        _thought_anchors,
    ),
    "rg_llama3b": Source(
        "open-thought/reasoning-gym-eval", "5f09fecc342a25d693895b7304a9dec43b47f436",
        "reasoninggym-paper-experiments/math-evals/llama-3b-instruct/step_*/aime2024",
        "Llama-3B in RL", "T = 0.6, AIME 2024; after 800 steps, before them after 400",
        "Apache-2.0", _reasoning_gym,
    ),
    "ma_qwen3_30b": Source(
        "cpldcpu/MisguidedAttention", "bbae011e1fb5ce239373cb2f381787baec0dd236",
        "eval/results_long_eval/output_queries_q3_30ba3-think.json", "Qwen3-30B-A3B, thinking",
        "default T of the API, riddles", "CC0-1.0", _misguided_attention,
    ),
    "tau_gpt4o": Source(
        "sierra-research/tau-bench", "59a200c6d575d595120f1cb70fea53cef0632f6b",
        "historical_trajectories/gpt-4o-airline.json", "gpt-4o agent", "T not stated, airline",
        "MIT", _tau_bench,
    ),
}  # fmt: skip


def load_tokenizer() -> Callable[[str], list[int]]:
    """Return a function from text to token ids, without begin and end tokens."""
    try:
        import mistral_common
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    except ImportError:
        sys.exit("the tokenizer is missing: pip install --target DIR mistral-common, then run "
                 "with PYTHONPATH=DIR")  # fmt: skip
    file = Path(mistral_common.__file__).parent / "data" / TOKENIZER
    return partial(Tekkenizer.from_file(file).encode, bos=False, eos=False)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("clones", type=Path, help="folder with a clone of each repository")
    options.add_argument("--output", type=Path, required=True, help="folder for the sets")
    arguments = options.parse_args()
    encode = load_tokenizer()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        clone = Clone(arguments.clones / source.repository.split("/")[1], source.commit)
        count = 0
        with (arguments.output / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for group, sibling, step, prompt, response in source.read(clone):
                entry = {
                    "group": group, "sibling": sibling, "step": step,
                    "prompt": [token for piece in prompt for token in encode(piece)],
                    "response": encode(response),
                }  # fmt: skip
                file.write(json.dumps(entry) + "\n")
                count += 1
        print(f"{name}: {count} responses", flush=True)


if __name__ == "__main__":
    main()
