#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# A launcher of compilers for what is compiled and never linked: no code is generated. The object file is empty.
"$@" -fsyntax-only || exit
while [ "$1" != -o ]; do shift; done
: > "$2"
