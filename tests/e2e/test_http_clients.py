"""Clients of the field, as they come from the package index, against `pdserve up`.

They are in a virtual environment of their own, `.venv-clients`, which `make test-http-clients` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
MODEL = "fake"
LIMIT_S = 240

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-http-clients installs them"),
]

LANGCHAIN = """
from langchain_openai import ChatOpenAI, OpenAI
chat = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=12, max_retries=0)
say("chat", chat.invoke("What is the capital of France?").content)
say("parts", "".join(part.content for part in chat.stream("What is the capital of France?")))
say("usage", chat.invoke("Hi").usage_metadata["output_tokens"])
text = OpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=5, max_retries=0)
say("batch", text.batch(["One, two,", "Paris is"]))
"""
LITELLM = """
import litellm
asked = dict(model=f"openai/{model}", api_base=url, api_key="none", temperature=0, max_tokens=12)
question = [{"role": "user", "content": "What is the capital of France?"}]
say("chat", litellm.completion(messages=question, **asked).choices[0].message.content)
stream = litellm.completion(messages=question, stream=True, **asked)
say("parts", "".join(part.choices[0].delta.content or "" for part in stream))
try:
    litellm.completion(messages=question, **{**asked, "temperature": -1})
except litellm.BadRequestError as error:
    say("refused", "temperature" in str(error))
"""
HEAD = """
import json, sys
url, model = sys.argv[1:]
def say(name, value):
    print(json.dumps([name, value]), flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("clients"), "--engine", "fake") as made:
        yield made


def run(cluster: LocalCluster, script: str) -> dict[str, Any]:
    """What a script said, by name."""
    words = [str(PYTHON), "-c", HEAD + script, f"{cluster.http}/v1", MODEL]
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would look for one in the network
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def test_langchain(cluster: LocalCluster) -> None:
    said = run(cluster, LANGCHAIN)
    assert len(said["chat"]) == 12 and said["parts"] == said["chat"]
    assert 1 <= said["usage"] <= 12
    assert len(said["batch"]) == 2 and all(said["batch"])


def test_litellm(cluster: LocalCluster) -> None:
    said = run(cluster, LITELLM)
    assert len(said["chat"]) == 12 and said["parts"] == said["chat"]
    assert said["refused"] is True
