#!/usr/bin/env bash
# Build Horovod against torch, TensorFlow or both of an interpreter, and install it there. usage: build-horovod [--wheel] PYTHON [FRAMEWORKS]
#
# --wheel: only build and keep the wheel; install nothing.
# FRAMEWORKS: torch, tensorflow, or torch,tensorflow; without it, torch where it is installed, else TensorFlow.
#
# The source of the last release, 0.28.1, is fetched with pip and changed in four places:
# - It is compiled as C++14, but the headers of torch 2.1 and newer, and of TensorFlow 2.10 and newer, need C++17, and those of
#   torch 2.14 and newer C++20.
# - Over gloo its stall check never notices a rank that others wait for: the list of ranks that it goes through has memory
#   reserved (`reserve`) but no entries (`resize`).
# - The server at which ranks leave their addresses forgets, with the addresses of one group, which ranks have read those of the others.
#   So old addresses stay, and a second `init` after `shutdown` ends ranks with "Connection refused" every few times.
# - It asks for the CUDA toolkit wherever torch is built for CUDA, which is what `pip install torch` brings on Linux. Where it is
#   built for gloo, it takes such a torch for one without CUDA.
# The wheel is cached under ~/.cache/mtrain/wheels, named after the versions that it was built for. Nothing happens where a
# Horovod that fits is installed already.
#
# It is built with NCCL if the framework is built for CUDA and sees a GPU here, else for gloo on CPUs. HOROVOD_GPU_OPERATIONS=NCCL
# asks for NCCL where no GPU is seen (in an image, on a login node); HOROVOD_GPU_OPERATIONS= asks for gloo anywhere.
#
# Horovod 0.28.1 trains with TensorFlow up to 2.15: from 2.16 on its Keras 3 has variables that Horovod does not know.
set -euo pipefail
version=0.28.1
changes=3  # version of the changes to the source; part of the wheel's name, so that another number builds a new wheel
installs=yes
if [ "${1:-}" = --wheel ]; then
  installs=no
  shift
fi
python=${1:?usage: build-horovod [--wheel] PYTHON [FRAMEWORKS]}
frameworks=${2:-auto}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

fail() {
  echo "build-horovod: $1" >&2
  exit 2
}

# Prints the frameworks to build for, in the order in which a wheel is named after them.
choose='
import sys
from importlib.util import find_spec
known = ("torch", "tensorflow")
wanted = known if sys.argv[1] == "auto" else sys.argv[1].split(",")
there = [name for name in known if name in wanted and find_spec(name)]
print(*(there[:1] if sys.argv[1] == "auto" else there))
'
# Prints what a wheel depends on: the versions of the frameworks, the tag of Python and the platform; the version of CUDA for
# which they are built, or "none"; and whether they see a GPU.
describe='
import sys, sysconfig
names, device, sees_gpu = [], "none", False
for name in sys.argv[1:]:
    if name == "torch":
        import torch
        names.append(f"torch-{torch.__version__}")
        cuda = torch.version.cuda
        sees_gpu |= torch.cuda.is_available()
    else:
        import tensorflow
        names.append(f"tensorflow-{tensorflow.__version__}")
        cuda = tensorflow.sysconfig.get_build_info().get("cuda_version")
        sees_gpu |= bool(tensorflow.config.list_physical_devices("GPU"))
    device = f"cu{cuda}" if cuda else device
tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
print(f"{chr(45).join(names)}-{tag}-{sysconfig.get_platform()} {device} {sees_gpu}")
'
# Succeeds if the installed Horovod can be imported, has gloo, and was not built by this script for something else.
check_installed='
import importlib, importlib.metadata, sys
wheel, *frameworks = sys.argv[1:]
modules = [importlib.import_module(f"horovod.{name}") for name in frameworks]
origin = importlib.metadata.distribution("horovod").read_text("direct_url.json") or ""
sys.exit(not all(module.gloo_built() for module in modules) or ("/mtrain/wheels/" in origin and wheel not in origin))
'
case $frameworks in
auto | torch | tensorflow | torch,tensorflow | tensorflow,torch) ;;
*) fail "--with $frameworks given; expected torch, tensorflow, or torch,tensorflow" ;;
esac
command -v "$python" >/dev/null || fail "$python: there is no such interpreter"
read -r -a chosen <<<"$("$python" -W ignore -c "$choose" "$frameworks")"
wanted=${frameworks//[!,]/}
if [ ${#chosen[@]} -eq 0 ] || { [ "$frameworks" != auto ] && [ ${#chosen[@]} -le ${#wanted} ]; }; then
  case $frameworks in
  auto) fail "$python has neither torch nor TensorFlow, against which Horovod is built; install one first: $python -m pip install torch" ;;
  torch) fail "$python has no torch, against which Horovod is built; install it first: $python -m pip install torch" ;;
  tensorflow) fail "$python has no TensorFlow, against which Horovod is built; install it first: $python -m pip install 'tensorflow-cpu==2.15.1' 'numpy<2'" ;;
  *) fail "$python does not have both torch and TensorFlow, against which Horovod is built; install them first, or name one of them: --with tensorflow" ;;
  esac
fi
described=$(TF_CPP_MIN_LOG_LEVEL=3 "$python" -W ignore -c "$describe" "${chosen[@]}" 2>/dev/null) ||
  fail "$python: ${chosen[*]} cannot be imported; see: $python -c 'import ${chosen[0]}'"
read -r built_for cuda sees_gpu <<<"$described"
device=cpu
if [ "$cuda" != none ]; then
  default=
  [ "$sees_gpu" = True ] && default=NCCL
  gpu_operations=${HOROVOD_GPU_OPERATIONS-$default}
  [ -z "$gpu_operations" ] || device=$cuda
fi
built_for=$built_for-$device
if [[ $built_for =~ tensorflow-([0-9]+)\.([0-9]+) ]] &&
  { [ "${BASH_REMATCH[1]}" -gt 2 ] || { [ "${BASH_REMATCH[1]}" = 2 ] && [ "${BASH_REMATCH[2]}" -gt 15 ]; }; }; then
  fail "$python has TensorFlow ${BASH_REMATCH[1]}.${BASH_REMATCH[2]}; Horovod $version trains with 2.15 at most: $python -m pip install 'tensorflow-cpu==2.15.1' 'numpy<2'"
fi
key="horovod-$version-$changes-${built_for//[^A-Za-z0-9._-]/_}"
if TF_CPP_MIN_LOG_LEVEL=3 "$python" -W ignore -c "$check_installed" "$key" "${chosen[@]}" >/dev/null 2>&1; then
  exit 0
fi

need_tools() {
  local missing=()
  for tool in cmake g++ make; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ] || missing+=(python3-dev)
  [ ${#missing[@]} -gt 0 ] || return 0
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] && [ "${NO_APT:-}" != 1 ]; then
    echo "installing ${missing[*]} with apt-get"
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y "${missing[@]}"; } >"$log" 2>&1; then
      tail -n 30 "$log" >&2
      fail "${missing[*]} could not be installed; the whole log: $log"
    fi
  else
    fail "${missing[*]} not found; install them with the package manager of this system (Debian: apt-get install ${missing[*]})"
  fi
}

# Prints how many jobs make may run at once: each needs up to 2 GB for torch's headers.
jobs() {
  local cores memory
  cores=$(nproc 2>/dev/null || echo 2)
  memory=$(awk '/MemAvailable/ {print int($2 / 2000000)}' /proc/meminfo 2>/dev/null || echo 2)
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}

change() {  # Replaces text $2 by $3 in file $1; neither may contain characters that are special to sed.
  grep -qF "$2" "$1" || fail "$1 does not contain '$2': is this Horovod $version?"
  sed -i.orig "s/$2/$3/" "$1"
}

has() {  # Succeeds if Horovod is built for framework $1.
  [[ " ${chosen[*]} " == *" $1 "* ]]
}

build() {  # Builds the wheel in folder $1. Runs in a subshell.
  local work=$1
  local -x MAKEFLAGS PYTHONPATH="$work/tools" CMAKE_POLICY_VERSION_MINIMUM=3.5
  local -x HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 TF_CPP_MIN_LOG_LEVEL=3
  local tools=(setuptools wheel packaging cffi cloudpickle psutil pyyaml)
  if has tensorflow; then
    export HOROVOD_WITH_TENSORFLOW=1
    tools[0]="setuptools<70"
  else
    export HOROVOD_WITHOUT_TENSORFLOW=1
    tools+=(numpy)  # TensorFlow's own has to stay the one that is found
  fi
  if has torch; then export HOROVOD_WITH_PYTORCH=1; else export HOROVOD_WITHOUT_PYTORCH=1; fi
  MAKEFLAGS=-j$(jobs)
  unset HOROVOD_GPU_OPERATIONS
  if [ "$device" != cpu ]; then
    export HOROVOD_GPU_OPERATIONS=$gpu_operations
  fi
  if ! command -v mpicxx >/dev/null; then
    export HOROVOD_WITHOUT_MPI=1
  fi
  echo "--- tools and source"
  "$python" -m pip install --target "$work/tools" "${tools[@]}"
  "$python" -m pip download --no-binary :all: --no-deps --no-build-isolation --dest "$work" "horovod==$version"
  tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
  local source="$work/horovod-$version"
  local standard=17
  if [[ $built_for =~ torch-([0-9]+)\.([0-9]+) ]] && [ $((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2])) -ge 2014 ]; then
    standard=20
  fi
  change "$source/CMakeLists.txt" 'set(CMAKE_CXX_STANDARD 14)' "set(CMAKE_CXX_STANDARD $standard)"
  change "$source/horovod/torch/CMakeLists.txt" 'set(CMAKE_CXX_STANDARD 14)' "set(CMAKE_CXX_STANDARD $standard)"
  change "$source/horovod/common/gloo/gloo_controller.cc" 'global_ranks_.reserve(size_);' 'global_ranks_.resize(size_);'
  change "$source/horovod/runner/http/http_server.py" 'self.server.finished_list.clear()' 'self.server.finished_list[scope].clear()'
  if [ "$device" = cpu ]; then
    change "$source/cmake/Modules/FindPytorch.cmake" '(torch.version.cuda is not None) and (CUDA_HOME is not None)' 'False'
  fi
  echo "--- build"
  nice -n 10 "$python" -m pip wheel --verbose --no-deps --no-build-isolation --wheel-dir "$work/wheel" "$source"
}

cache=${XDG_CACHE_HOME:-$HOME/.cache}/mtrain/wheels/$key
log=$cache/build.log
mkdir -p "$cache"
wheel=$(find "$cache" -maxdepth 1 -name "horovod-$version-*.whl" 2>/dev/null | head -n 1 || true)
if [ -z "$wheel" ]; then
  need_tools
  if [ "$device" != cpu ] && ! command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" nvcc >/dev/null; then
    fail "Horovod with $gpu_operations needs the toolkit of CUDA ${device#cu} (there is no nvcc) and NCCL's headers; install them and set CUDA_HOME, or let ranks exchange through host memory, over gloo: HOROVOD_GPU_OPERATIONS= $python -m mtrain doctor --build-horovod"
  fi
  echo "building Horovod $version for $built_for: 3 to 5 minutes on two cores"
  work=$(mktemp -d "$cache/build.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  build "$work" >"$log" 2>&1 &  # not `if build`: there bash ignores `set -e` and would continue after an error inside
  if ! wait $!; then
    tail -n 30 "$log" >&2
    fail "Horovod was not built; the whole log: $log"
  fi
  wheel=$cache/$(basename "$work"/wheel/*.whl)
  mv "$work"/wheel/*.whl "$wheel"
fi
[ "$installs" = yes ] || exit 0

"$python" -m pip install --quiet --progress-bar off cffi cloudpickle psutil pyyaml packaging
"$python" -m pip install --quiet --progress-bar off --force-reinstall --no-deps "$wheel"
if ! "$python" -W ignore -c "$check_installed" "$key" "${chosen[@]}" >>"$log" 2>&1; then
  tail -n 30 "$log" >&2
  rm -f "$wheel"  # else the next call would install it again instead of building another
  fail "$wheel was installed, but ${chosen[*]/#/horovod.} cannot be imported; the wheel is removed; the whole log: $log"
fi
echo "Horovod $version for $built_for is installed"
if [ "$cuda" != none ] && [ "$sees_gpu$device" = Falsecpu ]; then
  echo "no GPU is seen here, so its ranks exchange over gloo; for GPUs elsewhere build it with NCCL: HOROVOD_GPU_OPERATIONS=NCCL"
fi
