#!/usr/bin/env bash
# Makes .venv next to the Makefile and installs the locked requirements into it; `make setup` runs it when they change.
#
# Everything but torch is checked against its hash. Downloads land in pip's own cache, outside the clone. A run that was
# interrupted is finished by the next one: each step looks at what is there.
#
#   PYTHON      the interpreter to use, otherwise the first of python3.11 … python3 that is new enough
#   TORCH_ARGS  pip arguments for torch alone, such as an index with CPU or CUDA builds
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if new_enough "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

# System packages by apt, where that is possible without asking anybody anything.
apt_install() {
    local sudo=()
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || return 1
        sudo=(sudo -n)
    fi
    say "installing $* with apt"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq update &&
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >&2
}

if ! python=$(find_python); then
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
    { apt_install python3 python3-venv && python=$(find_python); } ||
        fail "Python 3.11 or newer is needed and was not found; install it, or run: make setup PYTHON=/path/to/python3"
fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1 || ! new_enough .venv/bin/python; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # Debian ships Python without the part that makes environments.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install "python$version-venv" ||
        fail "$python cannot make virtual environments; install the system package python$version-venv"
    say "making .venv with Python $version ($python)"
    "$python" -m venv --clear .venv
fi

# Silent but for errors, so that a log stays readable; at a terminal the one long download shows its progress.
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
quiet=(-qq)
if [ -t 2 ]; then torch_quiet=(); else torch_quiet=("${quiet[@]}"); fi

say "installing requirements/dev.txt"
pip install "${quiet[@]}" --require-hashes --only-binary :all: -r requirements/dev.txt
say "installing torch (CPU builds are far smaller than CUDA builds: see requirements/torch.txt)"
# shellcheck disable=SC2086  # TORCH_ARGS is a list of arguments
pip install ${torch_quiet[@]+"${torch_quiet[@]}"} ${TORCH_ARGS:-} -r requirements/torch.txt
say "installing the packages of which only a part is used, without their dependencies"
pip install "${quiet[@]}" --require-hashes --only-binary :all: --no-deps -r requirements/templates.txt
say "installing towline itself, editable"
# Without an index, so that a dependency in pyproject.toml that the lock does not have is an error here.
pip install "${quiet[@]}" --no-index --no-build-isolation --editable . ||
    fail "towline needs something that requirements/dev.txt does not lock; run: make lock"
