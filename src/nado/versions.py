"""Versions of what a result depends on, for manifests and reports."""

import platform
from importlib.metadata import PackageNotFoundError, version

from nado import __version__


def versions() -> dict[str, str]:
    """nado's own version, Python's and those of the packages that can change a number."""
    found = {"nado": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers", "numpy", "pyarrow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
