"""Write what the services read from what Secrets Manager gave: configure.py SECRETS ETC. Standard library only."""

import json
import os
import pathlib
import shlex
import sys

given, etc = map(pathlib.Path, sys.argv[1:])


def write(name: str, text: str, mode: int) -> None:
    new = etc / f".{name}.new"
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    new.chmod(mode)
    new.rename(etc / name)


def secret(name: str) -> str:
    path = given / name
    return path.read_text().strip() if path.exists() else ""


config = json.loads(secret("config"))
zone = secret("zone")
if zone not in config["config_yaml"]:
    sys.exit(f"kvstore-boot: no configuration for zone {zone}; there is one for {', '.join(config['config_yaml'])}")
write("config.yaml", config["config_yaml"][zone], 0o644)
write("node.yaml", config["node_yaml"], 0o644)

node, engine = {}, {"KVSTORE_CONFIG_FILE": "/etc/kvstore/config.yaml", "AWS_AVAILABILITY_ZONE_ID": zone}
if token := secret("node_token"):
    node["KVSTORE_SERVE_TOKEN"] = engine["KVSTORE_NODE_TOKEN"] = token
if valkey := secret("valkey"):
    login = json.loads(valkey)
    engine["KVSTORE_VALKEYS_PASSWORD"] = login.get("password") or login["auth_token"]
    if login.get("username"):
        engine["KVSTORE_VALKEYS_USERNAME"] = login["username"]
for name, variables in ("node.env", node), ("engine.env", engine):
    if bad := [v for v in variables.values() if "\n" in v]:
        sys.exit(f"kvstore-boot: {len(bad)} secrets of {name} have more than one line")
    write(name, "".join(f"{key}={value}\n" for key, value in variables.items()), 0o600)

connector = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"config_file": "/etc/kvstore/config.yaml"},
}
model = config["model"]
words = ["vllm", "serve", model["id"], "--kv-transfer-config", json.dumps(connector), *model["args"]]
write("engine.sh", f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', 0o755)
