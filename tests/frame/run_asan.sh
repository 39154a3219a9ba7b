#!/bin/sh
# Builds the extension with AddressSanitizer, UndefinedBehaviorSanitizer and asserts, and runs tests/frame under it.
#   tests/frame/run_asan.sh [pytest arguments]
# PYTHON names the interpreter (default: python3); it needs pytest and pytest-timeout. PYTHONMALLOC=malloc lets the sanitizer
# see every object. Leaks are counted by test_leaks.py instead (CPython itself never frees everything).
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
WORK=${WORK:-/tmp/magneto-frame-tests}
out="$WORK/asan-$("$PYTHON" -c 'import platform; print(platform.python_version())')"
rm -rf "$out"
mkdir -p "$out"
suffix=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
include=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_paths()['include'])")
cc -shared -fPIC -g -O1 -Wall -UNDEBUG -fvisibility=hidden -fno-omit-frame-pointer -fsanitize=address,undefined \
    -fno-sanitize=alignment -I"$include" -Icsrc csrc/*.c -o "$out/_C$suffix" -ldl
LD_PRELOAD="$(cc -print-file-name=libasan.so) $(cc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    PYTHONMALLOC=malloc MAGNETO_EXTENSION="$out/_C.*.so" MAGNETO_SANITIZER=1 \
    timeout 550 "$PYTHON" -m pytest tests/frame --timeout=120 --confcutdir=tests/frame "$@"
