# SPDX-License-Identifier: Apache-2.0
#
# Installs the headers and the package gradaccum for find_package. LibTorch is not part of the package: the machine that
# uses it has its own, which the package looks for there. All files are for any platform, so they are in include/ and share/.

include(CMakePackageConfigHelpers)

if(NOT CMAKE_INSTALL_DATADIR) # GNUInstallDirs in a parent project sets it to ""
  set(CMAKE_INSTALL_DATADIR share)
endif()
set(directory "${CMAKE_INSTALL_DATADIR}/cmake/gradaccum")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/gradaccumConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/gradaccumConfig.cmake" INSTALL_DESTINATION "${directory}" PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/gradaccumConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)

install(TARGETS gradaccum EXPORT gradaccumTargets FILE_SET HEADERS)
install(EXPORT gradaccumTargets NAMESPACE gradaccum:: DESTINATION "${directory}")
install(FILES "${PROJECT_BINARY_DIR}/gradaccumConfig.cmake" "${PROJECT_BINARY_DIR}/gradaccumConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/GradaccumLibTorch.cmake" "${CMAKE_CURRENT_LIST_DIR}/GradaccumCompiled.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/GradaccumCudaKernels.cmake" "${CMAKE_CURRENT_LIST_DIR}/GradaccumCompileStep.cmake"
  DESTINATION "${directory}")
install(DIRECTORY "${CMAKE_CURRENT_LIST_DIR}/without_openmp" DESTINATION "${directory}")
