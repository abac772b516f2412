#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# A compiler launcher for targets that are compiled and never linked: generates no code and an empty object file.
"$@" -fsyntax-only || exit
while [ "$1" != -o ]; do shift; done
: > "$2"
