#!/usr/bin/env bash
# Patches an upstream package for sites that cannot load sam_rollout's plugins (docs/clusters.md):
#   scripts/apply_patches.sh            applies the patches made for the version that is installed
#   scripts/apply_patches.sh --check    says whether the patches would apply; changes nothing
#   scripts/apply_patches.sh --status   says whether the patches are applied; exits with 1 if not
#   scripts/apply_patches.sh --undo     restores the files exactly as they were
# Where to look:
#   --python PYTHON   the package that this interpreter imports (default: $PYTHON, or python3)
#   --target DIR      the package in this folder: site-packages, or the root of a source tree
# All patches are tried on a copy first. The package gets all patches, or none if one does not apply.
set -euo pipefail
export LC_ALL=C # this script reads the tools' output, which must be English
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

PATCHES="$ROOT/patches"
LIB="$ROOT/scripts/lib"
ACTION=apply
TARGET=""
PYTHON="${PYTHON:-python3}"
WORK=""
REPLACING=""

usage() { sed -n '2,/^set -/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
    case "$1" in
        --check | --undo | --status)
            [ "$ACTION" = apply ] || die "--$ACTION and $1 exclude each other"
            ACTION="${1#--}"
            ;;
        --target | --python)
            [ -n "${2:-}" ] || die "$1 needs a value (scripts/apply_patches.sh --help)"
            if [ "$1" = --target ]; then TARGET="$2"; else PYTHON="$2"; fi
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) die "unknown argument '$1' (scripts/apply_patches.sh --help)" ;;
    esac
    shift
done

command -v "$PYTHON" > /dev/null || die "there is no interpreter '$PYTHON'; name one: --python PYTHON"
[ -z "$TARGET" ] || [ -d "$TARGET" ] || die "there is no folder '$TARGET'"
if command -v patch > /dev/null; then
    PATCH_TOOL="patch"
elif command -v git > /dev/null; then
    PATCH_TOOL=git
else
    die "neither 'patch' nor 'git' was found on PATH; install one with the system's package manager"
fi

# If the script ends while it replaces files, all files are restored.
finish() {
    if [ -n "$REPLACING" ]; then
        replace_files "$WORK/before"
        [ "$ACTION" = undo ] || rm -rf "$RECORD"
        echo "error: interrupted; the files are as they were before" >&2
    fi
    [ -z "$WORK" ] || rm -rf "$WORK"
}
trap finish EXIT
trap 'exit 130' HUP INT TERM

# Prints the name of each project that has folders in patches/. A folder has the name PROJECT-VERSION.
upstreams() {
    local folder
    for folder in "$PATCHES"/*-[0-9]*/; do basename "${folder%-[0-9]*}"; done | sort -u
}

supported_versions() {
    local folder
    for folder in "$PATCHES/$NAME"-[0-9]*/; do basename "$folder" | sed "s/^$NAME-//"; done \
        | paste -s -d ' '
}

# Prints the file names in a list of checksums.
names() { cut -c 67- "$1"; }

# Prints a folder's patches in order.
series() { grep -v -e '^#' -e '^$' "$1/series"; }

# Succeeds if the files in folder $1 have the checksums in list $2.
matches() { (cd "$1" && sha256sum --check --status "$2" 2> /dev/null); }

# Prints, one per line, the files in folder $1 whose checksums differ from list $2.
differing() { (cd "$1" && sha256sum --check --quiet "$2" 2> /dev/null || true) | sed 's/: FAILED.*//'; }

# Copies files from folder $1 to folder $3; their names are in list $2.
copy_files() { (cd "$1" && names "$2" | xargs -d '\n' cp -p --parents -t "$3"); }

# Applies one patch to a copy; with -R, takes the patch back. The tool's output goes to the log.
run_patch() {
    local tree="$1" file="$2" direction=("${@:3}")
    if [ "$PATCH_TOOL" = patch ]; then
        patch --directory="$tree" --strip=1 --fuzz=0 --force --no-backup-if-mismatch --reject-file=- \
            ${direction[@]+"${direction[@]}"} --input="$file"
    else
        # In a repository, git would resolve the paths from the repository's top folder.
        GIT_CEILING_DIRECTORIES="$(dirname "$tree")" git -C "$tree" apply \
            ${direction[@]+"${direction[@]}"} "$file"
    fi > "$WORK/log" 2>&1
}

# Replaces the package's files with the files of a tree, each atomically and with the same mode. The
# files are not written in place, because a file in site-packages may be a hard link into a package
# manager's cache, which must not change.
replace_files() {
    local tree="$1" file
    while read -r file; do
        file="$PACKAGE_ROOT/$file"
        cat "$tree/${file#"$PACKAGE_ROOT/"}" > "$file.sam_rollout"
        cp --attributes-only --preserve=mode,ownership "$file" "$file.sam_rollout"
        mv -f "$file.sam_rollout" "$file"
    done <<< "$FILES"
}

# Sets FILES, and copies them to $WORK/before and $WORK/tree.
prepare() {
    local checksums="$1" file
    FILES="$(names "$checksums")"
    WORK="$(cd "$(mktemp -d)" && pwd -P)"
    mkdir "$WORK/before" "$WORK/tree"
    copy_files "$PACKAGE_ROOT" "$checksums" "$WORK/before"
    copy_files "$PACKAGE_ROOT" "$checksums" "$WORK/tree"
    for file in . $FILES; do
        [ -w "$(dirname "$PACKAGE_ROOT/$file")" ] \
            || die "$(dirname "$PACKAGE_ROOT/$file") cannot be written by $(id -un)"
    done
}

# Sets STATE: applied, unpatched, or changed (the files are neither the original nor the patched ones).
find_state() {
    local pristine="$FOLDER/pristine.sha256"
    [ ! -d "$RECORD" ] || pristine="$RECORD/pristine.sha256"
    STATE=changed
    if [ -d "$RECORD" ] && matches "$PACKAGE_ROOT" "$RECORD/patched.sha256"; then
        STATE=applied
    elif matches "$PACKAGE_ROOT" "$pristine"; then
        STATE=unpatched # a record may remain if the package was installed again
    fi
}

# Prints one line for every file that somebody else changed, and ends the script.
refuse_changed() {
    local file patches lines=()
    local patches_in="$FOLDER" expected="$FOLDER/pristine.sha256" of="$NAME $VERSION"
    if [ -d "$RECORD" ]; then
        patches_in="$RECORD" expected="$RECORD/patched.sha256" of="$NAME $VERSION as it was patched"
    fi
    while read -r file; do
        patches="$(cd "$patches_in" && series . | xargs grep -l -F "+++ b/$file" | paste -s -d ' ')"
        lines+=("  $PACKAGE_ROOT/$file is not that of $of; it is needed for: $patches")
    done <<< "$(differing "$PACKAGE_ROOT" "$expected")"
    printf '%s\n' "${lines[@]}" >&2
    die "somebody else changed the files above; nothing was touched." \
        "Install $NAME==$VERSION again, or see docs/clusters.md"
}

apply() {
    local patch
    if [ "$STATE" = applied ]; then
        for patch in series $(series "$FOLDER"); do
            cmp -s "$FOLDER/$patch" "$RECORD/$patch" \
                || die "other patches than these are applied ($patch differs); --undo first"
        done
        say "already applied: $NAME $VERSION in $PACKAGE_ROOT, nothing to do"
        return
    fi
    [ "$STATE" = unpatched ] || refuse_changed
    prepare "$FOLDER/pristine.sha256"
    for patch in $(series "$FOLDER"); do
        run_patch "$WORK/tree" "$FOLDER/$patch" || {
            cat "$WORK/log" >&2
            die "$patch does not apply to $NAME $VERSION in $PACKAGE_ROOT; nothing was touched"
        }
    done
    if [ "$ACTION" = check ]; then
        say "would apply: $(series "$FOLDER" | wc -l) patches to $NAME $VERSION in $PACKAGE_ROOT"
        return
    fi
    # The record is written first, so that an interrupted change can be undone.
    rm -rf "$RECORD"
    mkdir "$RECORD"
    (cd "$FOLDER" && series . | xargs cp -t "$RECORD" pristine.sha256 series)
    (cd "$WORK/tree" && names "$FOLDER/pristine.sha256" | xargs -d '\n' sha256sum) \
        > "$RECORD/patched.sha256"
    REPLACING=1
    replace_files "$WORK/tree"
    REPLACING=""
    say "applied: $(series "$FOLDER" | wc -l) patches to $NAME $VERSION in $PACKAGE_ROOT"
}

undo() {
    local patch
    if [ "$STATE" = unpatched ]; then
        rm -rf "$RECORD"
        say "not applied: $NAME $VERSION in $PACKAGE_ROOT, nothing to undo"
        return
    fi
    [ "$STATE" = applied ] || refuse_changed
    prepare "$RECORD/pristine.sha256"
    for patch in $(series "$RECORD" | tac); do
        run_patch "$WORK/tree" "$RECORD/$patch" -R || {
            cat "$WORK/log" >&2
            die "$patch cannot be taken back; nothing was touched"
        }
    done
    matches "$WORK/tree" "$RECORD/pristine.sha256" \
        || die "without the patches the files are not what they were before; nothing was touched"
    REPLACING=1
    replace_files "$WORK/tree"
    REPLACING=""
    rm -rf "$RECORD"
    say "undone: $NAME $VERSION in $PACKAGE_ROOT is as it was before"
}

status() {
    case "$STATE" in
        applied) say "applied: $NAME $VERSION in $PACKAGE_ROOT" ;;
        unpatched) say "not applied: $NAME $VERSION in $PACKAGE_ROOT" ;;
        changed) say "changed by somebody else: $NAME $VERSION in $PACKAGE_ROOT" ;;
    esac
    [ "$STATE" = applied ]
}

# Finds the package and sets NAME, VERSION and its folders; fails if the package is not found.
find_package() {
    local found
    found="$("$PYTHON" "$LIB/find_package.py" "$NAME" ${TARGET:+"$TARGET"})" || return 1
    VERSION="$(sed -n 1p <<< "$found")"
    PACKAGE_ROOT="$(sed -n 2p <<< "$found")"
    FOLDER="$PATCHES/$NAME-$VERSION"
    RECORD="$PACKAGE_ROOT/.sam_rollout-$NAME-$VERSION"
    [ -d "$FOLDER" ] && return
    # Another checkout's patches can be undone with the record that was left when they were applied.
    case "$ACTION" in undo | status) [ ! -d "$RECORD" ] || return 0 ;; esac
    die "$NAME $VERSION was found in $PACKAGE_ROOT; there are patches for" \
        "$NAME $(supported_versions)"
}

FOUND=""
STATUS=0
for NAME in $(upstreams); do
    find_package || continue
    FOUND=1
    find_state
    case "$ACTION" in
        apply | check) apply ;;
        undo) undo ;;
        status) status || STATUS=1 ;;
    esac
done
[ -n "$FOUND" ] || die "nothing to patch here; --target or --python says where to look"
[ "$STATUS" -eq 0 ]
