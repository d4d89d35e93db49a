"""Find an installed package, or one in a source tree, without importing it.

    python find_package.py <distribution> [<folder with the package>]

Prints its version and the folder that holds it, on two lines; without a folder it looks where this
interpreter would import it from. Exits with 1 and one line when there is none, or no version to it.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path


def find_root(package: str, folder: str | None) -> Path | None:
    """The folder that holds the package, None where there is none."""
    if folder is not None:
        return Path(folder).resolve() if Path(folder, package, "__init__.py").is_file() else None
    spec = find_spec(package)
    # A folder that lost its __init__.py, as an uninstalled package may leave, has no origin.
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def find_version(distribution: str, root: Path, *, installed: bool) -> str | None:
    """The version from metadata beside the package, from inside it, or of the installed one."""
    package = distribution.replace("-", "_")
    for beside in distributions(path=[str(root)]):
        if (beside.metadata["Name"] or "").replace("-", "_").lower() == package:
            return beside.version
    generated = root / package / "_version.py"
    if generated.is_file():
        match = re.search(r"^__version__.*?['\"](.+?)['\"]", generated.read_text(), re.MULTILINE)
        if match:
            return match[1]
    try:
        # An editable install has its metadata elsewhere.
        return version(distribution) if installed else None
    except PackageNotFoundError:
        return None


def main(distribution: str, folder: str | None = None) -> int:
    """Print what was found; returns the exit status."""
    package = distribution.replace("-", "_")
    root = find_root(package, folder)
    if root is None:
        print(f"no package {package} in {folder or sys.prefix}", file=sys.stderr)
        return 1
    found = find_version(distribution, root, installed=folder is None)
    if found is None:
        print(f"{root}/{package} says nowhere which version it is", file=sys.stderr)
        return 1
    print(found.partition("+")[0], root, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
