# Sourced by the other scripts: make_environment FOLDER PACKAGE gives the calling shell a virtual
# environment with torch and this project installed editable.
#   PYTHON  interpreter, 3.11 or newer                     (default: python3)
#   TORCH   what pip installs before the project           (default: torch==2.13.0)

make_environment() {
  local folder=$1 package=$2 python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: PYTHON: found $python; expected Python 3.11 or newer; set PYTHON to one" >&2
    return 2
  fi
  if ! command -v "${CXX:-g++}" >/dev/null; then
    echo "error: CXX: found no ${CXX:-g++}; expected a C++20 compiler; install g++ or set CXX" >&2
    return 2
  fi
  if [ ! -x "$folder/bin/python" ]; then
    "$python" -m venv "$folder" || return 1
  fi
  export PATH="$PWD/$folder/bin:$PATH"
  unset PYTHONPATH PYTHONHOME
  if [ ! -e "$folder/ready" ] || [ pyproject.toml -nt "$folder/ready" ]; then
    python -m pip install --quiet "${TORCH:-torch==2.13.0}" || return 1
    python -m pip install --quiet --editable "$package" || return 1
    touch "$folder/ready"
  fi
}
