"""Sets of real responses, rebuilt from repositories that look like the real ones."""

import json
import subprocess
from dataclasses import replace

import pytest

from benchmarks import real_traces
from sam_rollout.bench.traces import read_traces

ALGEBRA = "reasoninggym-paper-experiments/math-evals/llama-3b-instruct"
AGENT = [
    {"role": "system", "content": "rules"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None,
     "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "done"},
]  # fmt: skip
RESULTS = {
    "categories": [
        {"datasets": [{"results": [
            {"question": "q", "completions": [{"full_model_response": "re"}] * 20}
        ] * 3}]}
    ]
}  # fmt: skip
FILES = {
    "ta_r1distill": {
        f"cots/problem_{number}/{name}.json": content
        for number in range(13)
        for name, content in (
            ("problem", {"question": "q"}),
            ("solutions", [{"solution": "so"}] * 2),
        )
    },
    "rg_llama3b": {
        f"{ALGEBRA}/step_400/aime2024/vllm_20250502_081607/results.json": RESULTS,
        f"{ALGEBRA}/step_800/aime2024/vllm_20250502_090637/results.json": RESULTS,
    },
    "ma_qwen3_30b": {
        "eval/results_long_eval/output_queries_q3_30ba3-think.json": {
            "results": [
                {"prompt_id": str(i), "prompt": "q", "thinking": ["t"], "output": ["o"]}
                for i in range(4)
            ]
        },
    },
    "tau_gpt4o": {
        "historical_trajectories/gpt-4o-airline.json": [
            {"task_id": task, "trial": 0, "traj": AGENT} for task in range(6)
        ]
    },
}
# Prompts x responses to each, in all steps.
RESPONSES = {"ta_r1distill": 4, "rg_llama3b": 64, "ma_qwen3_30b": 2, "tau_gpt4o": 4}


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("name", real_traces.SOURCES)
def test_a_set_is_read_at_its_commit(name, tmp_path):
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], capture_output=True,
                              text=True, check=True)  # fmt: skip
        return done.stdout.strip()

    git("init", "-q")
    for path, content in FILES[name].items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    git("add", ".")
    git("commit", "-qm", "texts")
    source = replace(real_traces.SOURCES[name], commit=git("rev-parse", "HEAD"))
    for path in FILES[name]:  # what is checked out does not matter
        (tmp_path / path).unlink()
    lines = list(real_traces.rebuild(source, tmp_path, encode))
    (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    traces = read_traces(tmp_path / f"{name}.jsonl")
    assert len(traces) == RESPONSES[name]
    texts = [bytes(trace.tokens.tolist()).decode() for trace in traces]
    if name == "tau_gpt4o":
        assert texts[0] == "<|system|>\nrules<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n" + (
            '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|end|>\n'
        )
        assert texts[1].startswith(texts[0]) and texts[1].endswith("done<|end|>\n")
    else:
        assert texts[0].startswith("<|user|>\nq\n<|assistant|>\n")
    if name == "rg_llama3b":
        assert {trace.group for trace in traces if trace.step == 400} == {
            trace.group for trace in traces if trace.step == 800
        }


def test_a_clone_without_the_commit_is_named(tmp_path):
    source = real_traces.SOURCES["tau_gpt4o"]
    with pytest.raises(SystemExit, match=str(tmp_path)):
        list(real_traces.rebuild(source, tmp_path, encode))
