# Sourced by the scripts beside it: finds Python, enters a virtual environment, installs this checkout into it.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# Prints the first Python that is new enough.
find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "needs Python 3.11 or newer, and none of python3.13, python3.12, python3.11, python3 is"
}

# Sets $python to that of the active virtual environment, else to that of .venv, made here if missing.
enter_environment() {
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} base
  if [ -n "$active" ]; then
    python=$active/bin/python
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$active has no Python 3.11 or newer"
    return
  fi
  python=$root/.venv/bin/python
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    echo "making .venv with $("$base" --version)"
    "$base" -m venv --clear .venv || fail "$base cannot make a virtual environment: install its venv module"
  fi
}

# install EXTRA: this checkout, editable, with an extra ("" for none); nothing to do when pyproject.toml is as last time.
install() {
  local extra=$1 stamp wanted
  stamp=$("$python" -c 'import sys; print(sys.prefix)')/conv-autotune-${extra:-plain}.stamp
  wanted=$(printf '%s ' "$root" && cksum <pyproject.toml)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$python" -c 'import autotune' 2>/dev/null; then
    return
  fi
  echo "installing .${extra:+[$extra]} into $(dirname "$stamp")"
  # -qq: errors only
  "$python" -m pip install -qq --disable-pip-version-check --no-input -e ".${extra:+[$extra]}" </dev/null ||
    fail "the installation failed, see above"
  echo "$wanted" >"$stamp"
}

# Prints the CUDA extra that fits the driver, nothing where there is no GPU.
cuda_extra() {
  local driver major
  command -v nvidia-smi >/dev/null || return 0
  read -r driver < <(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
  major=${driver%%.*}
  [[ $major =~ ^[0-9]+$ ]] || return 0
  if [ "$major" -ge 580 ]; then
    echo cuda13
  elif [ "$major" -ge 525 ]; then
    echo cuda12
  else
    echo "the driver $driver is older than 525, the first for CUDA 12: using the cpu" >&2
  fi
}
