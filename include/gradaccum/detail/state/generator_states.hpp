// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Generator.h>

#include <map>
#include <string>

namespace gradaccum::detail {

/// The default generators of the CPU and of the CUDA devices in use, by the names of the devices. Asking for that of a
/// device that nobody has used yet would start the device.
std::map<std::string, at::Generator> default_generators();

Archive::Tensors states_of_generators();

/// A generator that is not there is an error before anything has changed; so is a state that none of its kind has.
void check_generators(const Archive::Tensors& states, bool changes_allowed);

void set_generators(const Archive::Tensors& states);

void archive_generators(Archive& archive);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/generator_states.ipp>
#endif
