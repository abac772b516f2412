// SPDX-License-Identifier: Apache-2.0
#pragma once

// Empty: see context.h.
