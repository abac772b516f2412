// SPDX-License-Identifier: Apache-2.0
//
// All steps. Included once for their settings, and with GRADACCUM_ARITHMETIC for each kind of vectors.

#include <gradaccum/detail/kernels/steps/adafactor.inl>
#include <gradaccum/detail/kernels/steps/adam.inl>
#include <gradaccum/detail/kernels/steps/lion.inl>
#include <gradaccum/detail/kernels/steps/muon.inl>
#include <gradaccum/detail/kernels/steps/sgd.inl>

#ifndef GRADACCUM_ARITHMETIC
namespace gradaccum::detail {

/// The steps of single elements that have kernels for each instruction set and for devices.
using Steps =
    std::tuple<SgdStep, AdamStep, Adam8bitStep, optim::LionStep, optim::MuonDirectionStep, optim::MuonUpdateStep>;

}  // namespace gradaccum::detail
#endif
