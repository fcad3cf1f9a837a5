#!/usr/bin/env bash
# Everything that needs a GPU, on one of the H100 class in under 8 minutes.
#
#   benchmarks/gpu.sh              # results in ./gpu-results
#   OUT=results PYTHON=python3 benchmarks/gpu.sh
#   DEVICE=cpu benchmarks/gpu.sh   # tries this script out, tiny and in plain torch
#
# Runs the GPU tests, the kernel benchmark and the decode benchmark, each under a time limit, and
# writes $OUT/{kernels.json,decode.json,gpu.md} and the log of each. Installs nothing: kvpage is
# taken from this checkout; torch, triton, transformers and pytest must be there. Exits with 2 when
# torch sees no GPU, with 1 when a part failed or ran out of time (the others run all the same).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-$PWD/gpu-results}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
TESTS_SECONDS=${TESTS_SECONDS:-130}
KERNELS_SECONDS=${KERNELS_SECONDS:-100}
DECODE_SECONDS=${DECODE_SECONDS:-230}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)

DEVICE=$DEVICE "$PYTHON" - <<'PY'
import os
import sys
try:
    import torch
except ModuleNotFoundError:
    sys.exit("benchmarks/gpu.sh: no torch for this python; set PYTHON to one that has it")
sys.exit(0 if os.environ["DEVICE"] == "cpu" or torch.cuda.is_available() else 2)
PY
case $? in
    0) ;;
    2) echo "benchmarks/gpu.sh: torch sees no GPU here; nothing was run" >&2; exit 2 ;;
    *) exit 1 ;;
esac

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
DRIVER=${driver:-none found} DEVICE=$DEVICE "$PYTHON" - <<'PY' | tee "$OUT/versions.txt"
import importlib.metadata as metadata
import os
import torch

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"

device = "cpu, in plain torch"
if os.environ["DEVICE"] != "cpu":
    properties = torch.cuda.get_device_properties(0)
    device = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
rows = {"device": device, "driver": os.environ["DRIVER"], "torch": torch.__version__}
rows |= {n: version(n) for n in ("triton", "transformers", "flash-attn", "flashinfer-python")}
print(*(f"{name:<17}  {value}" for name, value in rows.items()), sep="\n")
PY

[ "$DEVICE" = cpu ] && arguments=(--device cpu --shape tiny) || arguments=()
failed=0
part() { # name, seconds, command ...
    local name=$1 seconds=$2 started=$SECONDS status
    shift 2
    echo "+ $name: $*"
    timeout --signal=INT --kill-after=10 "$seconds" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    tail -n 40 "$OUT/$name.log" | cut -c 1-300
    case $status in
        0) echo "$name: done in $((SECONDS - started)) s" ;;
        124 | 137) echo "$name: FAIL, stopped after $seconds s" ;;
        *) echo "$name: FAIL, exit status $status" ;;
    esac | tee "$OUT/$name.status"
    [ "$status" = 0 ] || failed=1
}

rm -f "$OUT"/{kernels,decode}.{json,md} "$OUT/gpu.md"
shopt -s nullglob
# addopts would ask for pytest-xdist, which need not be there; one process has the GPU to itself.
part tests "$TESTS_SECONDS" "$PYTHON" -m pytest -o addopts="-q --strict-markers" \
    -p no:cacheprovider -m gpu tests/test_on_gpu.py
part kernels "$KERNELS_SECONDS" "$PYTHON" benchmarks/gpu_kernels.py --out "$OUT" \
    "${arguments[@]}"
part decode "$DECODE_SECONDS" "$PYTHON" benchmarks/gpu_decode.py --out "$OUT" \
    --seconds "$((DECODE_SECONDS > 60 ? DECODE_SECONDS - 30 : DECODE_SECONDS))" "${arguments[@]}"

{
    echo "# kvpage on a GPU"
    echo
    sed 's/^/    /' "$OUT/versions.txt"
    echo
    for name in tests kernels decode; do
        echo "- $(cat "$OUT/$name.status")"
    done
    echo
    echo "Tests: $(grep -E '(passed|failed|skipped|error)' "$OUT/tests.log" | tail -n 1)"
    for name in kernels decode; do
        if [ -f "$OUT/$name.md" ]; then
            echo
            cat "$OUT/$name.md"
        fi
    done
} >"$OUT/gpu.md"
echo "results:" "$OUT"/*.md "$OUT"/*.json
exit "$failed"
