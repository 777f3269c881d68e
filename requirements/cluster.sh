#!/usr/bin/env bash
# Makes .venv-cluster, with the validator of Kubernetes manifests that `make test-cluster` runs.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ .venv-cluster/.ready -nt requirements/cluster.txt ]; then exit; fi
printf 'cluster: making .venv-cluster\n' >&2
.venv/bin/python -m venv --clear .venv-cluster
.venv-cluster/bin/python -m pip --disable-pip-version-check -qq install --require-hashes --only-binary :all: \
    -r requirements/cluster.txt
touch .venv-cluster/.ready
