#!/usr/bin/env bash
# Fetches Megatron-Core and mbridge for tests into .cache/megatron, after scripts/install.sh cpu; a
# second call does nothing. Both packages are outside .venv, because verl would otherwise import them in
# every run on a CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CONSTRAINTS="$ROOT/constraints/megatron-tests.txt"
TARGET="$CACHE_DIR/megatron"

mkdir -p "$CACHE_DIR"
exec 9> "$TARGET.lock"
flock 9 # two test runs may use the same checkout at once
cmp --quiet "$CONSTRAINTS" "$TARGET/pins.txt" && exit 0
find_uv "$ROOT/.venv/bin/python"
rm -rf "$TARGET.new"
"${UV[@]}" pip install --quiet --python "$ROOT/.venv/bin/python" --no-deps --target "$TARGET.new" \
    -r "$CONSTRAINTS"
cp "$CONSTRAINTS" "$TARGET.new/pins.txt"
rm -rf "$TARGET"
mv "$TARGET.new" "$TARGET"
