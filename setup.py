"""Compiles the CPU kernels while pip installs or builds the package; pyproject.toml has the rest.

Where that can't be done, one line says so and the package goes without: the engine then computes with torch alone.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

NATIVE = Path("pdserve/engine/native")
spec = importlib.util.spec_from_file_location("kernel_build", NATIVE / "build.py")
assert spec is not None and spec.loader is not None
kernel_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel_build)


class BuildKernels(Command):
    """A step of `build`, by setuptools' SubCommand protocol."""

    description = "compile the CPU kernels"
    user_options = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None  # what isn't None counts as set
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        assert self.build_lib is not None
        why = kernel_build.compile_into(NATIVE if self.editable_mode else Path(self.build_lib) / NATIVE)
        if why:
            print(f"pdserve: no compiled kernels, the engine will use torch's: {why}", file=sys.stderr)

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(Path.cwd())) for path in kernel_build.sources()]

    def get_outputs(self) -> list[str]:
        return []  # what could not be compiled must not be missed

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]


class PlatformWheel(bdist_wheel):
    """For one kind of machine, and any Python 3: nothing in it is built against Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": PlatformWheel})
