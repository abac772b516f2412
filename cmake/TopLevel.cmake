# SPDX-License-Identifier: Apache-2.0
#
# Sets defaults for developers of gradaccum. Projects that contain gradaccum make their own choices.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "The build type" FORCE)
endif()

# A file that includes LibTorch takes about ten seconds to compile. ccache needs this sloppiness for precompiled
# headers; clang also needs -Xclang -fno-pch-timestamp, which the presets set. With CCACHE_DEPEND ccache uses the
# compiler's list of headers instead of preprocessing first.
find_program(GRADACCUM_CCACHE ccache DOC "The compiler cache")
mark_as_advanced(GRADACCUM_CCACHE)
if(GRADACCUM_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    "${CMAKE_COMMAND};-E;env;CCACHE_DEPEND=1;CCACHE_SLOPPINESS=pch_defines,time_macros;${GRADACCUM_CCACHE}")
endif()
