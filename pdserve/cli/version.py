"""`pdserve version`."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import pdserve
from pdserve.engine.native.build import installed

DESCRIPTION = (
    "Prints the versions of pdserve, of Python, and of the packages that matter in a bug report, and which compiled "
    "kernels are installed."
)
_PACKAGES = ("torch", "grpcio", "protobuf", "tokenizers", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(arguments: argparse.Namespace) -> int:
    """Print them; nothing heavy is imported for it."""
    print(f"pdserve {pdserve.__version__}")
    print(f"python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} not installed")
    print(f"kernels {', '.join(installed()) or 'not installed'}")
    return 0
