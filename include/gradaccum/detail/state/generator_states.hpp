// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Generator.h>

#include <map>
#include <string>

namespace gradaccum::detail {

/// The default generators of the CPU and of the CUDA devices in use, by device name. Other devices are skipped, since
/// getting a device's generator would initialise the device.
std::map<std::string, at::Generator> default_generators();

Archive::Tensors states_of_generators();

/// Throws before any change if a generator is missing (unless `changes_allowed`) or a state does not fit.
void check_generators(const Archive::Tensors& states, bool changes_allowed);

void set_generators(const Archive::Tensors& states);

void archive_generators(Archive& archive);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/generator_states.ipp>
#endif
