#!/bin/sh
# The steps of deploy/docker/Dockerfile, one function each, so that they run (and are tested) without Docker as well:
#
#   steps.sh build SOURCE WHEELS              the wheel of this checkout, into the folder WHEELS
#   steps.sh python                           a Python of 3.11 or newer with venv, from the base's packages if it has none
#   steps.sh install WHEELS SOURCE PREFIX EXTRAS   an environment in PREFIX with that wheel, pinned by constraints.txt
#   steps.sh engine WHEELS EXTRAS             the wheel into the Python of an engine's image, which keeps its versions
#   steps.sh check PREFIX                     starts the node that was installed, asks it, and stops it
#
# Needs a package index for what the wheel depends on (PIP_INDEX_URL and the like are pip's own). No step reads a secret.
set -eu

fail() { echo "steps.sh: $*" >&2; exit 1; }

# What is new enough, by name; nothing if there is none.
python_of() {
  for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$name"
      return 0
    fi
  done
  return 1
}

wheel_of() {
  set -- "$1"/kvstore-*.whl
  [ -f "$1" ] || fail "no wheel of kvstore in $(dirname "$1"); run the step 'build' first"
  [ $# -eq 1 ] || fail "more than one wheel of kvstore in $(dirname "$1"); empty it first"
  echo "$1"
}

build() {
  [ -f "$1/pyproject.toml" ] || fail "no pyproject.toml in $1; SOURCE is the root of the checkout"
  mkdir -p "$2"
  python=$(python_of) || fail "no Python of 3.11 to 3.13 with venv"
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$2" "$1"
  wheel_of "$2"
}

python() {
  if ! python_of >/dev/null; then
    command -v apt-get >/dev/null || fail "no Python of 3.11 to 3.13 with venv, and no apt-get to get one; take another base"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-venv ca-certificates >/dev/null
    rm -rf /var/lib/apt/lists/*
  fi
  python_of || fail "the base's packages have no Python of 3.11 to 3.13"
}

install() {
  wheel=$(wheel_of "$1")
  [ -f "$2/constraints.txt" ] || fail "no constraints.txt in $2; SOURCE is the root of the checkout"
  python=$(python_of) || fail "no Python of 3.11 to 3.13 with venv; run the step 'python' first"
  "$python" -m venv "$3"
  "$3/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --constraint "$2/constraints.txt" \
    "kvstore[$4] @ file://$(cd "$(dirname "$wheel")" && pwd)/$(basename "$wheel")"
  "$3/bin/kvstore" --version
}

engine() {
  wheel=$(wheel_of "$1")
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
    "kvstore[$2] @ file://$(cd "$(dirname "$wheel")" && pwd)/$(basename "$wheel")"
  "${PYTHON:-python3}" -c 'import kvstore; print("kvstore", kvstore.__version__)'
}

# A node on a free port: it must say what it listens on, be live and ready, show numbers and a page, and end with 0.
check() {
  "$1/bin/python" - "$1/bin/kvstore" <<'PYTHON'
import json
import os
import subprocess
import sys
import time
import urllib.request

environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
command = [sys.argv[1], "serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--memory", "16MiB", "--json"]
node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
try:
    said = json.loads(node.stdout.readline() or "null")
    if said is None:
        sys.exit(f"steps.sh: the node ended with status {node.wait(10)} before it was ready")
    base = said["http"] if "//" in said["http"] else "http://" + said["http"]
    for path, must in (("/healthz", ""), ("/readyz", ""), ("/metrics", "kvstore_"), ("/", "<title>kvstore"), ("/openapi.json", "/v1/")):
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            text = answer.read().decode()
        if must not in text:
            sys.exit(f"steps.sh: {path} does not have {must!r}")
        print("ok", path)
    node.terminate()
    status = node.wait(30)
    if status:
        sys.exit(f"steps.sh: the node ended with status {status} at SIGTERM")
    print("ok", "SIGTERM")
finally:
    if node.poll() is None:
        node.kill()
        node.wait()
PYTHON
}

step=${1:-}
[ $# -gt 0 ] && shift
case "$step:$#" in
  build:2 | python:0 | install:4 | engine:2 | check:1) "$step" "$@" ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
