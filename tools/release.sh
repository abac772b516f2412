#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the files of a release from the current commit, and checks that it can be released.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'END_OF_USAGE'
usage: tools/release.sh --check [FOLDER]   checks all: no uncommitted change, versions agree, CI passed for this commit
                                           (else it runs .ci/run, for three quarters of an hour), and makes the files twice,
                                           which must be the same; prints the command for the tag. FOLDER: build/release
       tools/release.sh --pack FOLDER      only makes the files: archive, wheel, SBOM and their hashes
END_OF_USAGE
}
step() { printf '==> %s\n' "$*"; }
fail() { printf 'release.sh: %s\n' "$*" >&2; exit 1; }

version=$(sed -n 's/^#define GRADACCUM_VERSION_[A-Z]* //p' include/gradaccum/version.hpp | paste -sd .)
commit=$(git rev-parse HEAD)

check_tree() {
  [[ -z $(git status --porcelain) ]] || fail "the tree has uncommitted changes; commit them, or remove them"
  [[ -z $(git tag --list "v$version") ]] || fail "the tag v$version exists already; raise include/gradaccum/version.hpp"
}

# must_have FILE LINE: LINE is a pattern of a whole line.
must_have() { grep -q -x -- "$2" "$1" || fail "$1 must have a line like '$2'"; }

check_versions() {
  must_have CHANGELOG.md "## $version (20[0-9-]*)"
  must_have CITATION.cff "version: $version"
  must_have CITATION.cff "date-released: 20[0-9-]*"
  must_have packaging/conda/recipe.yaml "  version: $version"
  must_have packaging/vcpkg/gradaccum/vcpkg.json "  \"version\": \"$version\","
}

# .ci/run leaves the commit for which all has passed, in both presets.
check_ci() {
  if [[ $(cat build/ci_passed 2> /dev/null) == "$commit" ]]; then return; fi
  step "CI has not passed for this commit here, so it runs"
  .ci/run
}

# Fetches what builds the wheel, once.
fetch_backend() {
  backend=$PWD/build/_release
  if cmp -s cmake/python-wheel.txt "$backend/requirements.txt"; then return; fi
  rm -rf "$backend"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$backend" \
    --requirement cmake/python-wheel.txt
  cp cmake/python-wheel.txt "$backend/requirements.txt"
}

# pack FOLDER: the wheel is made from the archive, so that it has no file that git does not track.
pack() {
  local folder=$1 name=gradaccum-$version source
  fetch_backend
  rm -rf "$folder"
  mkdir -p "$folder"
  source=$(mktemp -d)
  git archive --prefix="$name/" --output="$folder/$name.tar.gz" "$commit"
  tar xzf "$folder/$name.tar.gz" -C "$source"
  SOURCE_DATE_EPOCH=$(git show --no-patch --format=%ct "$commit") PYTHONPATH=$backend python3 -m pip wheel --quiet \
    --disable-pip-version-check --no-index --no-deps --no-build-isolation --wheel-dir "$folder" "$source/$name"
  rm -rf "$source"
  [[ -f $folder/$name-py3-none-any.whl ]] || fail "the wheel must be $name-py3-none-any.whl, got $(ls "$folder")"
  python3 tools/sbom.py "$folder/$name-py3-none-any.whl" "$folder/$name.spdx.json"
  (cd "$folder" && sha256sum "$name"* > SHA256SUMS)
}

# Another mode of new files and another time must not change the files.
check_bytes() {
  local again
  again=$(mktemp -d)
  (umask 077 && sleep 1 && pack "$again")
  diff "$1/SHA256SUMS" "$again/SHA256SUMS" || fail "two runs must make the same files"
  rm -rf "$again"
}

check() {
  local folder=$1
  check_tree
  check_versions
  step "Making the files of $version, twice"
  pack "$folder"
  check_bytes "$folder"
  check_ci
  step "$version can be released. $folder has the files:"
  cat "$folder/SHA256SUMS"
  step "The tag: git tag --annotate v$version --message 'gradaccum $version' $commit"
}

case ${1-} in
  --check) check "${2:-build/release}" ;;
  --pack) if (( $# == 2 )); then pack "$2"; else usage >&2; exit 2; fi ;;
  -h | --help) usage ;;
  *) usage >&2; exit 2 ;;
esac
