#!/usr/bin/env bash
# make doctor: what this machine has for building, testing and running weft, and what to do where something is missing.
# Exit 0 if both programs can be built and run, at least on the CPU; 4 otherwise.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 4
failures=0

row() { printf '%-10s %-4s %s\n' "$1" "$2" "$3"; }
good() { row "$1" ok "$2"; }
note() { row "$1" "-" "$2"; }
bad() { row "$1" BAD "$2"; failures=$((failures + 1)); }

check_compiler() {
  local cxx=${CXX:-g++} version  # not quoted below: a compiler may be two words, "ccache g++"
  command -v "${cxx%% *}" >/dev/null || { bad compiler "$cxx not found. Install g++ 12 or later (Debian: apt-get install g++)"; return; }
  version=$($cxx -dumpfullversion 2>/dev/null || $cxx -dumpversion)
  if echo 'int main(){}' | $cxx -std=c++20 -fopenmp -x c++ - -o /dev/null 2>/dev/null; then
    good compiler "$cxx $version, C++20 and OpenMP"
  else
    bad compiler "$cxx $version cannot compile C++20 with OpenMP. Install g++ 12 or later"
  fi
}

check_libraries() {
  local missing
  if missing=$(scripts/deps.sh --check 2>&1); then
    good libraries "CLI11, nlohmann-json, xxHash, PCRE2, utf8proc, OpenBLAS, Boost's headers (the server), GoogleTest (the tests)"
  else
    bad libraries "${missing#deps: }"
  fi
}

# Only `make fuzz` needs it.
check_fuzzer() {
  if echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
      "${FUZZ_CXX:-clang++}" -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null; then
    good fuzzing "${FUZZ_CXX:-clang++} with libFuzzer"
  else
    note fuzzing "no clang with libFuzzer: make fuzz needs it, nothing else does. scripts/deps.sh --fuzz installs it"
  fi
}

check_cuda() {
  local nvcc=${NVCC:-$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)} version
  if [ -z "$nvcc" ]; then
    note nvcc "not found: the programs are built for the CPU. For the GPU install the CUDA toolkit, 12.4 or later"
  else
    version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    if [ "$(printf '%s\n12.4\n' "$version" | sort -V | head -1)" = 12.4 ]; then
      # make takes it only where a GPU is found, so the programs that are here may be for the CPU alone.
      [[ $(./train_llama --version 2>/dev/null) != *"CPU only"* ]] ||
        version+='; the programs here are built for the CPU alone: make GPU_ARCH="80 90a 120" builds them for GPUs'
      good nvcc "$nvcc, CUDA $version"
    else
      bad nvcc "$nvcc is CUDA $version, weft needs 12.4 or later (or NVCC= for a CPU build)"
    fi
  fi
  if ! command -v nvidia-smi >/dev/null; then
    note driver "no nvidia-smi: no NVIDIA driver. The programs run on the CPU"
    return
  fi
  local gpu
  if gpu=$(nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader 2>/dev/null) && [ -n "$gpu" ]; then
    while IFS=, read -r name capability driver memory; do
      if [ "$(printf '%s\n8.0\n' "${capability// /}" | sort -V | head -1)" = 8.0 ]; then
        good GPU "$name, compute capability$capability,$memory, driver$driver"
      else
        bad GPU "$name has compute capability$capability, weft needs 8.0 or later. Use --device cpu"
      fi
    done <<<"$gpu"
  else
    note driver "nvidia-smi finds no GPU. The programs run on the CPU"
  fi
}

check_python() {
  local python=${PYTHON:-python3} version
  command -v "$python" >/dev/null || { bad python "$python not found. Install Python 3.11 to 3.13"; return; }
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if [ "$(printf '%s\n' 3.11 "$version" 3.13 | sort -V | sed -n 2p)" = "$version" ]; then
    good python "$python $version"
  else
    bad python "$python is $version, the scripts need 3.11 to 3.13. PYTHON= names another"
  fi
  if [ -e .venv/ready ]; then good packages ".venv is made"; else note packages ".venv is not made yet: make venv does it"; fi
}

check_disk() {
  local free_kb
  free_kb=$(df -Pk . | awk 'NR==2 {print $4}')
  if [ "$free_kb" -ge 2000000 ]; then
    good disk "$((free_kb / 1000000)) GB free here"
  else
    bad disk "$((free_kb / 1000)) MB free here; the build and the demo need 2 GB"
  fi
}

check_compiler
check_libraries
check_fuzzer
check_cuda
check_python
check_disk
if [ "$failures" -gt 0 ]; then
  echo "doctor: $failures problem(s)"
  exit 4
fi
echo "doctor: ready"
