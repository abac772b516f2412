# SPDX-License-Identifier: Apache-2.0
#
# Compiles for aarch64 Linux on another machine, and runs the tests there by QEMU's emulator of user programs (Debian:
# g++-aarch64-linux-gnu, qemu-user).

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

# QEMU looks for absolute names of files here first. LibTorch asks /proc/cpuinfo which processor it has.
set(sysroot "${CMAKE_BINARY_DIR}/sysroot")
if(NOT EXISTS "${sysroot}/proc/cpuinfo")
  file(MAKE_DIRECTORY "${sysroot}/proc")
  file(CREATE_LINK /usr/aarch64-linux-gnu/lib "${sysroot}/lib" SYMBOLIC)
  set(features "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp")
  file(WRITE "${sysroot}/proc/cpuinfo"
    "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: ${features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
    "CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n")
endif()
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu max,sve=off -L "${sysroot}")
