"""What gpu_nodes makes of its variables: user data of several kinds of nodes, rendered by one run; and a root folder
with doubles of the programs that it calls."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

from tests.terraform.support import MODULES, check, load, outputs, variables

SECRETS: dict[str, Any] = {
    "config": {
        "config_yaml": {
            "use1-az4": 'tiers: ["node:///run/kvstore/node.sock"]\nremote_url: s3://acme-kv/kv?region=us-east-1\n'
        },
        "node_yaml": "unix: /run/kvstore/node.sock\nmemory: 1GiB\ndisk: file:///nvme/kv?bytes=1GiB\n",
        "model": {
            "id": "Qwen/Qwen2.5-7B-Instruct",
            "args": ["--max-model-len", "16384", "--served-model-name", "it's"],
        },
    },
    "node-token": "n0de-t0ken",
    "valkey": {"username": "kv-test-kvstore", "password": "p4ssw0rd"},
}
_BASE: dict[str, Any] = {
    **load(variables("gpu_nodes")), "instance_type": "g5.xlarge", "efa": False, "mount": None,
    "valkey_secret_arn": None, "engine": {"name": "vllm", "package": "vllm==0.32.0"}, "package": "s3://acme-artifacts/kvstore/wheels/",
    "alternative_types": [],
}  # fmt: skip
_TOKEN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:kv-test/node-token-AbCdEf"
CASES: dict[str, dict[str, Any]] = {
    "wheels": {},
    "wheel": {
        "package": "s3://acme-artifacts/kvstore-0.1.0-py3-none-any.whl",
        "node_token_secret_arn": _TOKEN,
        "valkey_secret_arn": load(variables("gpu_nodes"))["valkey_secret_arn"],
        "mount": {"type": "lustre", "source": "fs-1.fsx.us-east-1.amazonaws.com@tcp:/abc", "options": "relatime,flock"},
    },
    "image": {**load(variables("gpu_nodes"))},
    "alone": {"engine": {"name": "none"}},
}


def render(folder: Path) -> dict[str, str]:
    """User data by case. `folder`: an empty one to work in."""
    for module in ("gpu_nodes", "efa"):
        shutil.copytree(MODULES / module, folder / "modules" / module, ignore=shutil.ignore_patterns("tests"))
    root = folder / "root"
    root.mkdir()
    for case, more in CASES.items():
        values = {name: value for name, value in {**_BASE, **more}.items() if value is not None}
        lines = [f"  {name} = {json.dumps(value)}" for name, value in values.items()]  # JSON is an expression, too
        (root / f"{case}.tf").write_text(
            f'module "{case}" {{\n  source = "../modules/gpu_nodes"\n' + "\n".join(lines) + "\n}\n"
            f'output "{case}" {{\n  value = module.{case}.user_data\n}}\n'
        )
    saved = folder / "saved"
    saved.mkdir()
    checked = check(root, f"--save={saved}", steps=("init", "plan", "apply"))
    assert checked.code == 0, checked.said
    made: dict[str, str] = outputs(load(saved / "state.json"))
    return made


class Machine:
    """A folder that stands for a machine's root, doubles of programs, and a record of what was called."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.programs = folder / "bin"
        self.calls = folder / "calls"
        for made in (self.root, self.programs):
            made.mkdir(parents=True)
        for program in ("useradd", "dnf", "docker", "mdadm", "mkfs.xfs", "mount", "systemctl", "sleep", "curl", "chmod",
                        "amazon-cloudwatch-agent-ctl", "id"):  # fmt: skip
            self.double(program)
        self.double("mountpoint", "exit 1")
        self.double("blkid", "exit 2")
        # Owners are not there, and changing them is not for a test.
        self.double(
            "install",
            'a=(); while [ $# -gt 0 ]; do case "$1" in -o|-g) shift 2;; *) a+=("$1"); shift;; esac; done; '
            'exec /usr/bin/install "${a[@]}"',
        )

    def double(self, program: str, script: str = "exit 0") -> None:
        """Let `program` be a bash script. Its words are recorded, each in one line of `calls`."""
        path = self.programs / program
        path.write_text(
            f'#!/bin/bash\nprintf "%s\\n" "$(printf "%q " {shlex.quote(program)} "$@")" >>{self.calls}\n{script}\n'
        )
        path.chmod(0o755)

    def cloud(self, zone: str, secrets: dict[str, Any], *, fails: int = 0) -> None:
        """AWS: the metadata service, and secrets by a word of their ARN; each is refused `fails` times first."""
        self.double(
            "curl",
            'case "$*" in *"-X PUT"*) echo imds-token;; '
            f'*"imds-token"*availability-zone-id) echo {zone};; *) exit 22;; esac',
        )
        answers = self.programs / "secrets"
        answers.mkdir()
        for name, value in secrets.items():
            (answers / name).write_text(value if isinstance(value, str) else json.dumps(value))
        self.double(
            "aws",
            f"""
[ "$1 $2" = "secretsmanager get-secret-value" ] || exit 0
for name in {shlex.join(secrets)}; do
  case "$*" in *"/$name-"*)
    n=$(cat {answers}/$name.tries 2>/dev/null || echo 0); echo $((n + 1)) >{answers}/$name.tries
    [ "$n" -ge {fails} ] || exit 254
    cat {answers}/$name; exit 0;;
  esac
done
exit 254""",
        )

    def run(self, script: str, *steps: str) -> subprocess.CompletedProcess[str]:
        """The script's steps, with nothing but doubles and the system's own programs."""
        path = self.root.parent / "user_data.sh"
        path.write_text(script)
        env = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "KVSTORE_BOOT_ROOT": str(self.root),
            "TMPDIR": str(self.root.parent),
        }
        return subprocess.run(
            ["bash", str(path), *steps], env=env, check=False, capture_output=True, text=True, timeout=60
        )

    def called(self, program: str) -> list[list[str]]:
        """The words of each call of `program`."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [words[1:] for line in lines if (words := shlex.split(line))[0] == program]

    def mode(self, path: str) -> int:
        return stat.S_IMODE(os.stat(self.root / path).st_mode)
