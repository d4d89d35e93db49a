"""The releases of verl, vLLM and vllm-ascend for which sam_rollout is made (`upstream.toml`)."""

import tomllib
from pathlib import Path

FILE = Path(__file__).with_name("upstream.toml")
#: Import name of a package -> its releases, oldest first.
MADE_FOR: dict[str, list[str]] = tomllib.loads(FILE.read_text(encoding="utf-8"))
