#!/usr/bin/env bash
# Write run.lock, dev.lock and oracles.lock: the newest versions that pyproject.toml allows, in one fresh environment.
# Usage: requirements/lock.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."

env=$(mktemp -d)
trap 'rm -rf "$env"' EXIT
"$1" -m venv "$env"
pip() { "$env/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

freeze() { # local build labels such as +cpu exist in one place only; the version without it resolves everywhere
    pip freeze --all --exclude pip --exclude structured-dgp | sed 's/+.*//'
}

write() { # write FILE, lines on standard input
    { echo "# Made by \`make lock\` on $("$env/bin/python" -V); do not edit."; cat; } > "requirements/$1"
}

pip uninstall -y setuptools
pip install .
freeze | write run.lock
pip install '.[test,lint]'
freeze | write dev.lock
freeze > "$env/dev.txt"
# Installed on top of dev.lock: its versions stay as they are, so that only the additions are written.
pip install -c "$env/dev.txt" '.[oracles]'
freeze | { grep -vxFf "$env/dev.txt" || true; } | write oracles.lock
