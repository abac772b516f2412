// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string_view>

namespace bloom {

/// The vocabulary of generated_reviews, in lower case.
inline constexpr std::array<std::string_view, 12> good_words = {"great",    "wonderful", "brilliant", "moving",
                                                                "funny",    "charming",  "clever",    "delightful",
                                                                "gripping", "beautiful", "original",  "memorable"};
inline constexpr std::array<std::string_view, 12> bad_words = {"awful",   "boring", "terrible", "clumsy",
                                                               "dull",    "weak",   "tedious",  "painful",
                                                               "shallow", "ugly",   "silly",    "forgettable"};
inline constexpr std::array<std::string_view, 12> aspects = {"acting", "plot",        "story",    "cast",
                                                             "music",  "script",      "dialogue", "direction",
                                                             "pacing", "photography", "humour",   "ending"};
inline constexpr std::array<std::string_view, 16> people = {
    "captain", "sister",  "teacher", "soldier", "doctor", "stranger", "widow", "painter",
    "waiter",  "brother", "lawyer",  "nurse",   "fisher", "pilot",    "thief", "neighbour"};
inline constexpr std::array<std::string_view, 12> verbs = {"finds",     "sells",  "hides",   "paints",
                                                           "remembers", "visits", "carries", "opens",
                                                           "watches",   "leaves", "repairs", "wants"};
inline constexpr std::array<std::string_view, 16> things = {
    "letter", "house", "garden",   "train", "piano", "window", "photograph", "boat",
    "mirror", "clock", "suitcase", "map",   "lamp",  "bridge", "ring",       "horse"};
inline constexpr std::array<std::string_view, 12> places = {"harbour", "mountains", "rain",    "kitchen",
                                                            "village", "desert",    "station", "city",
                                                            "forest",  "winter",    "morning", "snow"};

}  // namespace bloom
