#!/bin/sh
# All figures of nodes and transports (docs/figures.md, "Nodes and transports"), one after the other, in under 6 minutes.
#
#   sh tests/bench/node_figures.sh [FOLDER]     JSON of every run goes there (default: a new one in $TMPDIR)
#
# Run it on a quiet machine, from any folder, with the project's environment active. Ratios are taken within one run,
# the two sides interleaved. UCX and Mooncake rows are left out where they are not installed. At the end: all figures
# with their bars. Exits with 1 if a verification failed or a run did not end, not for a bar.
set -u
cd "$(dirname "$0")/../.." || exit 1
folder=${1:-$(mktemp -d "${TMPDIR:-/tmp}/node-figures-XXXXXX")}
mkdir -p "$folder" || exit 1
export OMP_NUM_THREADS=1
failed=0

step() { # name, command…
    name=$1
    shift
    echo "== $name: $*"
    timeout 120 "$@" --json "$folder/$name.json"
    status=$?
    case $name:$status in
    *:0) ;;
    bench_*:1) echo "$name: a figure did not reach its bar, or a check failed: see above" ;;
    *) echo "$name: failed with $status" && failed=1 ;;
    esac
}

has() { python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

uptime
step tcp kvstore-bench io node://local --transport tcp --sizes 16MiB
step tcp_16KiB kvstore-bench io node://local --transport tcp --sizes 16KiB --batch 1024
step shm kvstore-bench io node://local --transport shm --sizes 16MiB
step bench_transport python tests/bench/bench_transport.py --repeats 7
step bench_shm python tests/bench/bench_shm.py --repeats 5
if has ucxx; then
    step ucx kvstore-bench io node://local --transport ucx --sizes 16MiB
    step bench_ucx python tests/bench/bench_ucx.py --sizes 16MiB --repeats 3
fi
if has mooncake; then
    step mooncake kvstore-bench compare mooncake
fi
uptime
python - "$folder" <<'P'
import json, sys
from pathlib import Path

for path in sorted(Path(sys.argv[1]).glob("*.json")):
    for name, figure in json.loads(path.read_text())["figures"].items():
        bar, value = figure["bar"], figure["value"]
        better = {"higher": "≥", "lower": "≤"}[figure["better"]]
        met = bar is None or (value >= bar if figure["better"] == "higher" else value <= bar)
        shown = "" if bar is None else f"bar {better} {bar:g}: {'met' if met else 'NOT MET'}"
        print(f"{name:44} {value:10.4g} {figure['unit']:8} {shown}")
P
echo "JSON: $folder"
exit $failed
