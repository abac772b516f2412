// SPDX-License-Identifier: Apache-2.0
// Connects Replicas to a Trainer.
#pragma once

#include <gradaccum/policies/data_parallel.hpp>

#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/detail/training/loop.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void DataParallel::Running::attach(TrainerBase& trainer) {
  TORCH_CHECK(check_every >= 0, "DataParallel: check_every must be >= 0, got ", check_every);
  TORCH_CHECK(shard == Shard::none || options.shard == Shard::none || shard == options.shard,
              "DataParallel: .shard and .options.shard must not differ; leave out the latter");
  auto of_part = options;
  if (shard != Shard::none) of_part.shard = shard;
  auto& loop = detail::Loop::of(trainer);
  replicas_ = std::make_shared<Replicas>(group, trainer.module(), loop, of_part);
  if (const auto peers = replicas_->peers()) {
    peers->report = [&loop] { return loop.totals(); };
    peers->on_reduced = [&loop](auto& own, auto& all) { loop.take_totals(own, all); };
  }
}

GRADACCUM_INLINE Replicas& DataParallel::Running::replicas() const {
  TORCH_CHECK(replicas_, "DataParallel: replicas() must be called after the policy is attached");
  return *replicas_;
}

GRADACCUM_INLINE bool DataParallel::Running::others_continue() const { return replicas_->others_continue(); }

GRADACCUM_INLINE void DataParallel::Running::after_step(const Step& step) const {
  if (check_every > 0 && step.update % check_every == 0) replicas_->check_equal();
}

GRADACCUM_INLINE void DataParallel::Running::on_epoch_end(std::int64_t) const { replicas_->broadcast_buffers(); }

GRADACCUM_INLINE void DataParallel::Running::state(Archive& archive) const {
  archive.setting("world_size", group.world_size());
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
