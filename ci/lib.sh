# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts in ci/: sourced, not run. Steps print one line each, with their time; what
# they say goes to a log under build/logs, and is shown only when they fail.

set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$repo/build
venv=$build/venv
logs=$build/logs
stamps=$build/stamps
cache=${GPUSTASIS_CACHE:-${XDG_CACHE_HOME:-/var/cache}/gpustasis}
jobs=${GPUSTASIS_JOBS:-$(nproc)}

# cuda.h, for programs that are compiled here: the pinned one of build/venv.
use_cuda_include() {
    CUDA_INCLUDE=$(echo "$venv"/lib/python3.*/site-packages/nvidia/cu13/include)
    export CUDA_INCLUDE
}

# What was compiled once on this machine is not compiled again, in another clone neither.
use_compiler_cache() {
    command -v ccache >/dev/null || return 0
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
    export CCACHE_DIR=${CCACHE_DIR:-$cache/ccache} CCACHE_BASEDIR=$repo CCACHE_NOHASHDIR=1
}

# A criu for what runs gpustasis: the one that GPUSTASIS_CRIU names, this machine's own if the plugin
# can use it, else that of the first of these test roots that is there. gpustasis looks for none.
use_criu() { # SUITE...
    local suite
    if [ -n "${GPUSTASIS_CRIU:-}" ] ||
        "$venv/bin/python" -c 'from gpustasis.criu.find import find; find()' 2>/dev/null; then
        return
    fi
    for suite in "$@"; do
        [ -x "$cache/roots/$suite/usr/sbin/criu" ] || continue
        export GPUSTASIS_CRIU=$cache/roots/$suite
        return
    done
}

# criu gives a restored process the pid that it had. With the kernel's own limit of 32,768 pids come
# round within a minute of tests, and another test's process has it; systemd sets this one.
widen_pids() {
    local file=/proc/sys/kernel/pid_max
    if [ "$(cat "$file")" -lt 4194304 ] && ! { echo 4194304 >"$file"; } 2>/dev/null; then
        say "  pid_max: cannot be set to 4194304: a restore may find its pid taken"
    fi
}

say() { printf '%s\n' "$*"; }

# die WHAT HOW-TO-MEND
die() {
    printf 'FAILED  %s\n' "$1" >&2
    printf '        to mend it: %s\n' "$2" >&2
    exit 1
}

# Show the last line of a log again and again until killed; for people watching a terminal.
follow() {
    while sleep 1; do
        printf '\r\033[K  ...   %s: %.80s' "$1" "$(tail -n 1 "$2" 2>/dev/null | tr -d '\r\033')"
    done
}

# step NAME HOW-TO-MEND COMMAND...: run it, one line of output, die with the log's end if it fails.
step() {
    local name=$1 mend=$2 begin=$SECONDS log watcher='' rc=0
    shift 2
    mkdir -p "$logs"
    log=$(tr -cs 'A-Za-z0-9.' '-' <<<"$name")
    log=$logs/${log%-}.log
    : >"$log"
    if [ -t 1 ]; then
        follow "$name" "$log" &
        watcher=$!
    fi
    ("$@") >"$log" 2>&1 </dev/null || rc=$?
    if [ -n "$watcher" ]; then
        kill "$watcher" 2>/dev/null || true
        wait "$watcher" 2>/dev/null || true
        printf '\r\033[K'
    fi
    if [ "$rc" != 0 ]; then
        tail -n "${GPUSTASIS_LOG_LINES:-60}" "$log" >&2
        say "        the whole log: $log" >&2
        die "$name (exit $rc)" "$mend"
    fi
    printf '  ok    %-52s %4d s\n' "$name" $((SECONDS - begin))
}

# digest PATH...: one hash of the names and contents of all files below these paths.
digest() {
    (cd "$repo" && find "$@" -type f ! -name '*.pyc' ! -path '*/__pycache__/*' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)
}

# passed NAME VALUE: true if a check of this name has passed on this machine with this value, a digest of
# all that can change what it finds; pass NAME VALUE says so.
passed() { [ -e "$cache/passed/$1-$(sha256sum <<<"$2" | cut -d ' ' -f 1)" ]; }
pass() {
    mkdir -p "$cache/passed"
    : >"$cache/passed/$1-$(sha256sum <<<"$2" | cut -d ' ' -f 1)"
}

# fresh STAMP VALUE: true if the stamp holds this value. mark STAMP VALUE sets it.
fresh() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ]; }
mark() {
    mkdir -p "$stamps"
    printf '%s\n' "$2" >"$stamps/$1"
}
