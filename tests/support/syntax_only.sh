#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# A launcher of clang++ for what is compiled and never linked: no code is generated, which takes most of the time under
# sanitizers. The object file is empty.
"$@" -fsyntax-only || exit
while [ "$1" != -o ]; do shift; done
: > "$2"
