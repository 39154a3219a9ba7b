#!/bin/sh
# Builds the extension for every supported Python that is found, outside the source tree, and runs tests/frame under each.
#   tests/frame/run_versions.sh [pytest arguments]
# PYTHONS names the interpreters (default: those of pyenv and of PATH); WORK the folder for virtual environments and builds.
set -eu
cd "$(dirname "$0")/../.."
WORK=${WORK:-/tmp/magneto-frame-tests}
CFLAGS_EXTRA=${CFLAGS_EXTRA:-}
mkdir -p "$WORK"

candidates() {
    for minor in 11 12 13; do
        for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python "$(command -v python3.$minor || true)"; do
            if [ -x "$python" ]; then
                echo "$python"
                break
            fi
        done
    done
}

status=0
ran=0
for python in ${PYTHONS:-$(candidates)}; do
    version=$("$python" -c 'import platform; print(platform.python_version())')
    venv="$WORK/venv-$version"
    out="$WORK/build-$version"
    if [ ! -x "$venv/bin/pytest" ]; then
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install -q "pytest>=8" "pytest-timeout>=2.3" "setuptools>=68"
    fi
    rm -rf "$out"
    MAGNETO_CFLAGS="-Werror $CFLAGS_EXTRA" "$venv/bin/python" -W ignore setup.py -q build_ext --build-lib "$out" --build-temp "$out/temp" 2>"$WORK/log" || {
        cat "$WORK/log"
        exit 1
    }
    echo "== Python $version"
    MAGNETO_EXTENSION="$out/magneto/_C.*.so" timeout 300 "$venv/bin/python" -m pytest tests/frame --timeout=60 --confcutdir=tests/frame "$@" || status=1
    ran=$((ran + 1))
done
echo "$ran versions, status $status"
exit $status
