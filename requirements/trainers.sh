#!/usr/bin/env bash
# Makes an environment of its own, .venv-NAME, for each named trainer framework: `trainers.sh trl verl`; `make test-trainers`
# runs it. They cannot share one: each wants its own versions of the same libraries.
#
# Everything is pinned in trainers/NAME.txt and installed without dependencies, so nothing brings another torch, or CUDA.
# `trainers.sh --lock NAME…` resolves trainers/NAME.in with torch.txt in a fresh environment and writes that file anew.
#
#   TORCH_ARGS  pip arguments for torch alone, such as an index with CPU or CUDA builds
#   PYTHON312   a Python 3.12, which NeMo Gym needs, if it is not found
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'trainers: %s\n' "$*" >&2; }

# Frameworks that tests speak to over a wire: no Towline and no torch in their environments.
apart() { [ "$1" = nemo-gym ] || [ "$1" = verifiers ] || [ "$1" = routers ]; }

# The Python that a framework needs.
python_of() {
    local candidate
    case "$1" in
        nemo-gym)
            for candidate in ${PYTHON312:-python3.12 "$(pyenv root 2>/dev/null)"/versions/3.12*/bin/python3.12}; do
                if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
                    printf '%s\n' "$candidate"
                    return
                fi
            done
            say "$1 needs Python 3.12; install it, or name it: PYTHON312=/path/to/python3.12"
            return 1
            ;;
        *) .venv/bin/python -c 'import sys; print(sys.executable)' ;;
    esac
}

fresh() { # NAME FOLDER: an environment with torch and nothing else
    local python
    python=$(python_of "$1")
    "$python" -m venv --clear "$2"
    if apart "$1"; then return; fi
    # shellcheck disable=SC2086  # TORCH_ARGS is a list of arguments
    pip "$2" install ${TORCH_ARGS:-} -r requirements/torch.txt
}

pip() { local folder=$1; shift; "$folder/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

lock() {
    local scratch list=requirements/trainers/$1.txt
    scratch=$(mktemp -d)
    say "resolving requirements/trainers/$1.in"
    fresh "$1" "$scratch"
    # The constraint makes whatever wants another torch an error.
    if apart "$1"; then
        pip "$scratch" install -r "requirements/trainers/$1.in"
    else
        pip "$scratch" install -c requirements/torch.txt -r "requirements/trainers/$1.in" -e '.[torch]'
    fi
    {
        printf '# Written by `requirements/trainers.sh --lock %s`; torch is apart, since its build is the machine'"'"'s choice.\n' "$1"
        "$scratch/bin/python" -m pip freeze --exclude-editable | grep -v '^torch=='
    } >"$list"
    rm -rf "$scratch"
}

install() {
    local folder=.venv-$1 list=requirements/trainers/$1.txt
    if [ "$folder/.ready" -nt "$list" ] && [ "$folder/.ready" -nt requirements/torch.txt ]; then return; fi
    say "making $folder"
    fresh "$1" "$folder"
    pip "$folder" install --no-deps -r "$list"
    apart "$1" || pip "$folder" install --no-deps --no-index --no-build-isolation --editable .
    touch "$folder/.ready"
}

action=install
if [ "${1:-}" = --lock ]; then action=lock; shift; fi
for name in "$@"; do "$action" "$name"; done
