#!/usr/bin/env bash
# Compiles constraints/{cpu,cuda,ascend,ascend-tests}.txt from constraints/<profile>.overrides.txt and
# pyproject.toml (extras <profile>, dashboard and dev; for ascend-tests the extra dev and
# constraints/ascend-tests.in). The script reads package metadata only and installs nothing.
#   scripts/lib/compile_constraints.sh [cpu|cuda|ascend|ascend-tests ...] [-- uv options, e.g. --upgrade]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PROFILES=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    PROFILES+=("$1")
    shift
done
[ "${1:-}" = "--" ] && shift
[ ${#PROFILES[@]} -gt 0 ] || PROFILES=(cpu cuda ascend ascend-tests)

find_uv "python$PYTHON_VERSION"
cd "$ROOT"

for profile in "${PROFILES[@]}"; do
    cpu_torch=""
    wanted=(pyproject.toml --extra "$profile" --extra dashboard --extra dev)
    case "$profile" in
        cpu) platform="x86_64-manylinux_2_28"; cpu_torch=1 ;;
        cuda) platform="x86_64-manylinux_2_28" ;;
        # Ascend servers have Arm hosts. The registry's torch 2.10 is a CPU build for Arm, but
        # not for x86.
        ascend) platform="aarch64-manylinux_2_34" ;;
        ascend-tests)
            platform="x86_64-manylinux_2_28"
            cpu_torch=1
            wanted=(pyproject.toml constraints/ascend-tests.in --extra dev)
            ;;
        *) die "unknown profile '$profile': cpu, cuda, ascend or ascend-tests" ;;
    esac
    say "constraints/$profile.txt for Python $PYTHON_VERSION on $platform"
    CPU_TORCH="$cpu_torch" "${UV[@]}" pip compile --quiet "${wanted[@]}" \
        --overrides "constraints/$profile.overrides.txt" \
        --python-version "$PYTHON_VERSION" --python-platform "$platform" \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        "$@" \
        --output-file "constraints/$profile.txt" > /dev/null
    {
        echo "# Python $PYTHON_VERSION, $platform; made by scripts/lib/compile_constraints.sh $profile"
        echo "# What is left out, and why: constraints/$profile.overrides.txt"
        cat "constraints/$profile.txt"
    } > "constraints/$profile.txt.new"
    mv "constraints/$profile.txt.new" "constraints/$profile.txt"
done
