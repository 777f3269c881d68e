#!/usr/bin/env bash
# Installs system packages that are missing: `system.sh PROGRAM:PACKAGE…`. Each is named by a program that it brings, looked
# for on PATH and in the folders of administration. With apt and the right to use it, it is installed; else one line says
# what to do.
set -euo pipefail
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin:/usr/lib/postgresql/15/bin"

missing=()
for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

sudo=()
if [ "$(id -u)" -ne 0 ]; then sudo=(sudo -n); fi
if command -v apt-get >/dev/null && "${sudo[@]}" true 2>/dev/null; then
    printf 'setup: installing %s with apt\n' "${missing[*]}" >&2
    apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >&2; }
    # A service that a package would start is not wanted: tests start their own.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" >/dev/null
        "${sudo[@]}" chmod +x "$policy"
        # shellcheck disable=SC2064  # expanded now on purpose
        trap "${sudo[*]} rm -f $policy" EXIT
    fi
    apt update
    apt install -y --no-install-recommends "${missing[@]}"
else
    printf 'setup: these system packages are needed; install them and try again: %s\n' "${missing[*]}" >&2
    exit 1
fi
