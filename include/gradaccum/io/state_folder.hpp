// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: io

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/version.hpp>

#include <filesystem>
#include <map>
#include <string>

namespace gradaccum::io {

/// Writes and syncs an archive's values to an existing, empty folder.
///
///     ga::Archive archive;
///     archive("weight", x);
///     std::filesystem::create_directory("folder");
///     ga::io::write_state(archive, "folder");
///     ga::Archive(ga::io::read_state("folder"))("weight", x);
///
/// Tensors of part X are in `X.safetensors`, others in `state.safetensors`, and all other values, with the checksums of
/// these files, in `manifest.json`. Throws `std::runtime_error` with the name of a file that could not be written, and
/// `c10::Error` for a tensor that safetensors cannot store; the folder is then incomplete.
///
/// @note Synchronizes with the devices of tensors that are not on the CPU, and takes memory for one of them at a time.
void write_state(const Archive& archive, const std::filesystem::path& folder);

/// Returns the values that `write_state` wrote, after checking every byte of the folder. Tensors are on the CPU. Throws
/// `std::runtime_error` with the name of a file that is damaged, missing or unexpected.
Archive::Values read_state(const std::filesystem::path& folder);

}  // namespace gradaccum::io

namespace gradaccum::detail {

/// Throws if two parts have the same name, or if a part's name cannot be a file name.
void check_can_be_written(const Archive& archive);

/// A state's files by name, as its manifest lists them.
using StateFiles = std::map<std::string, Manifest::File>;

/// Reads a state. If `mapped`, for callers that need only a part of it, tensors take no memory and are read from the
/// disk again on use: copy them soon, since this process is killed by SIGBUS if another one truncates a file.
Archive::Values read_state(const std::filesystem::path& folder, bool mapped);

inline constexpr const char* tensors_suffix = ".safetensors";

/// The tensors of an archive by file, without the suffix: `model.0.weight` is `0.weight` in model.safetensors.
std::map<std::string, io::Tensors> tensors_by_file(const Archive& archive);

/// Does the first half of `write_state`, for ranks that share a folder; one rank writes the manifest.
StateFiles write_tensors(const Archive& archive, const std::filesystem::path& folder);
Manifest manifest_of(const Archive& archive, StateFiles files = {});

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/io.ipp>
#endif
