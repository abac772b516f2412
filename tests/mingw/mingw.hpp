// SPDX-License-Identifier: Apache-2.0
// Included first: what LibTorch's headers for Linux lack when a compiler for Windows reads them.
#pragma once

// They export each symbol, and mingw's headers define this as an attribute that g++ rejects on some of them.
#undef __declspec
#define __declspec(x)

extern "C" void __assert_fail(const char*, const char*, unsigned, const char*);
