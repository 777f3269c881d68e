#!/usr/bin/env bash
# Makes .venv-ray: everything of .venv, and Ray. Its packages are its own; the rest is read from .venv, whose versions ray.txt
# agrees with.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ .venv-ray/.ready -nt requirements/ray.txt ]; then exit; fi
printf 'ray: making .venv-ray\n' >&2
.venv/bin/python -m venv --clear .venv-ray
.venv-ray/bin/python -m pip --disable-pip-version-check -qq install --require-hashes --only-binary :all: \
    -r requirements/ray.txt
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# As a folder of packages, so that its own `.pth` files count: Towline itself is one, being editable.
printf 'import site; site.addsitedir("%s")\n' "$(packages .venv)" >"$(packages .venv-ray)/towline-environment.pth"
touch .venv-ray/.ready
