#!/usr/bin/env bash
# Writes the lock files again: the newest release of every package that pyproject.toml allows, by version and hash.
#   lock.sh UV        UV: the uv command; `make locks` has one
set -euo pipefail
cd "$(dirname "$0")"
uv=$1

lock() { # OUTPUT INPUT [OPTION ...]
  "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --upgrade \
    --custom-compile-command "make locks" --output-file "$1" "${@:2}"
}

lock cpu.lock ../../pyproject.toml --extra redis --extra otel
lock cuda13.lock ../../pyproject.toml --extra redis --extra otel --extra cuda13
grep -oE 'hatchling[^"]*' ../../pyproject.toml | head -1 | lock build.lock -
