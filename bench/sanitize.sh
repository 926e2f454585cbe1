#!/usr/bin/env bash
# Runs the variants of the kernels of all families, of both passes, under compute-sanitizer and writes logs and a summary: bench/sanitize.sh [folder] [tool ...]
# COMMIT=hash names the commit where the tree is a copy without its history; FAMILIES="backward_sm90 ..." are the only ones that run.
# racecheck is no default: it does not follow the bulk copies of TMA through their mbarriers, and reports hazards where
# there are none. What delays between the Hopper kernels' threads change is tested in tests/gpu/test_hopper.py.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-bench/results/sanitizer}
shift || true
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck initcheck synccheck)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD CUFLASH_CACHE_DIR=${CUFLASH_CACHE_DIR:-$(mktemp -d)}

mkdir -p "$folder"
echo "== kernels into the cache"
"$python" tests/gpu/sanitizer_workload.py --compile ${FAMILIES:-}
echo "== without a tool"
"$python" tests/gpu/sanitizer_workload.py ${FAMILIES:-} | tee "$folder/plain.log"

failed=0
{
    echo "# compute-sanitizer"
    echo
    echo "$(date -u +%Y-%m-%d), commit ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}, $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $(compute-sanitizer --version | grep -i version)."
    echo "Workload: tests/gpu/sanitizer_workload.py, $(tail -n 1 "$folder/plain.log"), CuPy's memory pool off."
    echo
    echo "| tool | exit code | verdict |"
    echo "|---|---|---|"
} > "$folder/summary.md"
for tool in "${tools[@]}"; do
    echo "== $tool"
    code=0
    # cuda-bindings probes for functions of later drivers, which is an API error to memcheck and none of ours
    compute-sanitizer --tool "$tool" $([ "$tool" = memcheck ] && echo --report-api-errors=no) --error-exitcode 9 --log-file "$folder/$tool.log" \
        "$python" tests/gpu/sanitizer_workload.py ${FAMILIES:-} || code=$?
    [ "$code" -eq 0 ] || failed=1
    verdict=$(grep -h "SUMMARY" "$folder/$tool.log" | tail -n 1 | sed 's/^=* *//' || true)
    echo "| $tool | $code | ${verdict:-no summary} |" >> "$folder/summary.md"
done
cat "$folder/summary.md"
exit "$failed"
