// SPDX-License-Identifier: Apache-2.0
//
// The blocks of threads of a step of Adafactor. It goes over a table of tensors several times: sums of squares, then
// the averages move, then the updates are measured, and with them the size of the step is known. What is small is
// through with all but the last in the first. Each pass may read what those before have left in memory; within one, no
// block waits for another.

#include <gradaccum/detail/kernels/device/adafactor_tile.inl>
// in the order of the passes:
#include <gradaccum/detail/kernels/device/adafactor_sums.inl>
// between them, those of large matrices:
#include <gradaccum/detail/kernels/device/adafactor_averages.inl>
// and at last:
#include <gradaccum/detail/kernels/device/adafactor_move.inl>

/// All passes; those for large matrices where there are any.
template <class P, class G, bool rounded>
struct AdafactorPasses {
  static void run(const AdafactorLaunch& launch, void* stream) {
    const auto& tensors = launch.tensors;
    run_blocks<AdafactorSumsBlock<P, G>>(launch, tensors.blocks, stream);
    if (tensors.averages > 0) {
      run_blocks<AdafactorAveragesBlock<VectorOf<P>>>(launch, tensors.averages, stream);
      run_blocks<AdafactorUpdateBlock<VectorOf<P>, G>>(launch, tensors.blocks, stream);
    }
    run_blocks<AdafactorStepSizeBlock>(launch, tensors.size, stream);
    const bool momentum = tensors.size > 0 && tensors.entries[0].exp_avg;
    const auto move = momentum ? run_blocks<AdafactorMoveBlock<P, G, rounded, true>>
                               : run_blocks<AdafactorMoveBlock<P, G, rounded, false>>;
    move(launch, tensors.blocks, stream);
  }
};

inline void run_adafactor(const AdafactorLaunch& launch, const OperandTypes& types, void* stream) {
  using Function = void(const AdafactorLaunch&, void*);
  of_types<Function, AdafactorPasses>(types.parameter, types.gradient, types.rounded)(launch, stream);
}
