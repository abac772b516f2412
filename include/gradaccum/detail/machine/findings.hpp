// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/machine_facts.hpp>
#include <gradaccum/detail/machine/machine_times.hpp>
#include <gradaccum/machine_finding.hpp>

#include <string>
#include <vector>

namespace gradaccum::detail {

/// What is less than that many times slower is not worth a line of code.
inline constexpr double noticeable_loss = 1.25;

/// Decides: from what is known and was measured to what is lost and how to mend it. Nothing is read or measured here.
std::vector<MachineFinding> findings_of(const MachineFacts& facts, const MachineTimes& times);

/// `AMD EPYC, AVX512: 2 CPUs, 15.6 GiB of memory; LibTorch 2.15.0 with 2 threads`
std::string described(const MachineFacts& facts);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/findings.ipp>
#endif
