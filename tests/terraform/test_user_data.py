"""What makes an instance a node: the shell is read by bash and shellcheck, its steps run below a folder with doubles of
what they call, and what they write is read by whom it is for: systemd, `kvstore serve`, kvstore's configuration."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvstore.config import load_config
from kvstore_cli.main import main
from kvstore_cli.serve import serve
from kvstore_cli.serve_options import load_settings
from tests.terraform.boot_support import CASES, SECRETS, Machine, render
from tests.terraform.support import MODULES, environment


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return render(tmp_path_factory.mktemp("user_data"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def configured(machine: Machine, script: str, **secrets: object) -> Machine:
    machine.cloud("use1-az4", {**SECRETS, **secrets})
    done = machine.run(script, "config")
    assert done.returncode == 0, done.stderr
    return machine


def flags_of(words: list[str]) -> list[tuple[str, object]]:
    """A command line of `kvstore serve` as our own command reads it: what `load_settings` is given."""
    assert words[0].rpartition("/")[2] == "kvstore"
    assert words[1] == "serve"
    context = serve.make_context("kvstore serve", list(words[2:]))
    given: list[tuple[str, object]] = []
    for name, value in context.params.items():
        given += [(name, one) for one in (value if isinstance(value, tuple) else [value] if value is not None else [])]
    return [(name, value) for name, value in given if value not in ("", False)]


@pytest.mark.parametrize("case", CASES)
def test_bash_reads_it(scripts: dict[str, str], case: str) -> None:
    done = subprocess.run(["bash", "-n"], input=scripts[case], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert scripts[case].startswith("#!/bin/bash\n")


def test_shellcheck_finds_nothing(scripts: dict[str, str], tmp_path: Path) -> None:
    shellcheck = environment("requirements-shellcheck.txt").parent / "shellcheck"
    paths = []
    for case, script in scripts.items():
        paths.append(tmp_path / f"{case}.sh")
        paths[-1].write_text(script)
    done = subprocess.run([shellcheck, "--shell=bash", *paths], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", CASES)
def test_it_fits_into_user_data_and_leaves_nothing_open(scripts: dict[str, str], case: str) -> None:
    import gzip

    assert len(gzip.compress(scripts[case].encode())) <= 16384
    assert "${" not in scripts[case].replace("${KVSTORE_BOOT_ROOT:-}", "").replace("${2:-}", "").replace(
        "${#devices[@]}", ""
    ).replace("${devices[@]}", "").replace("${devices[0]}", "").replace("${aws:AutoScalingGroupName}", "")
    assert "%{" not in scripts[case]


def test_the_python_in_it_is_old_enough_for_amazon_linux() -> None:
    source = (MODULES / "gpu_nodes" / "templates" / "configure.py").read_text()
    ast.parse(source, feature_version=(3, 9))
    assert "PYTHON" not in source  # the end of the here-document it stands in


def test_configuration_is_what_kvstore_reads(scripts: dict[str, str], machine: Machine) -> None:
    configured(machine, scripts["wheel"])
    config = load_config(config_file=machine.root / "etc/kvstore/config.yaml", env={})
    assert [url.base for url in config.urls] == ["node:///run/kvstore/node.sock", "s3://acme-kv/kv"]
    settings = load_settings(
        [], config_file=str(machine.root / "etc/kvstore/node.yaml"), env={"KVSTORE_SERVE_TOKEN": "x"}
    )
    assert settings.server["unix"] == "/run/kvstore/node.sock"
    assert settings.server["memory"] == 1 << 30
    assert machine.mode("etc/kvstore/config.yaml") == machine.mode("etc/kvstore/node.yaml") == 0o644


def test_secrets_are_read_by_root_alone_and_left_nowhere_else(scripts: dict[str, str], machine: Machine) -> None:
    configured(machine, scripts["wheel"])
    etc = machine.root / "etc/kvstore"
    assert (etc / "node.env").read_text() == "KVSTORE_SERVE_TOKEN=n0de-t0ken\n"
    assert dict(line.split("=", 1) for line in (etc / "engine.env").read_text().splitlines()) == {
        "KVSTORE_CONFIG_FILE": "/etc/kvstore/config.yaml", "AWS_AVAILABILITY_ZONE_ID": "use1-az4",
        "KVSTORE_NODE_TOKEN": "n0de-t0ken", "KVSTORE_VALKEYS_PASSWORD": "p4ssw0rd",
        "KVSTORE_VALKEYS_USERNAME": "kv-test-kvstore",
    }  # fmt: skip
    assert machine.mode("etc/kvstore/node.env") == machine.mode("etc/kvstore/engine.env") == 0o600
    for path in machine.root.parent.rglob("*"):
        if path.is_file() and machine.programs not in path.parents and path.suffix != ".env":
            text = path.read_text()
            assert "n0de-t0ken" not in text, path
            assert "p4ssw0rd" not in text, path
    assert not any("n0de-t0ken" in script or "p4ssw0rd" in script for script in scripts.values())


def test_variables_with_secrets_reach_the_store(scripts: dict[str, str], machine: Machine) -> None:
    tiers = 'tiers: ["valkeys://cache:6379/kv", "node://n:7070"]\nremote_url: s3://acme-kv/kv\n'
    configured(machine, scripts["wheel"], config={**SECRETS["config"], "config_yaml": {"use1-az4": tiers}})
    etc = machine.root / "etc/kvstore"
    env = dict(line.split("=", 1) for line in (etc / "engine.env").read_text().splitlines())
    config = load_config(env={**env, "KVSTORE_CONFIG_FILE": str(etc / "config.yaml")})
    given = {url.scheme: config.backend_overrides(url) for url in config.urls}
    assert {name: value.value for name, value in given["valkeys"].items()} == {  # type: ignore[attr-defined]
        "password": "p4ssw0rd", "username": "kv-test-kvstore",
    }  # fmt: skip
    assert given["node"]["token"].value == "n0de-t0ken"  # type: ignore[attr-defined]
    assert "p4ssw0rd" not in repr(config)


def test_engine_is_started_with_our_connector(scripts: dict[str, str], machine: Machine) -> None:
    configured(machine, scripts["wheels"])
    machine.double("vllm")
    path = machine.root / "etc/kvstore/engine.sh"
    assert machine.mode("etc/kvstore/engine.sh") == 0o755
    subprocess.run([path, "--port", "8000"], env={"PATH": f"{machine.programs}:/bin"}, check=True)
    (words,) = machine.called("vllm")
    assert words[:3] == ["serve", "Qwen/Qwen2.5-7B-Instruct", "--kv-transfer-config"]
    assert words[4:] == ["--max-model-len", "16384", "--served-model-name", "it's", "--port", "8000"]
    assert json.loads(words[3]) == {
        "kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config_file": "/etc/kvstore/config.yaml"},
    }  # fmt: skip


def test_secrets_manager_is_asked_again(scripts: dict[str, str], machine: Machine) -> None:
    machine.cloud("use1-az4", SECRETS, fails=3)
    done = machine.run(scripts["wheel"], "config")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("failed (3 of 5)") == 3  # of each of the three secrets
    assert "n0de" not in done.stderr


def test_secrets_that_cannot_be_had_stop_it(scripts: dict[str, str], machine: Machine) -> None:
    machine.cloud("use1-az4", {"config": SECRETS["config"]})
    done = machine.run(scripts["wheel"], "config")
    assert done.returncode != 0
    assert not (machine.root / "etc/kvstore/config.yaml").exists()
    assert not list(machine.root.parent.glob("tmp.*")), "secrets were left behind"


def test_zone_without_configuration_is_named(scripts: dict[str, str], machine: Machine) -> None:
    machine.cloud("use1-az6", SECRETS)
    done = machine.run(scripts["wheels"], "config")
    assert done.returncode != 0
    assert "no configuration for zone use1-az6; there is one for use1-az4" in done.stderr


def test_configuration_is_replaced_when_it_is_fetched_again(scripts: dict[str, str], machine: Machine) -> None:
    configured(machine, scripts["wheel"])
    (machine.programs / "secrets" / "node-token").write_text("another")
    assert machine.run(scripts["wheel"], "config").returncode == 0
    assert (machine.root / "etc/kvstore/node.env").read_text() == "KVSTORE_SERVE_TOKEN=another\n"
    assert machine.mode("etc/kvstore/node.env") == 0o600


_EBS = "/dev/nvme0n1 Amazon Elastic Block Store"
_STORE = "/dev/nvme{}n1 Amazon EC2 NVMe Instance Storage"


def test_instance_store_is_striped(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("lsblk", f"printf '%s\\n' '{_EBS}' '{_STORE.format(1)}' '{_STORE.format(2)}' '{_STORE.format(3)}'")
    done = machine.run(scripts["wheels"], "disk")
    assert done.returncode == 0, done.stderr
    (array,) = machine.called("mdadm")
    assert array[:2] == ["--create", "/dev/md/kvstore"]
    assert "--level=0" in array
    assert "--raid-devices=3" in array
    assert array[-3:] == ["/dev/nvme1n1", "/dev/nvme2n1", "/dev/nvme3n1"]
    assert machine.called("mkfs.xfs")[0][-1] == "/dev/md/kvstore"
    assert machine.called("mount") == [["-o", "noatime", "/dev/md/kvstore", f"{machine.root}/nvme"]]
    assert (machine.root / "nvme/kv").is_dir()


def test_one_disk_needs_no_array(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("lsblk", f"printf '%s\\n' '{_EBS}' '{_STORE.format(1)}'")
    assert machine.run(scripts["wheels"], "disk").returncode == 0
    assert not machine.called("mdadm")
    assert machine.called("mount") == [["-o", "noatime", "/dev/nvme1n1", f"{machine.root}/nvme"]]


def test_disk_with_records_is_not_formatted(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("lsblk", f"echo '{_STORE.format(1)}'")
    machine.double("blkid", "echo kvstore")
    assert machine.run(scripts["wheels"], "disk").returncode == 0
    assert not machine.called("mkfs.xfs")
    assert machine.called("mount")


def test_without_instance_store_nothing_is_formatted(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("lsblk", f"echo '{_EBS}'")
    done = machine.run(scripts["wheels"], "disk")
    assert done.returncode == 0
    assert "no instance store" in done.stderr
    assert not machine.called("mkfs.xfs")
    assert not machine.called("mount")


def test_disk_that_is_mounted_stays(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("mountpoint", 'test "$2" = "$KVSTORE_BOOT_ROOT/nvme"')
    assert machine.run(scripts["wheels"], "disk").returncode == 0
    assert not machine.called("lsblk")
    assert not machine.called("mount")


def test_disks_that_the_image_mounted_are_used_and_its_unit_stays(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("mountpoint", 'test "$2" = /opt/dlami/nvme')
    assert machine.run(scripts["wheels"], "disk").returncode == 0
    assert machine.called("mount") == [["--bind", "/opt/dlami/nvme", f"{machine.root}/nvme"]]
    # Disabled, it would not mount them after a restart, and then they are in use by nobody that we know.
    assert not machine.called("systemctl")
    assert not machine.called("mkfs.xfs")
    unit = units_of(machine, scripts["wheels"])["kvstore-boot.service"]
    assert "After=network-online.target dlami-nvme.service\n" in unit


@pytest.mark.skipif(shutil.which("mdadm", path="/usr/bin:/bin") is not None, reason="this host has mdadm")
def test_mdadm_is_installed_where_the_image_lacks_it(scripts: dict[str, str], machine: Machine) -> None:
    made = machine.programs / "mdadm.made"
    (machine.programs / "mdadm").rename(made)
    machine.double("dnf", f"cp {made} {machine.programs}/mdadm")
    machine.double("lsblk", f"printf '%s\\n' '{_STORE.format(1)}' '{_STORE.format(2)}'")
    done = machine.run(scripts["wheels"], "disk")
    assert done.returncode == 0, done.stderr
    assert machine.called("dnf") == [["install", "-y", "-q", "mdadm"]]
    assert len(machine.called("mdadm")) == 1


def test_shared_files(scripts: dict[str, str], machine: Machine) -> None:
    assert machine.run(scripts["wheel"], "mount_shared").returncode == 0
    assert ["install", "-y", "-q", "lustre-client"] in machine.called("dnf")
    assert machine.called("mount") == [
        [
            "-t",
            "lustre",
            "-o",
            "relatime,flock",
            "fs-1.fsx.us-east-1.amazonaws.com@tcp:/abc",
            f"{machine.root}/mnt/shared",
        ]
    ]


@pytest.mark.parametrize(
    ("case", "command"),
    [
        ("wheels", ["--no-index", "--find-links", "ROOT/opt/kvstore/wheels", "kvstore[s3,codec]", "vllm==0.32.0"]),
        ("wheel", ["ROOT/opt/kvstore/wheels/kvstore-0.1.0-py3-none-any.whl[s3,codec]", "vllm==0.32.0"]),
        ("alone", ["--no-index", "--find-links", "ROOT/opt/kvstore/wheels", "kvstore[s3,codec]"]),
    ],
)  # fmt: skip
def test_packages_are_installed(scripts: dict[str, str], machine: Machine, case: str, command: list[str]) -> None:
    machine.double("aws")
    machine.double("python3.12", f'mkdir -p "$3/bin"; cp {machine.programs}/pip "$3/bin/pip"')
    machine.double("pip")
    done = machine.run(scripts[case], "packages")
    assert done.returncode == 0, done.stderr
    wanted = [word.replace("ROOT", str(machine.root)) for word in command]
    assert machine.called("pip") == [["install", "-q", *wanted]]
    assert machine.called("aws")[0][:2] == ["s3", "cp"]


def test_images_are_pulled(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("aws", "echo ecr-password")
    machine.double("docker", '[ "$1" != login ] || [ "$(cat)" = ecr-password ]')
    assert machine.run(scripts["image"], "packages").returncode == 0
    registry = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
    assert machine.called("docker") == [
        ["login", "--username", "AWS", "--password-stdin", registry],
        ["pull", f"{registry}/kvstore:0.1.0"],
        ["pull", f"{registry}/vllm-kvstore:0.32.0"],
    ]


def test_agent_is_configured(scripts: dict[str, str], machine: Machine) -> None:
    done = machine.run(scripts["wheels"], "agent")
    assert done.returncode == 0, done.stderr
    etc = machine.root / "opt/aws/amazon-cloudwatch-agent/etc"
    agent = json.loads((etc / "kvstore.json").read_text())
    assert agent["metrics"]["namespace"] == "CacheGen"
    assert agent["metrics"]["append_dimensions"] == {"AutoScalingGroupName": "${aws:AutoScalingGroupName}"}
    scrape = yaml.safe_load((etc / "kvstore-prometheus.yaml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": ["127.0.0.1:8000"], "labels": {"cluster": "kv-test"}}]
    (started,) = machine.called("amazon-cloudwatch-agent-ctl")
    assert f"file:{etc}/kvstore.json" in started


def test_a_node_without_agent_still_starts(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("amazon-cloudwatch-agent-ctl", "exit 1")
    done = machine.run(scripts["wheels"], "agent")
    assert done.returncode == 0
    assert "does not start" in done.stderr


def units_of(machine: Machine, script: str) -> dict[str, str]:
    done = machine.run(script, "units")
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in (machine.root / "etc/systemd/system").glob("*.service")}


@pytest.mark.parametrize("case", CASES)
def test_systemd_takes_the_units(scripts: dict[str, str], machine: Machine, case: str) -> None:
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("no systemd-analyze here: units were not verified")
    units = units_of(machine, scripts[case])
    assert set(units) == {
        "kvstore-boot.service",
        "kvstore-node.service",
        *([] if case == "alone" else ["kvstore-engine.service", "kvstore-cloudwatch.service"]),
    }
    # It looks for the programs, and for what units hang on: doubles stand in for them.
    for program in ("/opt/kvstore/bin/kvstore", "/etc/kvstore/engine.sh", "/usr/bin/docker"):
        path = machine.root / program[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    (machine.root / "etc/systemd/system/docker.service").write_text("[Service]\nExecStart=/usr/bin/docker\n")
    for name in ("network-online", "sysinit", "basic", "shutdown", "multi-user"):
        (machine.root / f"etc/systemd/system/{name}.target").write_text(f"[Unit]\nDescription={name}\n")
    for name in units:
        done = subprocess.run(
            [analyze, f"--root={machine.root}", "verify", "--man=no", "--recursive-errors=no", name],
            check=False, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "Unknown" not in done.stderr, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_command_line_of_the_node_is_one_of_ours(scripts: dict[str, str], machine: Machine, case: str) -> None:
    line = next(
        x for x in units_of(machine, scripts[case])["kvstore-node.service"].splitlines() if x.startswith("ExecStart=")
    )
    words = shlex.split(line.removeprefix("ExecStart="))
    words = words[
        next(i for i, word in enumerate(words[:-1]) if word.endswith("kvstore") and words[i + 1] == "serve") :
    ]
    flags = dict(flags_of(words))
    assert flags == {"config": "/etc/kvstore/node.yaml"}
    configured(machine, scripts[case])
    file = machine.root / str(flags["config"])[1:]
    settings = load_settings([], config_file=str(file), env={})
    assert [space.disk for space in settings.namespaces] == ["file:///nvme/kv?bytes=1GiB"]


@pytest.mark.parametrize("case", [case for case in CASES if case != "alone"])
def test_command_line_of_the_publisher_is_one_of_ours(scripts: dict[str, str], machine: Machine, case: str) -> None:
    text = units_of(machine, scripts[case])["kvstore-cloudwatch.service"]
    words = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])  # type: ignore[index]
    words = words[next(i for i, word in enumerate(words) if word == "cloudwatch") :]
    assert main([*words, "--dry-run", "--interval", "1s"]) == 1, "it makes sense, and no engine is here"
    assert re.search(r"AWS_REGION=[a-z]+-[a-z]+-\d\b", text)


def test_boot_script_is_kept_and_runs_at_each_start(scripts: dict[str, str], machine: Machine) -> None:
    units = units_of(machine, scripts["wheels"])
    kept = machine.root / "usr/local/sbin/kvstore-boot"
    assert kept.read_text() == scripts["wheels"]
    assert os.access(kept, os.X_OK)
    assert "ExecStart=/usr/local/sbin/kvstore-boot disk mount_shared config\n" in units["kvstore-boot.service"]
    assert "Requires=kvstore-boot.service" in units["kvstore-node.service"]
    assert "Requires=kvstore-boot.service" in units["kvstore-engine.service"]


def test_unknown_steps_are_refused(scripts: dict[str, str], machine: Machine) -> None:
    done = machine.run(scripts["wheels"], "dsk")
    assert done.returncode == 2
    assert "no step dsk" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the script is for Linux")
def test_without_steps_it_does_all_of_them(scripts: dict[str, str], machine: Machine) -> None:
    machine.double("aws", "echo x")
    machine.double("docker", '[ "$1" != login ] || cat >/dev/null')  # as the real one, it reads the password
    done = machine.run(scripts["image"])
    assert done.returncode == 0, done.stderr
    assert [line.removeprefix("kvstore-boot: ") for line in done.stderr.splitlines()] == [
        "packages",
        "units",
        "agent",
        "start",
    ]
    assert machine.called("systemctl") == [
        ["daemon-reload"],
        ["enable", "--now", "kvstore-boot.service", "kvstore-cloudwatch.service", "kvstore-engine.service",
         "kvstore-node.service"],
    ]  # fmt: skip
