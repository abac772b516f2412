// SPDX-License-Identifier: Apache-2.0
#pragma once

// Includes Catch2, version 2 or 3, after LibTorch, whose headers define another macro CHECK.
#include <nlohmann/json.hpp>
#include <torch/torch.h>
#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include <string>

// Clang announces AddressSanitizer by a feature, g++ by a macro.
#ifdef __has_feature
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

namespace testing {

/// True if AddressSanitizer makes every test several times slower.
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// Returns the message of the `c10::Error` (or other exception) that `run` throws, without a backtrace; empty if it
/// throws none.
template <class Run>
std::string error_of(Run&& run) {
  try {
    run();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Returns whether the text contains the part.
inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace testing

#define REQUIRE_ERROR(part, ...)                                           \
  do {                                                                     \
    const auto message_ = testing::error_of([&] { (void)(__VA_ARGS__); }); \
    INFO("message: '" << message_ << "'");                                 \
    REQUIRE(testing::contains(message_, part));                            \
  } while (false)

/// Version 2 has no SKIP: prints the reason, and leaves the test.
#ifndef SKIP
#define SKIP(reason)               \
  do {                             \
    WARN("skipped: " << (reason)); \
    return;                        \
  } while (false)
#endif
