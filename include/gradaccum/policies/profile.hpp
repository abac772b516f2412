// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/policy.hpp>
#include <gradaccum/profiler.hpp>

#include <filesystem>

namespace gradaccum {

namespace detail {
struct ProfileRun;
}

/// Policy: profiles time and memory of some updates of `fit` with LibTorch's profiler.
///
///     ga::Trainer trainer(model, sgd, objective, ga::Profile{.updates = {2, 4}, .directory = "profiles/fit"});
///     trainer.fit(batches);
///     std::cout << *trainer.policy<ga::Profile>().report();
///
/// Between update counts `updates.first` and `updates.second` the whole time is divided into phases:
///
/// | phase | content |
/// |---|---|
/// | `data` | loading the next batch, and work of policies between two micro-batches, such as saving |
/// | `forward` | the objective |
/// | `backward` | computing gradients; with `OptimizerInBackward` also the updates |
/// | `reduce` | computing the window's mean, and the rest of the exchange between ranks |
/// | `step` | clipping and the optimizer's update |
/// | `other` | policies' callbacks after the step: averages, logs, validation |
///
/// List this policy first, so that the work of the others is assigned to these phases. `trace.json`, for Perfetto
/// (ui.perfetto.dev) and chrome://tracing, and `profile.txt` are written after the last of these updates, or when `fit`
/// ends earlier; not after an exception. Only rank 0 profiles, and no `.smoke` fit does.
///
/// Memory. Measured in the update before `first`, or after `second` if `first` is 0, as the largest at the end of each
/// phase: tensors that the update allocates, and older parameters, optimizer state and gradients.
///
/// `fit` throws if LibTorch's profiler is in use, by `FitOptions::measure_memory` or a `MemoryMeter` for example.
///
/// @note Costs nothing in other updates, and does not synchronize there. See `Profiler` for the cost of a profile.
struct Profile {
  std::pair<std::int64_t, std::int64_t> updates = {10, 13};  ///< 0 <= first < second
  std::filesystem::path directory = {};                      ///< created if it does not exist

  class Running;
};

/// A Profile in a Trainer: what `trainer.policy<ga::Profile>()` returns.
class Profile::Running : public Profile {
 public:
  using Options = Profile;
  explicit Running(Profile given) : Profile(std::move(given)) {}
  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);

  /// Returns nullptr until the last of the updates.
  const ProfileReport* report() const;

 private:
  std::shared_ptr<detail::ProfileRun> run_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/profile.ipp>
#endif
