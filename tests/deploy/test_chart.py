"""The Helm chart, rendered by Helm's own engine, against Kubernetes' own schemas, and run: what a pod starts is started
here, and its probes are asked. There is no cluster here, so that nothing is tested that only one does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.config import load_config
from kvstore.control import Client
from kvstore.integrations import vllm
from kvstore_cli.serve_http import control_settings
from kvstore_cli.serve_options import Settings, load_settings
from tests.servers.certificate import make_certificate
from tests.transport_support import wait_until

from .support import CHART, DEPLOY, MANIFEST, VERSIONS, ask, child, free_port, of_kind, rendered, running, until

FULL: dict[str, Any] = {
    "image": {"repository": "registry.example/kvstore", "tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "regcred"}],
    "memory": "2TiB",
    "disk": {"hostPath": "/mnt/nvme", "size": "3TiB"},
    "remote": "s3://bucket/kv?region=us-west-2",
    "ttl": "1d",
    "config": {"policy": "lru", "connections": 512, "stall_timeout": "10s"},
    "hostNetwork": False,
    "ports": {"node": 7171, "http": 7181},
    "controller": {"enabled": True},
    "tls": {"secret": "kvstore-tls", "ca": "ca.crt"},
    "extraResources": {"vpc.amazonaws.com/efa": 1},
    "priorityClassName": "system-node-critical",
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}},
    "podAnnotations": {"a/b": "c"},
    "podLabels": {"team": "inference"},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/kv"}},
    "env": [{"name": "AWS_REGION", "value": "us-west-2"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "serviceMonitor": {"enabled": True},
    "dashboard": {"enabled": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return rendered({}, FULL)


@pytest.fixture(scope="module", params=["defaults", "everything"])
def documents(request: pytest.FixtureRequest, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    case = cases[request.param == "everything"]
    assert case["error"] is None, case["error"]
    found: list[dict[str, Any]] = case["documents"]
    return found


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"]["template"] for each in documents if each["kind"] in ("DaemonSet", "Deployment")]


def test_helm_and_kubernetes_take_it(cases: list[dict[str, Any]]) -> None:
    assert [case["error"] for case in cases] == [None, None]
    assert [case["invalid"] for case in cases] == [[], []]
    kinds = [sorted(each["kind"] for each in case["documents"]) for case in cases]
    assert kinds[0] == ["ConfigMap", "DaemonSet", "Service", "ServiceAccount"]
    assert kinds[1] == sorted([*kinds[0], "ConfigMap", "Deployment", "Service", "ServiceMonitor"])
    said = child("lint", chart=str(CHART))
    assert [message for message in said["messages"] if message["severity"] > 1] == []
    assert said["errors"] == []


def test_the_schemas_do_find_faults() -> None:
    fault = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    found = child("validate", documents=[fault], versions=VERSIONS)
    assert len(found) == len(VERSIONS)
    assert "prots" in found[0][2]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"memory": "64"}, "memory"),
        ({"memory": "64000MiB"}, "memory"),
        ({"memroy": "64GiB"}, "memroy"),
        ({"disk": {"path": "/nvme"}}, "path"),
        ({"disk": {"size": "400"}}, "size"),
        ({"ttl": "1 day"}, "ttl"),
        ({"ports": {"http": 70800}}, "http"),
        ({"tokens": {"secret": ""}}, "secret"),
        ({"config": {"listen": "127.0.0.1:1"}}, "config.listen is set by the chart"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"tls": {"ca": "ca.crt"}}, "tls.secret"),
        ({"tls": {"secret": "x", "ca": "../ca.crt"}}, "ca"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values: dict[str, Any], says: str) -> None:
    (case,) = rendered(values)
    assert case["error"] is not None
    assert says in case["error"]


def test_names_and_numbers_lead_to_each_other(documents: list[dict[str, Any]]) -> None:
    for workload in (each for each in documents if each["kind"] in ("DaemonSet", "Deployment")):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for service in (each for each in documents if each["kind"] == "Service"):
        chosen = [
            pod for pod in pods(documents) if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(chosen) == 1, "a service leads to the pods of one workload"
        ports = {port["name"]: port["containerPort"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["name"]] == port["port"]
    account = of_kind(documents, "ServiceAccount")["metadata"]["name"]
    config_maps = {each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"}
    for pod in pods(documents):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["serviceAccountName"] == account
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert sorted(volumes) == sorted(mount["name"] for mount in container["volumeMounts"])
        assert all(v["configMap"]["name"] in config_maps for v in volumes.values() if "configMap" in v)
        assert "latest" not in container["image"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in {port["name"] for port in container["ports"]}
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]


def test_a_pod_has_the_memory_and_the_time_that_its_node_needs(
    documents: list[dict[str, Any]], tmp_path: Path
) -> None:  # fmt: skip
    pod = of_kind(documents, "DaemonSet")["spec"]["template"]["spec"]
    config = load_node(documents, tmp_path)
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    memory = int(resources["limits"]["memory"].removesuffix("Gi")) << 30
    assert memory >= config.server["memory"] + (1 << 30)
    assert pod["terminationGracePeriodSeconds"] > 2 * config.server["drain_timeout"]
    assert "cpu" not in resources["limits"]


def node_yaml(documents: list[dict[str, Any]]) -> str:
    """The text of the file that the nodes' pods read."""
    found: str = next(each["data"]["node.yaml"] for each in documents if "node.yaml" in each.get("data", {}))
    return found


def load_node(documents: list[dict[str, Any]], secrets: Path) -> Settings:
    """The settings that a node's pod reads, with tokens in the folder `secrets`."""
    for name in ("node", "admin"):
        (secrets / name).write_text(f"token-{name}")
    file = secrets / "node.yaml"
    file.write_text(node_yaml(documents).replace("/run/secrets/kvstore/", f"{secrets}/"))
    return load_settings([], config_file=str(file), env={})


def test_the_configuration_is_one_that_a_node_takes(documents: list[dict[str, Any]], tmp_path: Path) -> None:
    settings = load_node(documents, tmp_path)
    assert settings.namespaces[0].token == b"token-node"
    assert settings.admin_token == b"token-admin"
    given = yaml.safe_load(node_yaml(documents))
    if "tls_cert" not in given:  # the files are not here
        assert not control_settings(settings).loopback
    if "controller" in given:
        assert given["controller"] == "https://kvstore-controller.kvstore.svc:9090"
        assert settings.server["controller"] == given["controller"]
        assert settings.namespaces[0].disk == "file:///nvme/kv?bytes=3TiB"
        assert settings.namespaces[0].remote.startswith("s3://bucket/kv")
        assert settings.server["connections"] == 512


def test_a_pods_command_runs(tmp_path: Path) -> None:
    http, port = free_port(), free_port()
    (case,) = rendered(
        {"memory": "1GiB", "ports": {"http": http, "node": port}, "disk": {"hostPath": "/mnt/x", "size": "64MiB"}}
    )
    documents = case["documents"]
    (container,) = of_kind(documents, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"]: tmp_path / mount["name"] for mount in container["volumeMounts"]}
    for folder in mounts.values():
        folder.mkdir()
    (mounts["/run/secrets/kvstore"] / "node").write_text("token-node\n")
    (mounts["/run/secrets/kvstore"] / "admin").write_text("token-admin\n")
    text = of_kind(documents, "ConfigMap")["data"]["node.yaml"].replace("0.0.0.0:", "127.0.0.1:")
    paths = "|".join(re.escape(path) for path in mounts)
    text = re.sub(rf"({paths})(?=/)", lambda found: str(mounts[found[0]]), text)
    (mounts["/etc/kvstore"] / "node.yaml").write_text(text)
    command = [word.replace("/etc/kvstore", str(mounts["/etc/kvstore"])) for word in container["command"]]
    assert command[0] == "kvstore"
    with running(command[1:]):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert (get["port"], get["scheme"]) == ("http", "HTTP")
            until(f"http://127.0.0.1:{http}{get['path']}")
        assert ask(f"http://127.0.0.1:{http}/metrics")[0] == 401
        assert "kvstore_node_connections" in ask(f"http://127.0.0.1:{http}/metrics", "token-admin")[1]
        assert (mounts["/run/kvstore"] / "node.sock").is_socket()


def test_the_controllers_command_runs(tmp_path: Path) -> None:
    http = free_port()
    (case,) = rendered({"controller": {"enabled": True, "port": http}})
    (container,) = of_kind(case["documents"], "Deployment")["spec"]["template"]["spec"]["containers"]
    for name in ("node", "admin"):
        (tmp_path / name).write_text(f"token-{name}")
    command = [
        word.replace("/run/secrets/kvstore", str(tmp_path)).replace("0.0.0.0:", "127.0.0.1:")
        for word in container["command"]
    ]  # fmt: skip
    with running(command[1:]):
        for probe in ("livenessProbe", "readinessProbe"):
            until(f"http://127.0.0.1:{http}{container[probe]['httpGet']['path']}")
        assert ask(f"http://127.0.0.1:{http}/v1/workers", "token-admin") == (200, "[]")
        assert ask(f"http://127.0.0.1:{http}/v1/workers", "token-wrong")[0] == 401


def test_nodes_and_controller_trust_each_other_by_the_authority_in_the_secret(tmp_path: Path) -> None:
    http, port, own = free_port(), free_port(), free_port()
    (case,) = rendered({
        "memory": "1GiB", "ports": {"http": own, "node": port}, "controller": {"enabled": True, "port": http},
        "tls": {"secret": "kvstore-tls", "ca": "ca.crt"}, "serviceMonitor": {"enabled": True},
    })  # fmt: skip
    documents = case["documents"]
    (endpoint,) = of_kind(documents, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "kvstore.kvstore.svc", "ca": {"secret": {"name": "kvstore-tls", "key": "ca.crt"}},
    }  # fmt: skip
    for name in ("node", "admin"):
        (tmp_path / name).write_text(f"token-{name}")
    tls = tmp_path / "tls"
    tls.mkdir()
    signed = make_certificate(tmp_path / "both.pem")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        shutil.copy(signed, tls / name)

    def here(text: str) -> str:
        for inside, outside in (
            ("/run/secrets/kvstore-tls", tls), ("/run/secrets/kvstore", tmp_path), ("/run/kvstore", tmp_path),
            ("0.0.0.0:", "127.0.0.1:"), ("kvstore-controller.kvstore.svc", "127.0.0.1"),
        ):  # fmt: skip
            text = text.replace(inside, str(outside))
        return text

    (tmp_path / "node.yaml").write_text(here(node_yaml(documents)))
    (container,) = of_kind(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    ca = str(tls / "ca.crt")
    with (
        running([here(word) for word in container["command"][1:]]),
        running(["serve", "--config", str(tmp_path / "node.yaml")]),
        Client(f"https://127.0.0.1:{http}", token="token-admin", ca=ca) as client,
    ):
        wait_until(lambda: [each.state for each in client.health()] == ["ready"])
        (worker,) = client.workers()
        assert worker.http == f"https://127.0.0.1:{own}"
        started = client.clear(everything=True, instances=[worker.instance])  # passed on to the node, over TLS
        assert not started.failures
        assert client.wait(started, timeout=30).ok


def test_the_plain_manifests_are_the_chart_with_its_defaults(cases: list[dict[str, Any]]) -> None:
    def key(each: dict[str, Any]) -> str:
        return f"{each['kind']} {each['metadata']['name']}"

    written = sorted(yaml.safe_load_all(MANIFEST.read_text()), key=key)
    assert written == sorted(cases[0]["documents"], key=key), "run: python -m tests.deploy.support"


def test_kustomize_takes_the_manifests() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "kubernetes")], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    documents = [*yaml.safe_load_all(done.stdout)]
    assert len(documents) == len([*yaml.safe_load_all(MANIFEST.read_text())])
    assert {each["metadata"]["namespace"] for each in documents} == {"kvstore"}


def test_every_value_does_something() -> None:
    """Each value has a place in the schema, and the other way round; each top-level one is used by a template."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert sorted(values) == sorted(set(schema) - {"global"})
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert [name for name in values if f".Values.{name}" not in templates] == []
    for name, value in values.items():
        if isinstance(value, dict) and schema[name].get("additionalProperties") is False:
            assert sorted(value) == sorted(schema[name]["properties"]), name


# vLLM's production-stack. Keys of its chart, as its values.yaml and deployment-vllm-multi.yaml have them (2026-11).
_SPEC = {
    "name", "repository", "tag", "modelURL", "replicaCount", "requestCPU", "requestMemory", "requestGPU", "pvcStorage",
    "vllmConfig", "env", "extraVolumes", "extraVolumeMounts",
}  # fmt: skip
_VLLM = {"enablePrefixCaching", "maxModelLen", "dtype", "tensorParallelSize", "gpuMemoryUtilization", "extraArgs"}


def test_the_values_for_the_production_stack_fit(cases: list[dict[str, Any]]) -> None:
    values = yaml.safe_load((DEPLOY / "production-stack" / "values.yaml").read_text())
    assert set(values) == {"servingEngineSpec"}
    (model,) = values["servingEngineSpec"]["modelSpec"]
    assert set(model) <= _SPEC
    assert set(model["vllmConfig"]) <= _VLLM
    flag, text = model["vllmConfig"]["extraArgs"]
    assert flag == "--kv-transfer-config"
    transfer = json.loads(text)
    assert transfer["kv_connector"] in vllm.__all__
    assert transfer["kv_connector_module_path"] == vllm.__name__
    assert transfer["kv_load_failure_policy"] == "recompute"
    config = load_config(**transfer["kv_connector_extra_config"], env={})
    socket = config.remote_url[0].shown.removeprefix("node://")
    mounted = {mount["name"]: mount["mountPath"] for mount in model["extraVolumeMounts"]}
    (volume,) = model["extraVolumes"]
    assert socket.startswith(mounted[volume["name"]] + "/")
    # The node's side: the same folder of the host, the same socket in it, the same Secret.
    documents = cases[0]["documents"]
    node = of_kind(documents, "DaemonSet")["spec"]["template"]["spec"]
    run = next(each for each in node["volumes"] if each["name"] == "run")
    assert run["hostPath"]["path"] == volume["hostPath"]["path"]
    assert yaml.safe_load(of_kind(documents, "ConfigMap")["data"]["node.yaml"])["unix"] == socket
    tokens = next(each for each in node["volumes"] if each["name"] == "tokens")["secret"]
    (variable,) = model["env"]
    assert variable["name"] == "KVSTORE_NODE_TOKEN"
    given = variable["valueFrom"]["secretKeyRef"]
    assert given["name"] == tokens["secretName"]
    assert {"key": given["key"], "path": "node"} in tokens["items"]


def test_the_values_in_the_manual_are_ones_that_the_chart_takes() -> None:
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    (block,) = re.findall(r"```yaml\n(# values\.yaml\n.*?)```", text, re.S)
    values = yaml.safe_load(block.replace("REGISTRY", "registry.example"))
    (case,) = rendered(values)
    assert (case["error"], case["invalid"]) == (None, [])
    assert of_kind(case["documents"], "DaemonSet")["spec"]["template"]["spec"]["nodeSelector"] == values["nodeSelector"]
    for name in set(re.findall(r"`deploy/([\w./-]+)`", text)) | {"systemd/kvstore.service", "docker/steps.sh"}:
        assert (DEPLOY / name).exists(), name
