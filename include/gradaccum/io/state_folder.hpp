// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/io/manifest.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/version.hpp>

#include <filesystem>
#include <map>
#include <string>

namespace gradaccum::io {

/// Writes the values of an archive into a folder that is there and empty: tensors of a part X to `X.safetensors`, those
/// of no part to `state.safetensors`, and all else, with the checksums of these, to `manifest.json`. All is synced.
///
///     ga::Archive archive;
///     archive("weight", x);
///     std::filesystem::create_directory("folder");
///     ga::io::write_state(archive, "folder");
///     ga::Archive(ga::io::read_state("folder"))("weight", x);
///
/// Throws `std::runtime_error` with the name of a file that could not be written, `c10::Error` for a tensor that
/// safetensors files cannot have. What is there then is incomplete: `ga::save` removes it.
///
/// @note Waits for the devices of tensors that are not on the CPU; takes the memory of one of them at a time.
void write_state(const Archive& archive, const std::filesystem::path& folder);

/// The values that `write_state` wrote, every byte of the folder checked. Tensors are on the CPU.
///
/// Throws `std::runtime_error` with the name of a file that is damaged, missing, or too much.
///
/// @note Takes the memory of all tensors, each read once.
Archive::Values read_state(const std::filesystem::path& folder);

}  // namespace gradaccum::io

namespace gradaccum::detail {

/// Throws where two parts have one name, or a part has a name that no file can have.
void check_can_be_written(const Archive& archive);

/// The files of a state, by name, as its manifest lists them.
using StateFiles = std::map<std::string, Manifest::File>;

/// As `read_state`, but for who needs a part of it: tensors take no memory, and are read from the disk once more when
/// they are used. The folder may be removed meanwhile; but a file that another process makes shorter ends this one
/// (SIGBUS), so they are to be copied soon, and not kept.
Archive::Values map_state(const std::filesystem::path& folder);

/// The two halves of `write_state`, where several processes write files into one folder, and one of them the manifest
/// of all.
StateFiles write_tensors(const Archive& archive, const std::filesystem::path& folder);
void write_manifest_of(const Archive& archive, const StateFiles& files, const std::filesystem::path& folder);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/state_folder.ipp>
#endif
