#!/usr/bin/env bash
# compute-sanitizer over the smallest cases of the kernels and of the engine: memcheck, then racecheck.
#
#     tests/gpu/sanitize.sh FOLDER                logs: FOLDER/memcheck.log, FOLDER/racecheck.log
#
# PYTHON as in session.sh.  SANITIZE_SECONDS (240): the limit of each tool.  The status is the number of tools that found
# something, failed or ran out of time.
set -u
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
folder=$(realpath -m "${1:?usage: tests/gpu/sanitize.sh FOLDER}")
mkdir -p "$folder"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0
for tool in memcheck racecheck; do
    status=0
    timeout --kill-after=10 "${SANITIZE_SECONDS:-240}" compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 99 \
        "$python" tests/gpu/sanitized_cases.py >"$folder/$tool.log" 2>&1 || status=$?
    [[ $status == 0 ]] || failed=$((failed + 1))
    echo "$tool: status $status, $(grep -E 'SUMMARY' "$folder/$tool.log" | tail -n 1)"
done
exit "$failed"
