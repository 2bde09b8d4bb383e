"""A Dockerfile read, and its steps run without Docker: each stage in a root of its own above this machine's.

Knows what deploy/images/Dockerfile uses, and refuses the rest. A stage begins as an empty folder laid over this
machine's root file system (overlayfs), which stands for the base images: Python 3.11 of Debian. RUN runs in it as root.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "images" / "Dockerfile"
_REFERENCE = re.compile(r"\$\{(\w+)\}")
# Debian's own is that of the runtime image; this one builds.
_BUILDER_PATH = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin"
# One lower layer only: the kernel refuses layers that contain each other.
MOUNT = """
set -e
mount -t overlay overlay -o "lowerdir=/,upperdir=$UPPER,workdir=$WORK" "$ROOT"
mount --rbind /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
"""


@dataclass(frozen=True)
class Stage:
    """What follows a FROM. args: declared in it, with their defaults."""

    name: str
    base: str
    steps: tuple[tuple[str, str], ...]


def copy_tree(source: Path, target: Path, *flags: str) -> None:
    """What is in one folder into another that is there; flags of cp."""
    subprocess.run(["cp", "-a", *flags, f"{source}/.", str(target)], check=True)


@dataclass
class Image:
    """A stage that was made.

    root  folder with all that differs from this machine's root
    """

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()


def read_stages(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Global arguments with their defaults, and stages by name."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    steps = [tuple(step.split(None, 1)) for step in "\n".join(lines).replace("\\\n", " ").splitlines()]
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for word, rest in steps:
        if word == "FROM":
            base, middle, name = rest.split()
            assert middle == "AS", rest
            stages[name] = Stage(name, base, ())
        elif not stages:
            assert word == "ARG", word
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            last = list(stages)[-1]
            stages[last] = Stage(last, stages[last].base, (*stages[last].steps, (word, rest)))
    return arguments, stages


class Builder:
    """Makes images of one Dockerfile; a stage that several need is made once.

    context    folder of COPY without --from
    folder     empty, where everything is written
    arguments  as docker build's --build-arg
    """

    def __init__(self, dockerfile: Path, context: Path, folder: Path, arguments: Mapping[str, str]) -> None:
        defaults, self._stages = read_stages(dockerfile.read_text(encoding="utf-8"))
        assert set(arguments) <= set(defaults)
        self._arguments = {**defaults, **arguments}
        self._context = context
        self._folder = folder
        self._made: dict[str, Image] = {}

    def image(self, name: str) -> Image:
        if name not in self._made:
            self._made[name] = self._make(self._stages[name])
        return self._made[name]

    def _make(self, stage: Stage) -> Image:
        root = self._folder / stage.name / "root"
        root.mkdir(parents=True)
        image = Image(root)
        if stage.base in self._stages:
            base = self.image(stage.base)
            copy_tree(base.root, root)
            image = replace(base, root=root, environ=dict(base.environ))
        else:
            assert _REFERENCE.fullmatch(stage.base), stage.base  # an image from outside, given by an argument
        given: dict[str, str] = {}
        for word, rest in stage.steps:
            match word:
                case "ARG":
                    given[rest] = self._arguments[rest]
                case "ENV":
                    image.environ |= dict(pair.split("=", 1) for pair in shlex.split(rest))
                case "WORKDIR":
                    image.workdir = rest
                    (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "USER":
                    image.user = rest
                case "ENTRYPOINT":
                    image.entrypoint = tuple(json.loads(rest))  # exec form only: no shell
                case "COPY":
                    self._copy(image, rest.split())
                case "RUN":
                    self._run(stage.name, image, rest, given)
                case _:
                    raise AssertionError(f"the tests can't run {word}")
        return image

    def _copy(self, image: Image, words: Sequence[str]) -> None:
        source_root = self._context
        if words[0].startswith("--from="):
            source_root = self.image(words[0].removeprefix("--from=")).root
            words = words[1:]
        *sources, target = words
        into = image.root / os.path.join(image.workdir, target).lstrip("/")
        for source in sources:
            found = source_root / source.lstrip("/")
            if found.is_dir():
                into.mkdir(parents=True, exist_ok=True)
                copy_tree(found, into)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)

    def _run(self, name: str, image: Image, command: str, arguments: Mapping[str, str]) -> None:
        scratch = self._folder / name
        for folder in ("work", "mounted"):
            (scratch / folder).mkdir(exist_ok=True)
        variables = {
            "UPPER": str(image.root),
            "WORK": str(scratch / "work"),
            "ROOT": str(scratch / "mounted"),
            "COMMAND": command,
            "WORKDIR": image.workdir,
        }
        script = MOUNT + 'exec chroot "$ROOT" /bin/sh -c "cd $WORKDIR && $COMMAND"'
        passed = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "/bin/sh", "-c", script],
            env={**passed, "HOME": "/root", "PATH": _BUILDER_PATH, **image.environ, **arguments, **variables},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
