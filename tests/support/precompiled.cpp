// SPDX-License-Identifier: Apache-2.0
// Empty: CMake precompiles headers only for a target that has a file to use them in.
