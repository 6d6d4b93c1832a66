#!/usr/bin/env bash
# All that needs a GPU in one go: tests, benchmarks, sanitizer.  Logs and JSON in a folder, a short summary last.
#
#     tests/gpu/session.sh FOLDER [PART ...]      all parts but the sanitizer, or those that are named:
#     kernels engine bench-kernels bench-prefix bench-traffic bench-scaling sanitize
#
# PYTHON (python3): an interpreter that has TinyLoop's dependencies, pytest with pytest-xdist, and CuPy; TinyLoop itself
# need not be installed, but for bench-prefix, whose server says its version.  GPU_TEST_JOBS (4): test processes side by
# side.  Every part has a time limit; one that fails or runs out of time does not stop the next.  The status is the number
# of parts that failed.
set -u
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
folder=$(realpath -m "${1:?usage: tests/gpu/session.sh FOLDER [PART ...]}")
shift
parts=("${@:-}")
[[ -n ${parts[0]} ]] || parts=(kernels engine bench-kernels bench-prefix bench-traffic bench-scaling)
mkdir -p "$folder"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

# part NAME SECONDS COMMAND ...
part() {
    local name=$1 seconds=$2 began=$SECONDS status=0
    shift 2
    timeout --kill-after=10 "$seconds" "$@" >"$folder/$name.log" 2>&1 || status=$?
    [[ $status == 0 ]] || failed=$((failed + 1))
    printf '%-14s status %3d  %4d s  %s\n' "$name" "$status" $((SECONDS - began)) "$(tail -n 1 "$folder/$name.log")" |
        tee -a "$folder/summary.txt"
}

pytest=("$python" -m pytest -q -m gpu -p no:cacheprovider -n "${GPU_TEST_JOBS:-4}" --durations=10)
: >"$folder/summary.txt"
for name in "${parts[@]}"; do
    case $name in
        kernels) part "$name" 150 "${pytest[@]}" tests/kernels ;;
        engine) part "$name" 240 "${pytest[@]}" tests/engine tests/gpu tests/quantize/test_trajectory.py ;;
        bench-kernels) part "$name" 120 "$python" tests/bench_kernels.py --out "$folder/bench_kernels.json" ;;
        bench-prefix)
            part "$name" 200 "$python" tests/bench_prefix_cache.py --engine cuda --out "$folder/bench_prefix_cache.json"
            ;;
        bench-traffic)
            part "$name" 120 "$python" tests/bench_traffic.py --engine cuda --out "$folder/bench_traffic.json"
            ;;
        bench-scaling)
            part "$name" 200 "$python" tests/bench_scaling.py --engine cuda --budget 120 --out "$folder/bench_scaling.json"
            ;;
        sanitize) part "$name" 1800 tests/gpu/sanitize.sh "$folder" ;;
        *) echo "no part is named $name" >&2 && failed=$((failed + 1)) ;;
    esac
done

for name in bench-kernels bench-prefix bench-traffic bench-scaling sanitize; do
    [[ ! -f $folder/$name.log ]] || { echo && cat "$folder/$name.log"; }
done
echo && cat "$folder/summary.txt"
exit "$failed"
