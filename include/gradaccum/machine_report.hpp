// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/machine_finding.hpp>

#include <iosfwd>
#include <string>
#include <vector>

namespace gradaccum {

/// What a machine and a process give away. Prints as one screen.
struct MachineReport {
  std::string machine = {};                   ///< processor, memory, LibTorch
  std::vector<MachineFinding> findings = {};  ///< in the order of `machine_report`, those that are well, too

  bool ok() const;
};

/// What `std::cout << report` prints.
std::string to_string(const MachineReport& report);
std::ostream& operator<<(std::ostream& stream, const MachineReport& report);

/// Finds out what this machine and this process give away on the CPU, how much it is, and how to mend it.
///
///     const auto report = ga::machine_report();
///     std::cout << report;                                   // one screen: what is lost, and the line that mends it
///     for (auto& finding : report.findings)
///       if (finding.loss > 2) std::cerr << finding.what << ": " << finding.cure << '\n';
///
/// LibTorch takes its processor, its C library and the kernel as they are, and some of their defaults cost a training
/// loop half of its time without a word. Each is measured here, as it is and as it could be:
///
/// | finding | what is measured |
/// |---|---|
/// | float32 products | one by MKL, which has slower code for processors that are not Intel's, and by oneDNN |
/// | freed memory | filling new memory, of which the C library hands back what is freed, and kept memory |
/// | threads | a product with LibTorch's threads and with as many as CPUs, where these are others |
/// | bfloat16 products | one in bfloat16, for which not all processors have instructions, and in float32 |
/// | denormal numbers | multiplying numbers below 1.2e-38, and others |
/// | huge pages | the first touch of memory in pages of 4 KB and of 2 MB |
/// | attention, 64 tokens | training in bfloat16 by flash and without it |
/// | OpenMP | nothing: more than one runtime in a process is one too many |
/// | CUDA products of new shapes, where there is a device | one of a shape that is new to it, and of one that was met |
/// | CUDA attention over new lengths | the same of a length, for which cuDNN builds a plan |
/// | CUDA kernels, where there is a device | nothing: whether this program has them (docs/optimizers.md) |
///
/// `./bootstrap.sh doctor` prints it for a program that has done nothing about any of them. In yours, call it where
/// training would begin: it tells of this process as it is by then. The least of several times counts, in time that
/// this thread had a processor, so that a busy machine does not mislead it; only threads are compared by the clock on
/// the wall. What is less than 1.25 times slower is well.
///
/// Threads, attention, autocast, gradients and random numbers are left as they were, also by an exception. The
/// C library learns what sizes of memory are in use, as from any program.
///
/// @note Takes a second or two, and 150 MB. Waits for a CUDA device, if there is one. Not for use
/// beside threads that work with LibTorch: they would be counted, and work by one thread for that time.
MachineReport machine_report();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/machine_report.ipp>
#endif
