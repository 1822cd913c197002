#!/bin/sh
# Make ENV_DIR a virtual environment that holds this project, editable, with the named extras.
#
#   sh tools/setup_env.sh ENV_DIR EXTRA[,EXTRA...] [REQUIREMENT...]
#
# A stamp inside ENV_DIR, written only once everything is installed, records what the environment
# was made from. While it still holds nothing is done. Where the environment was moved, is broken,
# was left half made or has another Python than asked for, it is made anew.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

env_dir=$1
extras=$2
shift 2

stamp=$env_dir/.setup-stamp
env_python=$env_dir/bin/python

# Settings meant for other environments must not leak into this one. Package index, certificate
# and constraint settings of pip are left alone.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON
export PIP_USER=0

say() {
    echo "setup: $*" >&2
}

identity() { # the version and the base interpreter of the given Python; nothing if it does not run
    "$1" -c 'import os, sys
print("%d.%d" % sys.version_info[:2], os.path.realpath(sys._base_executable))' \
        </dev/null 2>/dev/null || true
}

made_from() { # what a healthy environment's stamp starts with
    echo "place $(pwd -P)/$env_dir"
    echo "python $(identity "$env_python")"
}

wanted() { # what it was installed from
    echo "project $(cksum <pyproject.toml)"
    echo "requirements $*"
}

stamp_has() { # every line of stdin is a line of the stamp
    while IFS= read -r line; do
        grep -qxF -e "$line" "$stamp" || return 1
    done
}

extra_lines() {
    echo "$extras" | tr ',' '\n' | sed 's/^/extra /'
}

usable() { # the environment is whole and has the Python that was asked for, if one was
    [ -f "$stamp" ] && made_from | stamp_has || return 1
    "$env_python" -c 'import pip' </dev/null 2>/dev/null || return 1
    [ -z "${PYTHON:-}" ] && return
    asked=$(sh tools/find_python.sh) || exit 1
    [ "$(identity "$asked")" = "$(identity "$env_python")" ]
}

if usable; then
    if { wanted "$@"; extra_lines; } | stamp_has; then
        exit 0
    fi
else
    python=$(sh tools/find_python.sh)
    if [ -e "$env_dir" ]; then
        say "$env_dir is unfinished, broken, moved or has another Python: making it anew"
    fi
    say "making $env_dir with $python"
    rm -rf "$env_dir"
    "$python" -m venv "$env_dir"
fi

say "installing msa-icp-jax[$extras] $* (the first time downloads, which can take minutes)"
rm -f "$stamp"
if ! "$env_python" -m pip install -qq --disable-pip-version-check -e ".[$extras]" "$@"; then
    say "pip could not install; its message is above. Run the same command again once mended."
    exit 1
fi
{ made_from; wanted "$@"; extra_lines; } >"$stamp.part"
mv "$stamp.part" "$stamp"
say "$env_dir is ready"
