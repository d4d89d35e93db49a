"""Finds a package, installed or in a source tree, without importing it.

    python find_package.py <distribution> [<folder with the package>]

The program prints the version and the folder that contains the package, on two lines. If it finds
no package or no version, it prints one line and exits with 1.
"""

import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path


def main(distribution: str, folder: str | None = None) -> None:
    package = distribution.replace("-", "_")
    if folder is not None:
        root = Path(folder).resolve() if Path(folder, package, "__init__.py").is_file() else None
    else:
        spec = find_spec(package)
        # An uninstalled package may leave a folder without __init__.py, whose spec has no origin.
        root = Path(spec.origin).parents[1] if spec and spec.origin else None
    if root is None:
        sys.exit(f"no package {package} in {folder or sys.prefix}")
    # The version may be in metadata beside the package, in _version.py, or in installed metadata.
    names = [(d.metadata["Name"] or "", d.version) for d in distributions(path=[str(root)])]
    found = dict((name.replace("-", "_").lower(), found) for name, found in names).get(package)
    generated = root / package / "_version.py"
    if found is None and generated.is_file():
        match = re.search(r"^__version__.*?['\"](.+?)['\"]", generated.read_text(), re.MULTILINE)
        found = match[1] if match else None
    if found is None and folder is None:
        with suppress(PackageNotFoundError):
            found = version(distribution)  # an editable install has its metadata elsewhere
    if found is None:
        sys.exit(f"{root}/{package} says nowhere which version it is")
    print(found.partition("+")[0], root, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
