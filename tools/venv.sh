#!/usr/bin/env bash
# Makes a virtual environment, or brings it up to date.
#
#   tools/venv.sh VENV PIP-INSTALL-ARGUMENTS…
#
# Needs a Python of at least 3.11 (PYTHON=… chooses one) with its venv module, and a package index. Prints one line
# for each large download, so that a first install is seen to move; the whole of pip's output is in VENV/install.log.
set -euo pipefail

venv=$1
shift

fail() {
    echo "error: $*" >&2
    exit 1
}

usable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
        usable "$PYTHON" || fail "pdserve needs Python 3.11 or later, but PYTHON=$PYTHON is $("$PYTHON" -V 2>&1)"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "pdserve needs Python 3.11 or later; found: $(python3 -V 2>&1 || echo 'no python3'). Install python3.11, or run" \
        "make PYTHON=/path/to/python3.11 …"
}

# A venv whose interpreter has gone (a system upgrade, a copied folder) is made anew.
if ! usable "$venv/bin/python"; then
    python=$(find_python)
    echo "Making $venv with $("$python" -V 2>&1) …"
    rm -rf "$venv"
    if ! output=$("$python" -m venv "$venv" 2>&1); then
        rm -rf "$venv"
        echo "$output" >&2
        fail "could not make $venv; on Debian and Ubuntu the package python3-venv may be missing"
    fi
fi

echo "Installing into $venv (a first time takes some minutes) …"
log=$venv/install.log
started=$SECONDS
progress='
    /^ *Downloading .*\([0-9.]+ [MG]B\)/ { n = split($2, path, "/"); print "  " path[n] " " $3 " " $4; fflush() }
    /^Installing collected packages/     { print "  unpacking " NF - 3 " packages"; fflush() }
'
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" 2>&1 \
    | tee "$log" | awk "$progress"; then
    tail -n 20 "$log" >&2
    fail "pip could not install into $venv (all of its output: $log)"
fi
echo "Installed in $((SECONDS - started)) s."
