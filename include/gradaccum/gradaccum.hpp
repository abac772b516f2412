// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/clip_grad.hpp>
#include <gradaccum/concepts.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/factor.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/keep_freed_memory.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/version.hpp>
#include <gradaccum/window.hpp>
