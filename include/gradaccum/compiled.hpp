// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: everything

// Contains all definitions of the library. Include it in one file of a program whose files are all compiled with
// GRADACCUM_COMPILED. CMake's target gradaccum::compiled does this.
#ifndef GRADACCUM_COMPILED
#error "gradaccum/compiled.hpp: compile all files of the program with -DGRADACCUM_COMPILED, this one, too"
#endif

#include <gradaccum/gradaccum.hpp>

#include <gradaccum/impl/checkpoint/chain.ipp>
#include <gradaccum/impl/checkpoint/forward_state.ipp>
#include <gradaccum/impl/checkpoint/recomputation.ipp>
#include <gradaccum/impl/compilation/compiled_step.ipp>
#include <gradaccum/impl/compilation/exported_model.ipp>
#include <gradaccum/impl/compilation/graphed_step.ipp>
#include <gradaccum/impl/compilation/step_graphs.ipp>
#include <gradaccum/impl/data/data.ipp>
#include <gradaccum/impl/data/epoch_order.ipp>
#include <gradaccum/impl/data/samples.ipp>
#include <gradaccum/impl/fitting/memory_fitter.ipp>
#include <gradaccum/impl/io/files.ipp>
#include <gradaccum/impl/io/formats.ipp>
#include <gradaccum/impl/io/io.ipp>
#include <gradaccum/impl/io/safetensors.ipp>
#include <gradaccum/impl/kernels/crc32.ipp>
#include <gradaccum/impl/kernels/kernels.ipp>
#include <gradaccum/impl/memory/memory.ipp>
#include <gradaccum/impl/memory/page_allocator.ipp>
#include <gradaccum/impl/metrics/metrics.ipp>
#include <gradaccum/impl/optimizers/adafactor.ipp>
#include <gradaccum/impl/optimizers/adam8bit.ipp>
#include <gradaccum/impl/optimizers/cpu_steps.ipp>
#include <gradaccum/impl/optimizers/device_batches.ipp>
#include <gradaccum/impl/optimizers/device_steps.ipp>
#include <gradaccum/impl/optimizers/eight_bit_moments.ipp>
#include <gradaccum/impl/optimizers/learning_rates.ipp>
#include <gradaccum/impl/optimizers/multi_optimizer.ipp>
#include <gradaccum/impl/optimizers/muon.ipp>
#include <gradaccum/impl/optimizers/one_pass.ipp>
#include <gradaccum/impl/optimizers/param_states.ipp>
#include <gradaccum/impl/optimizers/row_steps.ipp>
#include <gradaccum/impl/parallel/shards.ipp>
#include <gradaccum/impl/platform/posix.ipp>
#include <gradaccum/impl/platform/stop_signals.ipp>
#include <gradaccum/impl/platform/windows.ipp>
#include <gradaccum/impl/policies/accumulate.ipp>
#include <gradaccum/impl/policies/clip.ipp>
#include <gradaccum/impl/policies/early_stopping.ipp>
#include <gradaccum/impl/policies/ema.ipp>
#include <gradaccum/impl/policies/fit_memory.ipp>
#include <gradaccum/impl/policies/guard_norm.ipp>
#include <gradaccum/impl/policies/metrics_log.ipp>
#include <gradaccum/impl/policies/mixed_precision.ipp>
#include <gradaccum/impl/policies/profile.ipp>
#include <gradaccum/impl/policies/progress.ipp>
#include <gradaccum/impl/policies/reduce_lr_on_plateau.ipp>
#include <gradaccum/impl/policies/report.ipp>
#include <gradaccum/impl/policies/save_state.ipp>
#include <gradaccum/impl/policies/tensorboard.ipp>
#include <gradaccum/impl/policies/validate.ipp>
#include <gradaccum/impl/saving/background_saver.ipp>
#include <gradaccum/impl/saving/optimizer_state.ipp>
#include <gradaccum/impl/saving/training_state.ipp>
#include <gradaccum/impl/scaling/amp_scaler.ipp>
#include <gradaccum/impl/state/archive.ipp>
#include <gradaccum/impl/state/pieces.ipp>
#include <gradaccum/impl/training/data_position.ipp>
#include <gradaccum/impl/training/fit_progress.ipp>
#include <gradaccum/impl/training/fit_state.ipp>
#include <gradaccum/impl/training/loop.ipp>
#include <gradaccum/impl/training/trainer_base.ipp>
#include <gradaccum/impl/training/window_record.ipp>
#include <gradaccum/impl/verification/verify_accumulation.ipp>
#include <gradaccum/impl/watching/flop_counter.ipp>
#include <gradaccum/impl/watching/metrics_file.ipp>
#include <gradaccum/impl/watching/profiler.ipp>
#include <gradaccum/impl/watching/progress_line.ipp>
#include <gradaccum/impl/watching/run_page.ipp>
#include <gradaccum/impl/watching/summary_writer.ipp>
#include <gradaccum/impl/window/any_optimizer.ipp>
#include <gradaccum/impl/window/embedding.ipp>
#include <gradaccum/impl/window/fused_gradients.ipp>
#include <gradaccum/impl/window/grad_accumulator.ipp>
#include <gradaccum/impl/window/grad_ready_hooks.ipp>
#include <gradaccum/impl/window/gradients.ipp>
#include <gradaccum/impl/window/linear_cross_entropy.ipp>
#include <gradaccum/impl/window/multiplier.ipp>
#include <gradaccum/impl/window/open_window.ipp>
#include <gradaccum/impl/window/optimizer_facade.ipp>
#include <gradaccum/impl/window/step_in_backward.ipp>
#include <gradaccum/impl/window/window_gradients.ipp>
#include <gradaccum/impl/window/window_sums.ipp>

#ifdef __linux__  // several processes
#include <gradaccum/impl/parallel/connections.ipp>
#include <gradaccum/impl/parallel/heartbeat.ipp>
#include <gradaccum/impl/parallel/process_group.ipp>
#include <gradaccum/impl/parallel/rendezvous.ipp>
#include <gradaccum/impl/parallel/replicas.ipp>
#include <gradaccum/impl/platform/sockets.ipp>
#include <gradaccum/impl/policies/data_parallel.ipp>
#endif

namespace gradaccum::detail {
extern const char either_all_files_define_GRADACCUM_COMPILED_or_none = 0;
}
