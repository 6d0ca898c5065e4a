"""What the three sizes give back: `remote_url` and `config_yaml` as our own configuration reads them, after an apply;
no secret in any state; wrong values refused with what to write instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.config import load_config
from kvstore.registry import parse_urls
from kvstore_cli.main import COMMANDS
from kvstore_cli.serve_options import load_settings
from tests.terraform.support import TERRAFORM, VARIABLES, check, load, outputs

_APPLY = ("init", "plan", "apply")


def variables_of(root: str) -> Path:
    return VARIABLES / "roots" / f"{root}.json"


def apply(root: str, folder: Path, *options: str) -> dict[str, Any]:
    """The state of a root after an apply."""
    checked = check(TERRAFORM / root, f"--var-file={variables_of(root)}", f"--save={folder}", *options, steps=_APPLY)
    assert checked.code == 0, checked.said
    state: dict[str, Any] = load(folder / "state.json")
    return state


def resources(state: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    todo = [state["values"]["root_module"]]
    while todo:
        module = todo.pop()
        found += [r["values"] for r in module.get("resources", []) if r["type"] == kind]
        todo += module.get("child_modules", [])
    return found


# The last tier is remote_url's, and the first one memory and disk of the node; what lies between depends on the size.
_TIERS = {
    "small": ["node", "s3"],
    "medium": ["node", "valkeys", "s3", "s3"],
    "large": ["node", "s3", "s3"],
}


def assert_configuration(root: str, state: dict[str, Any], tmp_path: Path) -> None:
    """The outputs are a configuration that kvstore takes, the nodes get the same, and no secret lies open."""
    given = outputs(state)
    by_zone = given.get("config_yaml_by_zone") or {"": given["config_yaml"]}
    assert given["config_yaml"] in by_zone.values()
    for zone, text in by_zone.items():
        path = tmp_path / f"{zone}.yaml"
        path.write_text(text)
        config = load_config(config_file=path, env={})
        assert [url.scheme for url in config.urls] == _TIERS[root]
        assert config.notes == ()
        assert "error: " not in config.describe()
        if "config" in COMMANDS:
            command = [sys.executable, "-m", "kvstore_cli", "config", "check", str(path)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr
    (url,) = parse_urls(given["remote_url"])
    assert url.base == load_config(config_file=tmp_path / f"{next(iter(by_zone))}.yaml", env={}).urls[-1].base
    assert url.options["region"] == "us-east-1"

    # The secret that nodes read holds the same, for each zone in which there are nodes, and a node that ours can be.
    stored = [
        json.loads(v["secret_string"])
        for v in resources(state, "aws_secretsmanager_secret_version")
        if v.get("secret_string")
    ]
    (config_secret,) = [secret for secret in stored if "config_yaml" in secret]
    zones = by_zone if root != "small" else dict.fromkeys(("use1-az4", "use1-az6"), given["config_yaml"])
    assert config_secret["config_yaml"] == zones
    node = yaml.safe_load(config_secret["node_yaml"])
    if "token_file" in node:
        node["token_file"] = str(tmp_path / "token")
        (tmp_path / "token").write_text("t0ken")
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node))
    settings = load_settings([], config_file=str(tmp_path / "node.yaml"), env={})
    assert settings.server["unix"] == "/run/kvstore/node.sock"

    # Tokens are written through: neither state nor plan has them.
    for version in resources(state, "aws_secretsmanager_secret_version"):
        assert not version.get("secret_string_wo")
    for group in resources(state, "aws_elasticache_replication_group"):
        assert not group.get("auth_token")
    assert not resources(state, "random_password")

    # Destroying takes no records along unless somebody said so.
    for kind in ("aws_s3_bucket", "aws_s3_directory_bucket"):
        assert all(bucket["force_destroy"] is False for bucket in resources(state, kind))


@pytest.mark.slow  # small's are looked at after its apply in test_end_to_end.py
@pytest.mark.parametrize("root", ["medium", "large"])
def test_outputs_are_a_configuration(root: str, tmp_path: Path) -> None:
    assert_configuration(root, apply(root, tmp_path), tmp_path)


_REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "zone without S3 Express": (
        "medium", {"zone_ids": ["use1-az1", "use1-az4"], "gpu_zone_ids": ["use1-az1"]},
        ["S3 Express does not exist in use1-az1", "write one of use1-az4"],
    ),
    "overlapping networks": (
        "small", {"peer_cidrs": ["10.60.0.0/20"]}, ["overlaps cidr (10.60.0.0/16)", "write another cidr, such as"],
    ),
    "services in the VPC": (
        "large", {"service_cidr": "10.60.0.0/20"},
        ["10.60.0.0/20 overlaps the VPC (10.60.0.0/16)", "such as 172.20.0.0/16"],
    ),
    "region without EFA": (
        "large", {"region": "eu-west-3", "zone_ids": ["euw3-az1", "euw3-az2"], "gpu_zone_ids": ["euw3-az1"]},
        ["g6.48xlarge, g5.48xlarge is not known to exist in eu-west-3", "write another region (", "or efa = false"],
    ),
    "type without EFA": (
        "medium", {"efa": True, "gpu_zone_ids": ["use1-az4"]}, ["g5.2xlarge is not known to have EFA", "g5.8xlarge"],
    ),
    "negative budget": ("small", {"budget": -5}, ["write what a month may cost in $, more than 0"]),
    "long bucket": ("small", {"bucket_base": "b" * 64}, ["write 3 to 63 characters"]),
    "zone of another region": ("small", {"region": "us-west-2"}, ["its zone ids begin with usw2-az"]),
}  # fmt: skip


# The others are of modules, whose refusals are tested there.
_AT_ONCE = {"zone without S3 Express", "region without EFA"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in _AT_ONCE else [pytest.mark.slow]) for c in _REFUSED])
def test_roots_refuse_and_say_what_to_write(case: str) -> None:
    root, wrong, words = _REFUSED[case]
    values = [f"--var={name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in wrong.items()]
    checked = check(TERRAFORM / root, f"--var-file={variables_of(root)}", *values, steps=("init", "plan"))
    assert (checked.code, checked.failed) == (1, "plan"), checked.said
    said = re.sub(r"[\s│╷╵]+", " ", checked.said)
    for word in words:
        assert word in said, checked.said
