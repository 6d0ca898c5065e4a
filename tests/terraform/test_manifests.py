"""What the cluster gets as YAML. Terraform cannot see into it, and Karpenter ignores a key that is misspelt, so every
key is compared with a list of ours; labels, volumes and names must lead to each other; and the command of the nodes is
one of ours."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.config import load_config
from kvstore.registry import parse_urls
from kvstore_cli.serve_options import load_settings
from tests.terraform.support import MODULES, check, load, outputs, variables
from tests.terraform.test_user_data import flags_of

Tree = dict[str, Any]

# Keys by kind. A value of None: anything (maps of names to text, scalars); a list: of such elements.
_META = {"name": None, "namespace": None, "labels": None, "annotations": None}
_SELECTOR = {"matchLabels": None}
_PROBE = {
    "tcpSocket": {"port": None}, "httpGet": {"path": None, "port": None}, "periodSeconds": None,
    "initialDelaySeconds": None, "failureThreshold": None,
}  # fmt: skip
_CONTAINER = {
    "name": None, "image": None, "command": None, "resources": {"requests": None, "limits": None},
    "env": [{"name": None, "value": None, "valueFrom": {"secretKeyRef": {"name": None, "key": None}}}],
    "ports": [{"name": None, "containerPort": None, "hostPort": None}],
    "readinessProbe": _PROBE, "livenessProbe": _PROBE, "startupProbe": _PROBE,
    "securityContext": {
        "runAsUser": None, "allowPrivilegeEscalation": None, "readOnlyRootFilesystem": None,
        "capabilities": {"drop": None, "add": None},
    },
    "volumeMounts": [{"name": None, "mountPath": None, "readOnly": None}],
}  # fmt: skip
_POD = {
    "metadata": _META,
    "spec": {
        "nodeSelector": None, "tolerations": [{"key": None, "operator": None, "effect": None}],
        "priorityClassName": None,
        "serviceAccountName": None, "hostNetwork": None, "dnsPolicy": None, "terminationGracePeriodSeconds": None,
        "restartPolicy": None,
        "containers": [_CONTAINER],
        "volumes": [{
            "name": None, "hostPath": {"path": None, "type": None}, "configMap": {"name": None},
            "csi": {"driver": None, "readOnly": None, "volumeAttributes": {"secretProviderClass": None}},
            "emptyDir": {"medium": None, "sizeLimit": None},
        }],
    },
}  # fmt: skip
_HEAD = {"apiVersion": None, "kind": None, "metadata": _META}
KEYS: dict[str, Tree] = {
    "v1 Namespace": {**_HEAD},
    "v1 ServiceAccount": {**_HEAD},
    "v1 ConfigMap": {**_HEAD, "data": None},
    "v1 Service": {
        **_HEAD, "spec": {"clusterIP": None, "selector": None, "ports": [{"name": None, "port": None}]}
    },
    "apps/v1 DaemonSet": {
        **_HEAD,
        "spec": {
            "selector": _SELECTOR, "template": _POD,
            "updateStrategy": {"type": None, "rollingUpdate": {"maxUnavailable": None}},
        },
    },
    "apps/v1 Deployment": {**_HEAD, "spec": {"replicas": None, "selector": _SELECTOR, "template": _POD}},
    "batch/v1 CronJob": {
        **_HEAD,
        "spec": {
            "schedule": None, "concurrencyPolicy": None,
            "jobTemplate": {"spec": {"activeDeadlineSeconds": None, "backoffLimit": None, "template": _POD}},
        },
    },
    "secrets-store.csi.x-k8s.io/v1 SecretProviderClass": {
        **_HEAD,
        "spec": {
            "provider": None, "parameters": {"region": None, "usePodIdentity": None, "objects": None},
            "secretObjects": [{"secretName": None, "type": None, "data": [{"objectName": None, "key": None}]}],
        },
    },
    "karpenter.k8s.aws/v1 EC2NodeClass": {
        **_HEAD,
        "spec": {
            "role": None, "amiSelectorTerms": [{"alias": None}], "subnetSelectorTerms": [{"id": None}],
            "securityGroupSelectorTerms": [{"id": None}], "instanceStorePolicy": None, "detailedMonitoring": None,
            "tags": None,
            "metadataOptions": {"httpEndpoint": None, "httpTokens": None, "httpPutResponseHopLimit": None},
            "blockDeviceMappings": [{
                "deviceName": None, "rootVolume": None,
                "ebs": {"volumeSize": None, "volumeType": None, "encrypted": None, "deleteOnTermination": None},
            }],
        },
    },
    "karpenter.sh/v1 NodePool": {
        **_HEAD,
        "spec": {
            "weight": None, "limits": None,
            "disruption": {"consolidationPolicy": None, "consolidateAfter": None, "budgets": [{"nodes": None}]},
            "template": {
                "metadata": {"labels": None},
                "spec": {
                    "nodeClassRef": {"group": None, "kind": None, "name": None},
                    "requirements": [{"key": None, "operator": None, "values": None}],
                    "taints": [{"key": None, "value": None, "effect": None}],
                    "expireAfter": None, "terminationGracePeriod": None,
                },
            },
        },
    },
}  # fmt: skip


def unknown(value: Any, keys: Any, path: str) -> list[str]:
    """Paths of keys that are not in the list."""
    if keys is None:
        return []
    if isinstance(keys, list):
        assert isinstance(value, list), f"{path} is no list"
        return [u for i, one in enumerate(value) for u in unknown(one, keys[0], f"{path}[{i}]")]
    assert isinstance(value, dict), f"{path} is no map"
    wrong = [f"{path}.{key}" for key in value if key not in keys]
    return wrong + [u for key in value if key in keys for u in unknown(value[key], keys[key], f"{path}.{key}")]


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    saved = tmp_path_factory.mktemp("cluster")
    options = (f"--var-file={variables('cluster')}", f"--save={saved}")
    checked = check(MODULES / "cluster", *options, steps=("init", "plan", "apply"))
    assert checked.code == 0, checked.said
    return outputs(load(saved / "state.json"))


@pytest.fixture(scope="module")
def documents(applied: Tree) -> list[Tree]:
    # As they are applied: one text after the other.
    text = "---\n".join(applied["manifests"][name] for name in sorted(applied["manifests"]))
    return list(yaml.safe_load_all(text))


def find(documents: list[Tree], kind: str, name: str) -> Tree:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def pods(documents: list[Tree]) -> list[tuple[str, Tree]]:
    return [
        (d["metadata"]["name"], d["spec"]["template"]) for d in documents if d["kind"] in ("DaemonSet", "Deployment")
    ]


def test_every_key_is_one_that_is_known(documents: list[Tree]) -> None:
    assert len(documents) == 4 + 2 + 2 * (2 + 2 + 3) + 1
    for document in documents:
        kind = f"{document['apiVersion']} {document['kind']}"
        assert kind in KEYS, kind
        assert unknown(document, KEYS[kind], f"{kind} {document['metadata']['name']}") == []


def test_a_misspelt_key_is_found(documents: list[Tree]) -> None:
    pool = json.loads(json.dumps(find(documents, "NodePool", "gpu-use1-az4")))
    pool["spec"]["disruption"]["consolidatAfter"] = pool["spec"]["disruption"].pop("consolidateAfter")
    assert unknown(pool, KEYS["karpenter.sh/v1 NodePool"], "pool") == ["pool.spec.disruption.consolidatAfter"]


def test_nothing_is_there_twice(documents: list[Tree]) -> None:
    names = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("zone", ["use1-az4", "use1-az6"])
def test_gpu_nodes_are_karpenters(documents: list[Tree], zone: str) -> None:
    pool = find(documents, "NodePool", f"gpu-{zone}")["spec"]
    kind = find(documents, "EC2NodeClass", f"gpu-{zone}")
    reference = pool["template"]["spec"]["nodeClassRef"]
    assert reference == {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": kind["metadata"]["name"]}
    needs = {r["key"]: r["values"] for r in pool["template"]["spec"]["requirements"]}
    assert needs["karpenter.sh/capacity-type"] == ["spot", "on-demand"]
    assert needs["node.kubernetes.io/instance-type"] == ["g6.48xlarge", "g5.48xlarge"]
    # What keeps warm caches: nothing moves pods off a node, and an empty one stays for a while.
    assert pool["disruption"]["consolidationPolicy"] == "WhenEmpty"
    assert pool["disruption"]["consolidateAfter"] == "30m"
    assert pool["template"]["spec"]["expireAfter"] == "Never"
    spec = kind["spec"]
    assert spec["instanceStorePolicy"] == "RAID0"
    assert spec["amiSelectorTerms"] == [{"alias": "al2023@v20251029"}]
    assert spec["metadataOptions"] == {
        "httpEndpoint": "enabled",
        "httpTokens": "required",
        "httpPutResponseHopLimit": 1,
    }
    assert len(spec["subnetSelectorTerms"]) == 1, "a pool is of one zone"
    assert "sg-0123456789abcdef0" in [term["id"] for term in spec["securityGroupSelectorTerms"]]


def test_zones_have_subnets_of_their_own(documents: list[Tree]) -> None:
    subnets = {
        d["metadata"]["name"]: d["spec"]["subnetSelectorTerms"][0]["id"]
        for d in documents
        if d["kind"] == "EC2NodeClass"
    }
    assert subnets == {"gpu-use1-az4": "subnet-0123456789abcdef0", "gpu-use1-az6": "subnet-0123456789abcdef1"}


def test_labels_lead_to_pods_and_nodes(documents: list[Tree]) -> None:
    nodes = [d["spec"]["template"]["metadata"]["labels"] for d in documents if d["kind"] == "NodePool"]
    labels = [template["metadata"]["labels"] for _, template in pods(documents)]
    for document in documents:
        if document["kind"] in ("DaemonSet", "Deployment"):
            wanted = document["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= document["spec"]["template"]["metadata"]["labels"].items()
            selector = document["spec"]["template"]["spec"]["nodeSelector"]
            assert any(selector.items() <= node.items() for node in nodes), document["metadata"]["name"]
        if document["kind"] == "Service":
            found = [one for one in labels if document["spec"]["selector"].items() <= one.items()]
            assert len(found) == 1, document["metadata"]["name"]


def test_volumes_secrets_and_accounts_are_there(documents: list[Tree]) -> None:
    accounts = {d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"}
    classes = {d["metadata"]["name"]: d for d in documents if d["kind"] == "SecretProviderClass"}
    made = {
        s["secretName"]: [k["key"] for k in s["data"]] for c in classes.values() for s in c["spec"]["secretObjects"]
    }
    configs = {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}
    for name, template in pods(documents):
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert spec.get("serviceAccountName", "default") in {*accounts, "default"}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes), name
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["key"] in made[reference["name"]]
                    # The driver makes the secret only while a pod has the volume.
                    assert any("csi" in volume for volume in volumes.values()), name
        for volume in volumes.values():
            if "csi" in volume:
                assert volume["csi"]["volumeAttributes"]["secretProviderClass"] in classes
            if "configMap" in volume:
                assert volume["configMap"]["name"] in configs


def test_token_is_the_secret_of_terraform(documents: list[Tree]) -> None:
    parameters = find(documents, "SecretProviderClass", "node-token")["spec"]["parameters"]
    assert parameters["usePodIdentity"] == "true"
    (wanted,) = yaml.safe_load(parameters["objects"])
    assert wanted == {
        "objectName": load(variables("cluster"))["node_token_secret_arn"], "objectType": "secretsmanager",
        "objectAlias": "token",
    }  # fmt: skip


def test_nodes_run_kvstore_serve(documents: list[Tree], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("n0de-t0ken\n")
    (container,) = find(documents, "DaemonSet", "node-use1-az4")["spec"]["template"]["spec"]["containers"]
    flags = flags_of(container["command"])
    given = dict(flags)
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for option, folder in (("token_file", "/run/secrets/kvstore"), ("unix", "/run/kvstore"), ("disk", "/nvme")):
        assert any(str(given[option]).removeprefix("file://").startswith(f"{m}/") for m in mounted if m == folder), (
            option
        )
    settings = load_settings([(n, str(token) if n == "token_file" else v) for n, v in flags], config_file="", env={})
    assert settings.server["listen"] == "0.0.0.0:7070"
    assert settings.server["memory"] == 256 << 30
    (space,) = settings.namespaces
    assert space.token == b"n0de-t0ken"
    assert space.disk == "file:///nvme/kv?bytes=5000GiB"
    # Kubernetes must leave it the time to write down what waits: drain_timeout for calls, and again for the disk.
    grace = find(documents, "DaemonSet", "node-use1-az4")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 2 * settings.server["drain_timeout"]
    assert container["resources"]["requests"]["memory"] == "258Gi"
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == 1


def test_nodes_keep_their_names_over_a_restart(documents: list[Tree]) -> None:
    spec = find(documents, "DaemonSet", "node-use1-az4")["spec"]["template"]["spec"]
    assert spec["hostNetwork"] is True
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert find(documents, "Service", "node-use1-az4")["spec"]["clusterIP"] == "None"


def test_engines_find_the_nodes_of_their_zone(documents: list[Tree], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(find(documents, "ConfigMap", "config-use1-az4")["data"]["config.yaml"])
    config = load_config(config_file=path, env={"KVSTORE_NODE_TOKEN": "n0de-t0ken"})
    assert [url.base for url in config.urls] == [
        "node://node-use1-az4.kvstore.svc:7070",
        "s3://acme-kv--use1-az4--x-s3/kv",
    ]
    service = find(documents, "Service", "node-use1-az4")
    assert f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc" == "node-use1-az4.kvstore.svc"
    assert service["spec"]["ports"][0]["port"] == 7070


def test_engines_start_with_our_connector(documents: list[Tree]) -> None:
    (container,) = find(documents, "Deployment", "engine-use1-az6")["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    assert command[:3] == ["vllm", "serve", "Qwen/Qwen2.5-7B-Instruct"]
    assert command[-2:] == ["--max-model-len", "32768"]
    connector = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_module_path"] == "kvstore.integrations.vllm"
    assert connector["kv_load_failure_policy"] == "recompute"
    config = connector["kv_connector_extra_config"]["config_file"]
    assert any(config.startswith(m["mountPath"]) and m["name"] == "config" for m in container["volumeMounts"])
    zone = {v["name"]: v.get("value") for v in container["env"]}["AWS_AVAILABILITY_ZONE_ID"]
    assert zone == "use1-az6"


def test_what_is_too_old_is_swept_by_who_may_delete(documents: list[Tree]) -> None:
    spec = find(documents, "CronJob", "sweep-use1-az4")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "evictor"
    *command, url = spec["containers"][0]["command"]
    assert command[:2] == ["python", "-m"]
    assert importlib.util.find_spec(command[2]) is not None
    (parsed,) = parse_urls(url)
    assert parsed.options["ttl"] == "6h"
    assert find(documents, "ServiceAccount", "evictor")


def test_device_plugins_run_on_gpu_nodes(documents: list[Tree]) -> None:
    for name in ("aws-efa-k8s-device-plugin", "nvidia-device-plugin"):
        spec = find(documents, "DaemonSet", name)["spec"]["template"]["spec"]
        assert spec["nodeSelector"] == {"kvstore/gpu": "true"}
        assert {"operator": "Exists"} in spec["tolerations"]
        assert "/var/lib/kubelet/device-plugins" in [v["hostPath"]["path"] for v in spec["volumes"]]
    efa = find(documents, "DaemonSet", "aws-efa-k8s-device-plugin")["spec"]["template"]["spec"]["containers"][0][
        "image"
    ]
    assert ".us-east-1." in efa


def test_karpenter_gets_its_queue(applied: Tree) -> None:
    values = yaml.safe_load(applied["karpenter_values"])
    assert values["settings"] == {"clusterName": "kv-test", "interruptionQueue": "kv-test-karpenter"}
