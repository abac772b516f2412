// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/fit_options.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/validation.hpp>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

namespace gradaccum {

struct FitStatus;

/// What a `fit` has done. Printed, it is a summary:
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     std::cout << trainer.fit(batches, {.epochs = 3});
///
/// | line | what it says |
/// |---|---|
/// | `Time: 57.82` | seconds |
/// | `Samples/second: 8.86` | |
/// | `GPU memory occupied: 8681 MB.` | at the end, by all processes; `CPU memory occupied` is this process's |
/// | `Peak tensor memory: cuda:0 8.12 MB` | of tensors that this `fit` allocated |
/// | `Peak resident memory: 1204 MB` | of this process since it began, see `peak_resident_memory` |
/// | `Epochs: 3, updates: 938, skipped: 2` | skipped: windows that moved nothing |
/// | `Stopped early: loss was best, 0.31, 3 validations ago` | where somebody said why |
/// | `Last validation, at update 938: accuracy: 0.912000, loss: 0.310000` | of each `Validate` |
///
/// 1 MB is 2^20 bytes.
struct FitReport {
  std::int64_t epochs = 0, updates = 0, skipped = 0, samples = 0;
  double seconds = 0, samples_per_second = 0;
  std::string resumed_from = {};  ///< the state that it went on from; then all numbers are those of the whole `fit`
  std::string stopped = {};       ///< why it ended before it had gone through its epochs or updates; empty where it had
  int signal = 0;                 ///< SIGINT or SIGTERM, if one ended it: a program then exits with 128 + signal
  std::int64_t nan_batches = 0;   ///< left out: see `OnNan::skip`
  std::string first_nan = {};     ///< which was the first of them
  std::map<std::string, std::int64_t> occupied_bytes = {};  ///< by device
  std::map<std::string, std::int64_t> peak_bytes = {};      ///< by device; empty where nothing was measured
  std::int64_t peak_resident_bytes = 0;                     ///< of this process; 0 where nobody tells
  std::vector<Validation> validations = {};                 ///< in their order
};

std::ostream& operator<<(std::ostream& stream, const FitReport& report);

namespace detail {

/// All but the memory.
FitReport report_of(const FitStatus& status);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/fit_report.ipp>
#endif
