#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# compilers.sh LIBTORCH [COMPILER...]: compiles all headers and all definitions with each compiler (by default g++-N and
# clang++-N of every N here) in the modes C++20, C++23 and C++26, with all warnings as errors, and prints a table. The last
# column is libc++ instead of libstdc++. Takes a minute or two for each compiler.

set -uo pipefail
libtorch=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
compilers=("$@")
if (( $# == 0 )); then
  mapfile -t compilers < <(compgen -c | grep -E '^(g\+\+|clang\+\+)-[0-9]+$' | sort -uV)
fi
logs=$(mktemp -d)

# works NAME COMPILER OPTION...: prints the cell of the table.
works() {
  local name=$1 compiler=$2 log
  log=$logs/${compiler##*/}.$name
  if "$compiler" "${@:3}" -fsyntax-only -Wall -Wextra -Wshadow -Wconversion -Werror -DFMT_HEADER_ONLY=1 -DUSE_DISTRIBUTED \
    -DUSE_C10D_GLOO "-I$root/include" -isystem "$root/include/gradaccum_gloo" -isystem "$libtorch/include" \
    -isystem "$libtorch/include/torch/csrc/api/include" -x c++ - > "$log" 2>&1; then
    printf 'yes'
  else
    printf 'no: %s' "$(grep -m 1 -oE '(error|fatal error): .*' "$log" | head -c 90)"
  fi
}

all='#include <gradaccum/gradaccum.hpp>'
printf '| compiler | C++20 | C++23 | C++26 | compiled.hpp | libc++ |\n|---|---|---|---|---|---|\n'
for compiler in "${compilers[@]}"; do
  printf '| %s ' "$("$compiler" --version | head -n 1)"
  for mode in 20 23 26; do
    flag=c++$mode
    if ! echo | "$compiler" "-std=$flag" -fsyntax-only -x c++ - 2> /dev/null; then
      flag=$(case $mode in 23) echo c++2b ;; 26) echo c++2c ;; esac)
    fi
    if echo | "$compiler" "-std=$flag" -fsyntax-only -x c++ - 2> /dev/null; then
      printf '| %s ' "$(works "$mode" "$compiler" "-std=$flag" <<< "$all")"
    else
      printf '| it has no such mode '
    fi
  done
  printf '| %s ' "$(works compiled "$compiler" -std=c++20 -DGRADACCUM_COMPILED <<< '#include <gradaccum/compiled.hpp>')"
  if echo '#include <vector>' | "$compiler" -stdlib=libc++ -std=c++20 -fsyntax-only -x c++ - 2> /dev/null; then
    printf '| %s |\n' "$(works libc++ "$compiler" -std=c++20 -stdlib=libc++ <<< "$all")"
  else
    printf '| |\n'
  fi
done
printf 'The messages are in %s.\n' "$logs" >&2
