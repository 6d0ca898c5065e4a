"""What tests of deploy/ share. Run as a module, it writes deploy/kubernetes/kvstore.yaml anew from the chart:

python -m tests.deploy.support
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.terraform.support import environment

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvstore"
MANIFEST = DEPLOY / "kubernetes" / "kvstore.yaml"
VERSIONS = ("1.27", "1.33", "1.37")
"""Of Kubernetes: the oldest that the chart admits, one in between, the newest that there are schemas of."""

_HEAD = """\
# Made from the chart with its defaults: python -m tests.deploy.support (or helm template kvstore deploy/helm/kvstore
# --namespace kvstore). A test compares the two. Change values by a kustomization above deploy/kubernetes, or use Helm.
"""
_ORDER = ("ServiceAccount", "ConfigMap", "Service", "DaemonSet", "Deployment")


def python() -> Path:
    """The Python of the environment that checks deploy/; see requirements.txt. Skips the test, or fails it with
    $TERRAFORM_CHECKS=required, where it cannot be made."""
    return environment("../deploy/requirements.txt", given=os.environ.get("DEPLOY_CHECKS_VENV"))


def child(do: str, **ask: Any) -> Any:
    """What `child.py` says."""
    command = [str(python()), "-B", str(Path(__file__).with_name("child.py"))]
    done = subprocess.run(
        command, input=json.dumps({"do": do, **ask}), capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(
    *values: Mapping[str, Any], name: str = "kvstore", namespace: str = "kvstore"
) -> list[dict[str, Any]]:  # fmt: skip
    """The chart with each of `values`: documents, notes, error, and what Kubernetes' schemas say against them."""
    cases = [{"values": dict(each), "name": name, "namespace": namespace} for each in values]
    found: list[dict[str, Any]] = child("render", chart=str(CHART), cases=cases, versions=VERSIONS)
    return found


def of_kind(documents: Sequence[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The only document of this kind (and name)."""
    (found,) = [
        each for each in documents if each["kind"] == kind and (not name or each["metadata"]["name"] == name)
    ]  # fmt: skip
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def running(words: Sequence[str], env: Mapping[str, str] = {}) -> Iterator[subprocess.Popen[str]]:
    """`kvstore WORDS` in a process of its own; it must end with 0 at SIGTERM."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    path = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore_cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=30)[1]
        yield process
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def ask(url: str, token: str = "") -> tuple[int, str]:
    """Status and body of a GET, an error's too."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until(url: str, *, status: int = 200, seconds: float = 30.0) -> str:
    """The body of a GET, once it has this status."""
    end = time.monotonic() + seconds
    while True:
        found, body = ask(url)
        if found == status:
            return body
        assert time.monotonic() < end, f"{url} answers {found}: {body}"
        time.sleep(0.05)


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

if __name__ == "__main__":
    (case,) = rendered({})
    assert case["error"] is None, case["error"]
    documents = sorted(case["documents"], key=lambda each: _ORDER.index(each["kind"]))
    MANIFEST.write_text(_HEAD + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120))
