# SPDX-License-Identifier: Apache-2.0
#
# An overlay port: it installs the checkout that it is in. vcpkg itself has not run it, only stand-ins for its functions.
# LibTorch is the machine's (pip install torch, or CMAKE_PREFIX_PATH), because the port libtorch was
# 2.1.2 when this was written.
set(VCPKG_BUILD_TYPE release) # there are only headers
set(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../..")
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -DGRADACCUM_INSTALL=ONLY)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/gradaccum)
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
