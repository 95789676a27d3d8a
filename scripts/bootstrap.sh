#!/bin/sh
# Set up .venv once, then do what is asked:
#   install   only set up        demo [ARGS]   the whole life cycle on local text
#   test      the test suite     check         lint, types, import rules
# The venv is reused until pyproject.toml or the constraints change. Needs Python 3.11 or newer with venv and pip.
set -eu

cd "$(dirname "$0")/.."
constraints=constraints/py311.txt
python=${PYTHON:-python3}
started=$(date +%s)

say() {
    printf '[%4ss] %s\n' "$(($(date +%s) - started))" "$*" >&2
}

stamp() {
    cat pyproject.toml "$constraints" | cksum
}

install_packages() {
    say "installing uv, the package installer"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" uv
    say "installing scone and its dependencies (about 2 GB unpacked; a minute or a few, once)"
    # uv knows pip's list of local files under another name.
    if UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} .venv/bin/uv pip install --quiet --python .venv/bin/python \
        -c "$constraints" -e '.[dev]'; then
        return
    fi
    say "uv could not install them; trying pip"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" -e '.[dev]'
}

install() {
    if [ -f .venv/stamp ] && [ "$(cat .venv/stamp)" = "$(stamp)" ]; then
        say "reusing .venv"
        return
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "Python 3.11 or newer is needed, $python is $("$python" --version 2>&1); set PYTHON=/path/to/python3"
        exit 1
    }
    say "creating .venv with $("$python" --version)"
    rm -f .venv/stamp
    "$python" -m venv .venv
    install_packages
    stamp > .venv/stamp
    say "installed"
}

case "${1:-}" in
install)
    install
    ;;
demo)
    shift
    install
    say "scone demo $*"
    exec .venv/bin/scone demo "$@"
    ;;
test)
    shift
    install
    say "running the tests"
    exec .venv/bin/python -m pytest "$@"
    ;;
check)
    install
    say "ruff" && .venv/bin/ruff check . && .venv/bin/ruff format --check .
    say "mypy" && .venv/bin/mypy
    say "import rules" && .venv/bin/lint-imports
    ;;
*)
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
    ;;
esac
