#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prepares a bare machine: installs missing packages, fetches LibTorch into build/, builds, and runs tests or a
# training. A second run finds everything installed and only builds changed files.

set -euo pipefail

usage() {
  cat <<'END'
usage: ./bootstrap.sh demo [ARGUMENT...]      train on FashionMNIST: batches of 64, 16 accumulated x 4, 64 in bfloat16;
                                              with --compare-micro-batches 4 x 16 against 1 x 64; with --checkpoint
                                              48MiB --depth 16 --batch-size 2048 --epochs 1 also with less memory for
                                              some more time; with --save runs/fashion --resume it can be stopped,
                                              and continues where it was; with --compile also with a compiled step;
                                              build/demo.html has the curves of all runs; --help lists the rest
       ./bootstrap.sh demo bloom [ARGUMENT...]
                                              fine-tune a BLOOM on reviews, both made on the spot; with --model and
                                              --train a model of Hugging Face's on your own texts; --compile as above;
                                              with --size 560m one of BLOOM-560m's size, for some minutes, and what
                                              a whole training would take; --help lists the rest
       ./bootstrap.sh demo export [ARGUMENT...]
                                              Python exports a small BERT, a Llama and a ViT of transformers', and
                                              C++ trains them on made-up reviews and FashionMNIST; the arguments,
                                              --epochs say, are for all three; build/exported_demo has data, models,
                                              trained weights and a page for each
       ./bootstrap.sh demo rl [STEPS [SEED]]
                                              reinforcement learning: an agent learns to balance a pole on a cart, in
                                              seconds; build/rl/page.html has curves, and frames before and after
       ./bootstrap.sh new FOLDER [--template NAME]
                                              begin a program of your own, as gradaccum-new does: a folder with one of
                                              examples/templates and a CMakeLists.txt, ready to build; own_loop and
                                              trainer are plain trainings, ppo learns by reinforcement, gan has two
                                              networks, and finetune_exported trains a model that Python exported
       ./bootstrap.sh test                    build and run the core of the tests: the library's modules on the CPU, a
                                              program that finds the installed library, the documents' code, and a
                                              training that is killed and resumed
       ./bootstrap.sh test FOLDER [PATTERN]   one folder of tests/; PATTERN picks files of it or, if no file matches,
                                              test cases: test window "gradients*", test window "Factor: *"
       ./bootstrap.sh test --all              all tests of the preset
       ./bootstrap.sh test --ci               those that CI runs: with the preset dev all but each header compiled
                                              alone, some exported models and some consumers
       ./bootstrap.sh test --list             name the folders and their files
                                              Each takes --preset PRESET: dev (the default: newest LibTorch and g++),
                                              oldest (oldest LibTorch and clang++, under sanitizers, with fewer tests) or
                                              aarch64 (compiled for Arm, and run by an emulator: the core without what
                                              takes hours there); and --torch VERSION: a LibTorch from 2.8.0 to 2.15.0.
                                              build/PRESET/ledger.txt has what took how long
       ./bootstrap.sh packages                install what the tests of both presets need, and nothing else
       ./bootstrap.sh bench [--no-python] [ARGUMENT...]
                                              build and run the benchmarks, some of them against Python's PyTorch,
                                              and on a GPU where there is one; --help lists what else they take
       ./bootstrap.sh doctor                  what this machine gives away when it trains, measured, with the line of
                                              code that mends it
       ./bootstrap.sh docs [--check]          build the documentation as a site, build/site/index.html; --check also
                                              opens every page in a headless Chromium, where there is one, and does
                                              without what it cannot fetch, saying so
       ./bootstrap.sh oracle                  rewrite the expected values of the tests with Python's PyTorch and
                                              transformers

On Debian and Ubuntu, what is missing is installed with apt-get, after saying what and why; elsewhere it is only named.
`docs` needs Python and, once, PyPI (30 MB), nothing of the rest. LibTorch is fetched by pip into build/ (about 600 MB,
once) unless CMAKE_PREFIX_PATH names one that fits, and for tests beyond the core 60 MB that torch.compile and
transformers need, with CUDA's toolkit 290 MB more. Python's PyTorch, for `oracle`, `bench`, `demo export` and
`--compile`, is several GB more.
END
}

unset GRADACCUM_BUILD_SUFFIX  # run_tests sets it for --torch, and presets add it to the name of the build folder

step() { printf '==> %s\n' "$*"; }
fail() { printf 'bootstrap.sh: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" > /dev/null 2>&1; }
refuse() { printf 'bootstrap.sh: %s; ./bootstrap.sh help lists what there is\n' "$*" >&2; exit 2; }

# tell_time WHAT COMMAND...: runs the command, and prints every 20 seconds how long it has taken. The command is no
# operand of `||`, so that `set -e` applies in it.
tell_time() {
  local begin=$SECONDS what=$1 clear="" teller status
  if [[ -t 1 ]]; then clear=$'\r\033[K'; fi  # ninja leaves its line unfinished on a terminal
  while sleep 20 > /dev/null 2>&1; do printf '%s' "$clear"; step "$what: $((SECONDS - begin)) s so far"; done &
  teller=$!
  # shellcheck disable=SC2064
  trap "kill $teller 2> /dev/null" EXIT
  "${@:2}"
  status=$?
  trap - EXIT
  kill "$teller"
  wait "$teller" 2> /dev/null || true
  return $status
}

# --- Required packages -----------------------------------------------------------------------------------------------

packages=()  # Debian packages that are missing
tools=()     # commands that are missing
reasons=()   # a line for each of the packages

# need PACKAGE COMMAND REASON: lists PACKAGE as missing if COMMAND fails, or if COMMAND is empty and it is not installed.
need() {
  if [[ " ${packages[*]} " == *" $1 "* ]]; then return; fi
  if [[ -n $2 ]]; then
    if eval "$2" > /dev/null 2>&1; then return; fi
    tools+=("$1")
  elif ! have dpkg-query || [[ $(dpkg-query -W -f '${Status}' "$1" 2> /dev/null) == "install ok installed" ]]; then
    return
  fi
  packages+=("$1")
  reasons+=("$(printf '    %-22s %s' "$1" "$3")")
}

compiles_cxx20() { echo '#include <concepts>' | "$1" -std=c++20 -fsyntax-only -x c++ -; }
links_sanitizers() { echo 'int main() {}' | "$1" -fsanitize=address,undefined -x c++ - -o /dev/null; }
has_venv() { python3 -c 'import ensurepip, venv'; }

need_python() {
  need python3 "have python3" "fetches LibTorch"
  need python3-venv "has_venv" "fetches LibTorch into an environment of its own"
}

# need_to_build COMPILER...: one of these compilers is enough.
need_to_build() {
  local compiler found=""
  for compiler in "$@"; do
    if have "$compiler" && compiles_cxx20 "$compiler" > /dev/null 2>&1; then found=$compiler; fi
  done
  case $1 in
    clang++) need clang "[[ '$found' ]]" "compiles C++20, as the preset 'oldest' asks" ;;
    *) need g++ "[[ '$found' ]]" "compiles C++20" ;;
  esac
  need cmake "have cmake" "configures the build"
  need ninja-build "have ninja" "runs the build"
  need git "have git" "fetches libraries that the system lacks"
  need ccache "have ccache || ! have apt-get" "makes the second build fast"
  need nlohmann-json3-dev "" "reads and writes JSON"
  need zlib1g-dev "" "reads the data set of the example"
  need libcli11-dev "" "reads the command line of the examples"
  need_python
}

install_missing() {
  if (( ${#packages[@]} == 0 )); then return; fi
  if ! have apt-get; then
    fail "please install what these Debian packages have: ${tools[*]}"
  fi
  step "Debian packages that are missing and will be installed:"
  printf '%s\n' "${reasons[@]}"
  local as_root=()
  if (( EUID != 0 )); then
    if ! have sudo; then
      fail "not root and no sudo; please run as root: apt-get install --no-install-recommends ${packages[*]}"
    fi
    as_root=(sudo)
  fi
  step "apt-get update"
  "${as_root[@]}" apt-get update -q
  local known=() package
  for package in "${packages[@]}"; do
        # Some releases lack the data set, which is downloaded then, or a separate package of clang's sanitizers.
    if [[ $package != @(dataset|libclang-rt)-* ]] || apt-cache show "$package" > /dev/null 2>&1; then known+=("$package"); fi
  done
  step "apt-get install ${known[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${known[@]}"
}

check_cmake() {
  local version
  version=$(cmake --version | sed -n 's/^cmake version //p')
  if [[ $(printf '3.25\n%s\n' "$version" | sort -V | head -n 1) != 3.25 ]]; then
    fail "cmake is $version and 3.25 or newer is needed; 'pip install cmake' has one"
  fi
}

# --- Building --------------------------------------------------------------------------------------------------------

# Compiling a file that includes LibTorch takes about 2 GB. CMAKE_BUILD_PARALLEL_LEVEL takes precedence.
build_jobs() {
  if [[ -n ${CMAKE_BUILD_PARALLEL_LEVEL-} ]]; then echo "$CMAKE_BUILD_PARALLEL_LEVEL"; return; fi
  local cores memory
  cores=$(getconf _NPROCESSORS_ONLN)
  memory=$(awk '/^MemTotal:/ { print int($2 / 1048576 / 3) }' /proc/meminfo 2> /dev/null || echo 2)
  if (( memory < 1 )); then memory=1; fi
  echo $(( cores < memory ? cores : memory ))
}

# build PRESET [ARGUMENT...]: passes the arguments to cmake --build.
build() {
  step "Configuring (preset $1; the first time this fetches LibTorch, which takes a few minutes on a slow line)"
  tell_time "Configuring" cmake --preset "$1"
  step "Building with $(build_jobs) jobs (the first time this takes minutes)"
  tell_time "Building" cmake --build --preset "$1" --parallel "$(build_jobs)" "${@:2}"
}

# --- The data set ----------------------------------------------------------------------------------------------------

# SHA-256 of the uncompressed files, because Debian compresses them differently.
fashion_mnist="
c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888  train-images-idx3-ubyte
bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9  train-labels-idx1-ubyte
5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b  t10k-images-idx3-ubyte
0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34  t10k-labels-idx1-ubyte
"
fashion_mnist_url=https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion

download() {
  if have curl; then
    curl --fail --location --silent --show-error --output "$2" "$1"
  elif have wget; then
    wget --quiet --output-document="$2" "$1"
  else
    python3 -c 'import sys, urllib.request as u; u.urlretrieve(sys.argv[1], sys.argv[2])' "$1" "$2"
  fi
}

# Prints the directory of the data set; downloads it to build/data if Debian's package is not installed.
data_directory() {
  if [[ -d /usr/share/datasets/fashion-mnist ]]; then
    echo /usr/share/datasets/fashion-mnist
    return
  fi
  mkdir -p build/data
  local checksum name
  while read -r checksum name; do
    if [[ -z $name || -e build/data/$name.gz ]]; then continue; fi
    step "Downloading $name.gz" >&2
    download "$fashion_mnist_url/$name.gz" "build/data/$name.part" \
      || fail "could not download $fashion_mnist_url/$name.gz"
    if [[ $(gzip -dc < "build/data/$name.part" | sha256sum) != "$checksum "* ]]; then
      fail "build/data/$name.part, just downloaded, is not the file that was published"
    fi
    mv "build/data/$name.part" "build/data/$name.gz"
  done <<< "$fashion_mnist"
  echo build/data
}

# Prints the directory of the uncompressed data set, which LibTorch's reader needs.
unzipped_data_directory() {
  local data=build/data/unzipped zipped name
  zipped=$(data_directory) || exit
  mkdir -p "$data"
  for name in {train,t10k}-{images-idx3,labels-idx1}-ubyte; do
    [[ -e $data/$name ]] && continue
    gzip -dc < "$zipped/$name.gz" | head -c 64M > "$data/$name.part" ||
      fail "could not unzip $zipped/$name.gz, or it has more than 64 MiB"
    mv "$data/$name.part" "$data/$name"
  done
  echo "$data"
}

# --- Python's PyTorch ------------------------------------------------------------------------------------------------

python_with_torch=build/_oracle/bin/python

fetch_python_torch() {
  local venv=build/_oracle pinned
  pinned=$(cat cmake/{libtorch-2.15.0-cuda,python-torch-2.15.0}.txt)
  if [[ $(cat "$venv/gradaccum-oracle.stamp" 2> /dev/null) == "$pinned" ]]; then return; fi
  step "Fetching Python's PyTorch with all that it depends on (several GB: this takes a while)"
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$python_with_torch" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
    --requirement cmake/python-torch-2.15.0.txt
  printf '%s' "$pinned" > "$venv/gradaccum-oracle.stamp"
}

# Prints the value of CMake's variable $1 in the preset demo.
of_demo() { sed -n "s/^$1:[A-Z]*=//p" build/demo/CMakeCache.txt; }

# choose_python MODULE...: selects the Python with the build's LibTorch if it has these modules, otherwise a fetched one.
choose_python() {
  local root version modules="torch $*" python
  root=$(of_demo GRADACCUM_LIBTORCH_DIR) version=$(of_demo GRADACCUM_LIBTORCH_VERSION)
  for python in "${root%/lib/python3*/*-packages/torch}/bin/python3" python3; do
    if "$python" -c "import ${modules// /, }, sys; sys.exit(torch.__path__[0] != '$root')" > /dev/null 2>&1; then
      step "Using the torch $version of $root"
      python_with_torch=$python
      return
    fi
  done
  if [[ $version != "$(of_demo GRADACCUM_TORCH_VERSION)" ]]; then
    fail "no Python has both the LibTorch $version of $root and these modules: $modules; install them beside it with pip"
  fi
  tell_time "Fetching" fetch_python_torch
}

# --- Load ------------------------------------------------------------------------------------------------------------

# Prints how many CPUs are busy in one second.
busy_cpus() {
  { head -n 1 /proc/stat; sleep 1; head -n 1 /proc/stat; } 2> /dev/null | awk -v cpus="$(getconf _NPROCESSORS_ONLN)" '
    { busy = $2 + $3 + $4 + $7 + $8 + $9 - then_busy; all = busy + $5 + $6 - then_idle; then_busy += busy; then_idle = $5 + $6 }
    END { print (NR == 2 && all > 0) ? int(cpus * busy / all + 0.5) : 0 }'
}

# Prints the number of threads to use while other programs keep CPUs busy.
advise_threads() {
  if [[ -n ${OMP_NUM_THREADS-} ]]; then return; fi
  local cpus busy free
  cpus=$(getconf _NPROCESSORS_ONLN) busy=$(busy_cpus)
  free=$(( busy < cpus ? cpus - busy : 1 ))
  if (( free >= $(nproc) )); then return; fi
  step "Other programs keep $busy of $cpus CPUs busy, and threads that work together wait for the slowest of them:
    with OMP_NUM_THREADS=$free in the environment training may be several times as fast"
}

# --- The commands ----------------------------------------------------------------------------------------------------

# Adds the options of a demonstration that the arguments do not set.
bloom_classifier_options() {
  if [[ ${1-} == make ]]; then return; fi
  if [[ " $* " != *" --"@(demo|model|help)[\ =]* ]]; then options+=(--demo); fi
  if [[ " $* " =~ " --size"[\ =]([a-z0-9]+)" " && " $* " != *" --demo-files"[\ =]* ]]; then
    options+=(--demo-files "$PWD/build/models/bloom-${BASH_REMATCH[1]}")  # kept there after the demo
  fi
}

fashion_mnist_options() {
  local data
  if [[ ! " $* " =~ " --"(accumulate|amp|compare|profile|report|save|tensorboard|trainer) ]]; then
    options+=(--compare --report "$PWD/build/demo.html")
  fi
  if [[ " $* " == *" --memory-budget"* ]]; then options+=(--batch-size 32768 --epochs 3); fi
  if [[ " $* " == *" --data"* ]]; then return; fi
  data=$(data_directory)
  options+=(--data "$(realpath "$data")")
}

# Records the training step of the example with its options, and compiles it.
compile_demo() {
  choose_python sympy
  step "Recording a training step"
  local recording=("${options[@]}")
  for index in "${!recording[@]}"; do
    if [[ ${recording[index]} == --compare ]]; then unset "recording[index]"; fi
  done
  "$program" "${recording[@]}" "$@" --record-step "$compile"
  step "Compiling it (a quarter of a minute for each layout of a batch)"
  PYTHONPATH=python "$python_with_torch" -m gradaccum.compile_step "$compile"
  options+=(--compile "$PWD/$compile")
}

# export_demos FOLDER DATA: exports the models in parallel, one per core.
export_demos() {
  local kind done=0
  {
    # shellcheck disable=SC2016
    printf '%s\n' text lm image | xargs -P "$(build_jobs)" -I KIND bash -c '"$@" >&3 && echo KIND' bash \
      "$python_with_torch" examples/exported_model/make_demo.py "$1" --kind KIND --fashion-mnist "$2" |
      while read -r kind; do step "Exported $kind: $((++done)) of 3"; done
  } 3>&1
}

# Trains the models that Python exported.
demo_of_exports() {
  local program=$PWD/build/demo/examples/exported_model/exported_model folder=$PWD/build/exported_demo data kind
  need_to_build c++ g++ clang++
  [[ -d build/data ]] || need dataset-fashion-mnist "" "the images that one of the models learns"
  install_missing
  check_cmake
  build demo --target exported_model
  if [[ " $* " == *" --help "* ]]; then exec "$program" --help; fi
  choose_python transformers safetensors
  data=$(data_directory)
  step "Exporting a BERT (text), a Llama (lm) and a ViT (image); two passes of each are compiled (minutes)"
  tell_time "Exporting" export_demos "$folder" "$data"
  advise_threads
  cd "$typed_in"  # folders in the arguments are relative to it
  for kind in text lm image; do
    step "Training $kind"
    "$program" --model "$folder/$kind" --data "$folder/$kind.train.safetensors" \
      --validation "$folder/$kind.validation.safetensors" --output "$folder/$kind.trained" \
      --report "$folder/$kind.html" --epochs 6 --accumulate 2 --learning-rate 1e-3 "$@"
  done
}

demo_of_reinforcement() {
  need_to_build c++ g++ clang++
  install_missing
  check_cmake
  build demo --target ppo_page
  if [[ " $* " == *" --help "* ]]; then exec build/demo/examples/ppo_page/ppo_page --help; fi
  mkdir -p build/rl
  step "Training"
  exec build/demo/examples/ppo_page/ppo_page build/rl "$@"
}

demo() {
  local example=fashion_mnist options=() compile="" index
  case ${1-} in
    export) demo_of_exports "${@:2}"; return ;;
    rl) demo_of_reinforcement "${@:2}"; return ;;
    bloom) example=bloom_classifier; shift ;;
    "" | -*) ;;
    *) refuse "there is no demo '$1'" ;;
  esac
  need_to_build c++ g++ clang++
  if [[ $example == fashion_mnist && ! -d build/data ]]; then
    need dataset-fashion-mnist "" "the images that the example learns"
  fi
  install_missing
  check_cmake
  build demo --target "$example"
  if [[ " $* " == *" --compile "* && " $* " != *" --compile "[^-]* ]]; then compile=build/steps/$example; fi
  local arguments=("$@")
  for index in "${!arguments[@]}"; do
    if [[ -n $compile && ${arguments[index]} == --compile ]]; then unset "arguments[index]"; fi
  done
  set -- "${arguments[@]}"
  "${example}_options" "$@"
  local program=$PWD/build/demo/examples/$example/$example
  if [[ -n $compile ]]; then compile_demo "$@"; fi
  advise_threads
  step "Training"
  cd "$typed_in"  # directories in the arguments are relative to it
  exec "$program" "${options[@]}" "$@"  # exec, so that the program receives signals
}

# Prints where others can fetch this commit: the repository that this one was cloned from, or this one.
address_of_repository() {
  if [[ -n $(git branch --remotes --contains HEAD 2> /dev/null) ]]; then git remote get-url origin; else echo "$PWD"; fi
}

new_program() {
  local root=$PWD address tag
  need python3 "have python3" "copies the template"
  install_missing
  address=$(address_of_repository)
  tag=$(git rev-parse HEAD 2> /dev/null) || fail "$PWD must be a clone of gradaccum's repository, so that the program can fetch it"
  cd "$typed_in"
  PYTHONPATH=$root/python python3 -m gradaccum.new --repository "$address" --tag "$tag" "$@"
}

need_to_test() {
  case $1 in
    dev) need_to_build g++ ;;
    oldest)
      need_to_build clang++
      need libclang-rt-dev "links_sanitizers clang++" "the sanitizers of the preset 'oldest'"
      ;;
    aarch64)
      need_to_build g++
      need g++-aarch64-linux-gnu "have aarch64-linux-gnu-g++" "compiles for aarch64"
      need qemu-user "have qemu-aarch64" "runs programs for aarch64"
      ;;
    *) fail "there is no test preset '$1'; dev, oldest and aarch64 there are" ;;
  esac
  need catch2 "" "runs the tests"
}

install_packages() {
  need_to_test dev
  need_to_test oldest
  need g++-mingw-w64-x86-64-posix "have x86_64-w64-mingw32-g++-posix" "reads the headers as on Windows"
  install_missing
}

# Prints the folders of the tests, each with its files.
list_tests() {
  local folder file
  for folder in tests/*/; do
    folder=${folder#tests/} folder=${folder%/}
    if [[ $folder == support ]]; then continue; fi
    printf '%-18s' "$folder"
    for file in tests/"$folder"/*.test.cpp; do
      if [[ -e $file ]]; then file=${file##*/}; printf ' %s' "${file%.test.cpp}"; fi
    done
    printf '\n'
  done
}

# measured STAGE COMMAND...: runs the command and writes its time to the ledger of the preset.
measured() { python3 tests/support/ledger.py "$tree" stage "$@"; }

# build_tests TARGET...
build_tests() {
  python3 tests/support/ledger.py "$tree" begin
  step "Configuring (preset $preset; the first time this fetches LibTorch, which takes a few minutes on a slow line)"
  measured "configure, and fetch LibTorch" cmake --preset "$preset" "${options[@]}"
  step "Building with $(build_jobs) jobs (the first time this takes minutes)"
  local targets
  targets=$(cmake --build --preset "$preset" --target help)
  [[ $targets == *$'\n'"$1: "* ]] || fail "the preset $preset leaves out $1"
  measured "build" cmake --build --preset "$preset" --parallel "$(build_jobs)" --target "$@"
}

run_ctest() {
  local status=0
  step "Testing"
  measured "test" ctest --preset "$preset" --output-junit "$PWD/$tree/tests.xml" "$@" || status=$?
  step "What took how long"
  python3 tests/support/ledger.py "$tree" print || step "The ledger could not be printed"
  return $status
}

# run_cases FOLDER PATTERN: runs test cases by name; those with the tag [cuda] run on the emulated device.
run_cases() {
  if [[ $preset == aarch64 ]]; then fail "with the preset aarch64 a pattern must match files of tests/$1, got '$2'"; fi
  local where=$tree/tests program tag output status found=""
  local device=$where/support/emulated_cuda/libemulated_cuda.so
  for program in "$where"{,"/$1"}/"gradaccum.tests.$1"{,.*}; do
    if [[ ! -f $program || ! -x $program ]]; then continue; fi
    for tag in '~[cuda]' '[cuda]'; do
      status=0
      output=$(
        if [[ $tag == '[cuda]' && -e $device ]]; then export GRADACCUM_EMULATED_CUDA=$device; fi
        OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_odr_violation=0:detect_container_overflow=0:protect_shadow_gap=0 \
          "$program" "\"$2\"$tag" 2>&1
      ) || status=$?
      if [[ $output == *@("No test cases matched"|"No tests ran")* ]]; then continue; fi
      found=yes
      printf '%s\n' "$output"
      if (( status != 0 )); then return "$status"; fi
    done
  done
  [[ $found ]] || fail "tests/$1 has no file and no test case that matches '$2'; ./bootstrap.sh test --list names the files"
}

run_tests() {
  local preset=dev which="" options=() folder="" pattern="" torch=""
  while (( $# > 0 )); do
    case $1 in
      --preset) preset=${2-}; shift ;;
      --preset=*) preset=${1#--preset=} ;;
      --torch) torch=${2-}; shift ;;
      --torch=*) torch=${1#--torch=} ;;
      --all | --ci) which=${1#--} ;;
      --list) list_tests; return ;;
      -*) usage >&2; exit 2 ;;
      *)
        if [[ $pattern ]]; then usage >&2; exit 2; fi
        if [[ $folder ]]; then pattern=$1; else folder=${1%/}; fi
        ;;
    esac
    shift || { usage >&2; exit 2; }
  done
  if [[ $folder && $which ]]; then usage >&2; exit 2; fi
  if [[ $folder && ( ! -d tests/$folder || $folder == support ) ]]; then
    fail "there are no tests in a folder tests/$folder; ./bootstrap.sh test --list names the folders"
  fi
  need_to_test "$preset"
  install_missing
  check_cmake
  if [[ $torch ]]; then
    [[ -e cmake/libtorch-$torch-cpu.txt ]] || fail "there is no pinned LibTorch '$torch'; cmake/libtorch-*-cpu.txt has those there are"
    export GRADACCUM_BUILD_SUFFIX=-torch-$torch
    local venv=$PWD/build/_libtorch-$torch
    if [[ $preset == aarch64 ]]; then venv+=-aarch64; fi
    options+=("-DGRADACCUM_TORCH_VERSION=$torch" "-DGRADACCUM_TORCH_VENV=$venv")
  fi
  local tree=build/$preset${GRADACCUM_BUILD_SUFFIX-}
  case ${which:-$folder} in
    "")
      options+=(-DGRADACCUM_WEEKLY_TESTS=OFF)
      build_tests tests.core
      run_ctest -L '^core$'
      step "This was the core. ./bootstrap.sh test --all runs the rest, too: devices, kernels, code that Python exported, examples, adoption,
    other consumers, programs that must not compile, most kills, fuzzing, -ffast-math, benchmarks, the doctor, documentation, headers"
      ;;
    all | ci)
      options+=(-DGRADACCUM_WEEKLY_TESTS=$([[ $which == all ]] && echo ON || echo OFF))
      build_tests tests.all all
      run_ctest
      ;;
    *)
      build_tests "tests.$folder"
      local selection=(-L "^$folder\$")
      if [[ $pattern ]]; then
        local regex=${pattern//./[.]}
        selection+=(-R "^($folder[.])?${regex//\*/.*}([.](cuda|kernels|avx2|default))?\$")
        if [[ $(ctest --preset "$preset" -N "${selection[@]}" || true) == *"Total Tests: 0"* ]]; then
          run_cases "$folder" "$pattern"
          return
        fi
      fi
      run_ctest "${selection[@]}"
      ;;
  esac
}

# begin_results ARGUMENT...: appends a line to the file of --json that describes machine and run.
begin_results() {
  local results=""
  while (( $# > 0 )); do
    case $1 in
      --json) results=${2-} ;;
      --json=*) results=${1#--json=} ;;
    esac
    shift
  done
  if [[ -z $results ]]; then return; fi
  mkdir -p "$(dirname "$results")"
  local processor
  processor=$(sed -n '/^model name/ { s/.*: //; s/["\\]//g; p; q }' /proc/cpuinfo 2> /dev/null)
  printf '{"run": {"date": "%s", "processor": "%s", "cores": %d, "command": "./bootstrap.sh bench --json %s"}}\n' \
    "$(date +%F)" "$processor" "$(getconf _NPROCESSORS_ONLN)" "${results##*/}" >> "$results"
}

bench() {
  local arguments=() python=(--python "$python_with_torch") argument
  for argument in "$@"; do
    if [[ $argument == --no-python ]]; then python=(); else arguments+=("$argument"); fi
  done
  need_to_build c++ g++ clang++
  [[ -d build/data ]] || need dataset-fashion-mnist "" "the images that are learned, epoch by epoch"
  install_missing
  check_cmake
  build bench
  local programs=build/bench/benchmarks data name
  if [[ " ${arguments[*]} " == *" --help "* ]]; then
    "$programs/benchmark_adamw_step" --help
    return
  fi
  if (( ${#python[@]} > 0 )); then tell_time "Fetching" fetch_python_torch; fi
  data=$(unzipped_data_directory) || exit
  begin_results "${arguments[@]}"
  for name in adamw_step memory_saving_step amp_tail tiny_step window embedding linear_cross_entropy trainer checkpoint fit_memory bloom_classifier prefetch; do
    step "Running benchmark_$name"
    "$programs/benchmark_$name" "${arguments[@]}"
  done
  if [[ $(nvidia-smi -L 2> /dev/null) == *GPU* ]]; then
    step "Running the benchmarks on the device (less than five minutes; what they print stays in build/on_device)"
    benchmarks/on_device.sh "$programs" build/on_device "${arguments[@]}"
  fi
  if grep -qs AuthenticAMD /proc/cpuinfo; then  # see docs/machine.md
    for name in window checkpoint bloom_classifier; do
      step "Running benchmark_$name with MKL as LibTorch has it"
      GRADACCUM_MKL_ON_AMD=0 "$programs/benchmark_$name" "${arguments[@]}"
    done
  fi
  step "Running benchmark_bloom_560m (a quarter of an hour, and 15 GB of memory)"
  "$programs/benchmark_bloom_560m" --keep-memory --updates 1 "${arguments[@]}"
  if (( ${#python[@]} > 0 )); then
    step "Recording and compiling the steps of benchmark_compiled_step, fashion_epoch and benchmark_ppo"
    "$programs/benchmark_compiled_step" --record build/steps/benchmark
    for name in ours ours-bf16; do "$programs/fashion_epoch" "$name" --record "build/steps/fashion_epoch/$name"; done
    "$programs/benchmark_ppo" --record build/steps/ppo
    PYTHONPATH=python "$python_with_torch" -m gradaccum.compile_step build/steps/{benchmark,fashion_epoch}/* build/steps/ppo
    python+=(--steps build/steps/fashion_epoch)
    step "Running benchmark_compiled_step"
    "$programs/benchmark_compiled_step" --steps build/steps/benchmark "${arguments[@]}"
    step "Running benchmark_ppo and python/ppo.py"
    "$programs/benchmark_ppo" --steps build/steps/ppo "${arguments[@]}"
    "$python_with_torch" benchmarks/python/ppo.py "${arguments[@]}"
    step "Running python/linear_cross_entropy.py"
    LD_PRELOAD=$programs/libmkl_on_amd.so "$python_with_torch" benchmarks/python/linear_cross_entropy.py "${arguments[@]}"
    step "Running python/compiled_step.py"
    LD_PRELOAD=$programs/libmkl_on_amd.so "$python_with_torch" benchmarks/python/compiled_step.py "${arguments[@]}"
    step "Running python/exported_models.py (five models are exported first, a minute each)"
    LD_PRELOAD=$programs/libmkl_on_amd.so "$python_with_torch" benchmarks/python/exported_models.py \
      --program "$programs/exported_step" "${arguments[@]}"
  fi
  step "Running benchmark_save_load"
  "$programs/benchmark_save_load" --directory build "${arguments[@]}"
  step "Running benchmark_epoch"  # in one process --keep-memory applies to all contestants
  "$programs/benchmark_epoch" --data "$data" --keep-memory "${arguments[@]}"
  step "Running benchmark_watching"
  "$programs/benchmark_watching" --data "$data" --keep-memory "${arguments[@]}"
  step "Running memory_techniques"  # without --steps 0 it trains for a quarter of an hour
  "$programs/memory_techniques" --model small --steps 0 --keep-memory "${arguments[@]}"
  step "Running compare_processes.py"
  python3 benchmarks/compare_processes.py --programs "$programs" --data "$data" "${python[@]}" "${arguments[@]}"
  if (( ${#python[@]} == 0 )); then step "Python's PyTorch was left out, as --no-python asks"; fi
  step "Running compile_time.py (some ten minutes for each compiler that is there)"
  python3 benchmarks/compile_time.py --arguments "$programs/compile_time.arguments"
}

doctor() {
  need_to_build c++ g++ clang++
  install_missing
  check_cmake
  build demo --target doctor
  step "Looking at this machine"
  exec build/demo/doctor
}

# Installs MkDocs and its theme in a virtual environment; fails if PyPI cannot be reached.
fetch_mkdocs() {
  local venv=build/_docs requirements=docs/site/requirements.txt
  if cmp -s "$requirements" "$venv/gradaccum-docs.stamp"; then return; fi
  step "Fetching MkDocs and its theme (30 MB)"
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps \
    --requirement "$requirements" || return
  cp "$requirements" "$venv/gradaccum-docs.stamp"
}

docs() {
  local check=""
  case ${1-} in
    "") ;;
    --check) check=yes ;;
    *) refuse "docs takes nothing but --check, got '$1'" ;;
  esac
  need python3 "have python3" "makes the pages"
  need python3-venv "has_venv" "fetches MkDocs into an environment of its own"
  install_missing
  step "Making the pages, of docs/, the headers and the benchmarks' results"
  python3 docs/site/pages.py build/docs
  if ! tell_time "Fetching" fetch_mkdocs; then
    if [[ ! $check ]]; then fail "MkDocs could not be fetched from PyPI, and without it build/docs is Markdown"; fi
    step "MkDocs could not be fetched from PyPI: names and links were checked; anchors, the site and its looks were NOT"
    return
  fi
  step "Building the site"
    # Without --quiet, because MkDocs does not count suppressed warnings as errors.
  NO_MKDOCS_2_WARNING=1 build/_docs/bin/mkdocs build --strict --clean --config-file build/docs/mkdocs.yml
  if [[ $check ]]; then
    step "Opening every page in Chromium"
    python3 docs/site/browse.py build/site
  fi
  step "The site is build/site/index.html"
}

oracle() {
  need_python
  install_missing
  tell_time "Fetching" fetch_python_torch
  local script
  for script in tests/pytorch_values/*.py tests/io/hugging_face_folders.py \
                tests/bloom_classifier/{csv,model,tokenizer}_values.py; do
    step "Running $script"
    PYTHONPATH=tests/pytorch_values "$python_with_torch" "$script"
  done
}

typed_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
command=${1-}
if (( $# > 0 )); then shift; fi
case $command in
  test | new | packages | doctor | docs | oracle)
    case ${1-} in -h | --help) usage; exit ;; esac
    ;;
esac
case $command in
  demo) demo "$@" ;;
  test) run_tests "$@" ;;
  new) new_program "$@" ;;
  bench) bench "$@" ;;
  doctor | oracle | packages)
    if (( $# > 0 )); then refuse "$command takes no arguments, got '$*'"; fi
    "${command/#packages/install_packages}"
    ;;
  docs) docs "$@" ;;
  help | -h | --help) usage ;;
  "") usage >&2; exit 2 ;;
  *) refuse "there is no command '$command'" ;;
esac
