#!/bin/sh
# Print the path of a Python that can run this project, or say what to install and exit 1.
#
# Plain `python3` is often older than the Python installed beside it, a version manager's shim may
# exist and not work, and a distribution may ship a Python that cannot make virtual environments.
# So every candidate is run, and the first that proves usable is printed.
#
#   PYTHON             use this interpreter (a path, or a name on PATH) and look no further
#   FIND_PYTHON_ROOT   a prefix for the absolute folders searched; lets tests search a scratch tree
set -eu

# Answers "ok PATH" or "no REASON". It must parse under every Python, 2.7 included.
# The base executable is printed, not the one of an active environment, which may be deleted later.
probe_code='
import sys
def answer(text):
    sys.stdout.write("\n" + text + "\n")
    sys.exit(0)
version = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info < (3, 12):
    answer("no Python " + version + ", older than 3.12")
import sysconfig
if sys.implementation.name != "cpython":
    answer("no " + sys.implementation.name + ", not CPython")
if sys.maxsize < 2**32:
    answer("no a 32-bit build")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    answer("no a free-threaded build")
for module in ("ssl", "zlib", "venv", "ensurepip"):
    try:
        __import__(module)
    except ImportError:
        answer("no Python " + version + " without the " + module + " module")
answer("ok " + getattr(sys, "_base_executable", sys.executable))
'

probe() { # the last line of the answer, since shims print notices of their own
    "$1" -c "$probe_code" </dev/null 2>/dev/null | tail -n 1
}

names="python3.12 python3.13 python3.14 python3.15 python3 python"

path_candidates() { # every python of every PATH folder, plain names first
    saved_ifs=$IFS
    for name in python3 python $names; do
        IFS=:
        for folder in $PATH; do
            printf '%s\n' "$folder/$name"
        done
        IFS=$saved_ifs
    done
}

folders() { # where Pythons live that are not on PATH
    home=${HOME:-$(eval "printf '%s' ~$(id -un)")}
    data=${XDG_DATA_HOME:-$home/.local/share}
    root=${FIND_PYTHON_ROOT:-}
    cat <<END
${PYENV_ROOT:-$home/.pyenv}/versions
$home/.pyenv/versions
${UV_PYTHON_INSTALL_DIR:-$data/uv/python}
${ASDF_DATA_DIR:-$home/.asdf}/installs/python
${MISE_DATA_DIR:-$data/mise}/installs/python
$home/.rye/py
$home/.local
$root/usr/local
$root/usr
$root/opt/homebrew
$root/opt/homebrew/opt
$root/usr/local/opt
$root/home/linuxbrew/.linuxbrew
$root/home/linuxbrew/.linuxbrew/opt
$root/opt
$root/opt/python
$root/Library/Frameworks/Python.framework/Versions
END
    # pyenv's and asdf's shims tell where their manager lives.
    echo "$PATH" | tr ':' '\n' | sed -n 's|/shims/*$||p' | while IFS= read -r manager; do
        printf '%s\n' "$manager/versions" "$manager/installs/python"
    done
    if [ -n "${CONDA_PREFIX:-}" ]; then
        printf '%s\n' "$CONDA_PREFIX"
    fi
    for parent in "$home" "$root/opt"; do
        for conda in conda miniconda3 miniforge3 mambaforge anaconda3 micromamba; do
            printf '%s\n' "$parent/$conda" "$parent/$conda/envs"
        done
    done
}

folder_candidates() { # FOLDER/bin/NAME and FOLDER/*/bin/NAME
    all_folders=$(folders)
    saved_ifs=$IFS
    for name in $names; do
        IFS='
'
        for folder in $all_folders; do
            for candidate in "$folder/bin/$name" "$folder"/*/bin/"$name"; do
                printf '%s\n' "$candidate"
            done
        done
        IFS=$saved_ifs
    done
}

advise() { # what was looked at, and what to do
    cat >&2 <<END
No usable Python found. This project needs CPython 3.12 or newer, able to make virtual environments.
${1:-  (no Python at all was found)}
Install one, then run the same command again:
  Debian, Ubuntu   apt-get install python3.12 python3.12-venv
  Fedora           dnf install python3.12
  macOS            brew install python@3.12
  anywhere         uv python install 3.12   or   pyenv install 3.12
or name one that is installed already:  make ... PYTHON=/path/to/python3.12
END
}

if [ -n "${PYTHON:-}" ]; then
    answer=$(probe "$PYTHON")
    case $answer in
    "ok /"*) printf '%s\n' "${answer#ok }" ;;
    *)
        reason=${answer#no }
        if [ "$reason" = "$answer" ]; then
            reason="it does not run"
            "$PYTHON" -c pass >&2 || true # for its own message
        fi
        echo "PYTHON=$PYTHON cannot be used: $reason." >&2
        echo "Name a CPython 3.12 or newer, or leave PYTHON out to have one searched for." >&2
        exit 1
        ;;
    esac
    exit 0
fi

{ path_candidates; folder_candidates; } | {
    tried=:
    report=
    while IFS= read -r candidate; do
        [ -f "$candidate" ] && [ -x "$candidate" ] || continue
        case $tried in *":$candidate:"*) continue ;; esac
        tried="$tried$candidate:"
        answer=$(probe "$candidate")
        case $answer in
        "ok /"*)
            printf '%s\n' "${answer#ok }"
            exit 0
            ;;
        "no "*) reason=${answer#no } ;;
        *) reason="does not run" ;;
        esac
        report="$report${report:+
}  $candidate: $reason"
    done
    advise "$report"
    exit 1
}
