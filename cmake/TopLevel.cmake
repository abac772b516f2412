# SPDX-License-Identifier: Apache-2.0
#
# Conveniences for those who build gradaccum itself. A project that contains gradaccum gets none of them: its build
# type and its compiler launcher are its own.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "The build type" FORCE)
endif()

# A file that includes LibTorch takes some ten seconds to compile. The sloppiness is what ccache asks for where
# precompiled headers are used; clang needs -Xclang -fno-pch-timestamp besides, which the presets give. CCACHE_DEPEND: ccache
# uses the compiler's list of headers, and does not preprocess first.
find_program(GRADACCUM_CCACHE ccache DOC "The compiler cache")
mark_as_advanced(GRADACCUM_CCACHE)
if(GRADACCUM_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    "${CMAKE_COMMAND};-E;env;CCACHE_DEPEND=1;CCACHE_SLOPPINESS=pch_defines,time_macros;${GRADACCUM_CCACHE}")
endif()
