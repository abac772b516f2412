// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/mkl_on_amd.hpp>
