#!/usr/bin/env bash
# compute-sanitizer over every launch of the engine, mode by mode, and over the small cases of every kernel: memcheck and
# racecheck.
#
#     tests/gpu/sanitize.sh FOLDER                logs: FOLDER/memcheck-<cases>.log, FOLDER/racecheck-<cases>.log
#
# PYTHON as in session.sh.  A process a tool and test file, of the engine one a mode, SANITIZE_JOBS (half the cores) at
# once, each at most SANITIZE_SECONDS (700).  The status is 0 if every one ended, had cases that passed, and found nothing.
set -u
cd "$(dirname "$0")/../.."

folder=$(realpath -m "${1:?usage: tests/gpu/sanitize.sh FOLDER}")
mkdir -p "$folder"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHON=${PYTHON:-python3} SANITIZE_SECONDS=${SANITIZE_SECONDS:-700} folder

# sanitize TOOL FILE[::CASE]
sanitize() {
    local name log status=0 began=$SECONDS
    name=$(basename "${2##*::}" .py)
    log=$folder/$1-$(tr '[' - <<<"${name%]}").log
    timeout --kill-after=10 "$SANITIZE_SECONDS" compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 99 \
        "$PYTHON" tests/gpu/sanitized_cases.py "$2" >"$log" 2>&1 || status=$?
    printf '%-10s %-60s status %3d  %4d s  %s; %s\n' "$1" "$2" "$status" $((SECONDS - began)) \
        "$(grep -E '^[0-9]+ (passed|failed|error)' "$log" | tail -n 1)" "$(grep -E 'SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')"
    return $((status != 0))  # xargs would stop at 255
}
export -f sanitize

mapfile -t cases < <(printf 'tests/gpu/test_every_launch.py::test_every_launch[%s]\n' fp16 int8 h-fp16 h-int8 h-int4; grep -lE '(device|probe): Device' tests/kernels/test_*.py)
for tool in racecheck memcheck; do printf "$tool %s\n" "${cases[@]}"; done |
    xargs -P "${SANITIZE_JOBS:-$((($(nproc) + 1) / 2))}" -L 1 bash -c 'sanitize "$0" "$@"' && echo "all clean"
