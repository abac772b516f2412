# SPDX-License-Identifier: Apache-2.0
"""Writes cart_pole_values.hpp: states of Gymnasium's CartPole-v1 (pip install gymnasium)."""
import pathlib

import gymnasium

STARTS = [[0.01, -0.02, 0.03, 0.04], [-0.05, 0.05, -0.01, 0.0], [2.39, 1.0, 0.0, 0.0]]


def episode(start):
    """Pushes left and right in turn, but each third time right, until the pole has fallen or the cart is too far off."""
    environment = gymnasium.make("CartPole-v1").unwrapped
    environment.reset(seed=0)
    environment.state = tuple(start)
    states, ended = [], False
    while not ended:
        _, reward, ended, _, _ = environment.step(1 if len(states) % 3 == 2 else len(states) % 2)
        assert reward == 1
        states.append([float(number) for number in environment.state])
    return states


def braced(values):
    return "{" + ", ".join(map(braced, values) if isinstance(values, list) and isinstance(values[0], list) else
                           map(repr, values)) + "}"


def main():
    episodes = ",\n    ".join(f"{{{braced(start)},\n     {braced(episode(start))}}}" for start in STARTS)
    text = f"""// SPDX-License-Identifier: Apache-2.0
#pragma once

// Written by cart_pole_values.py with Gymnasium {gymnasium.__version__}. Do not edit.

#include <array>
#include <vector>

using CartPoleState = std::array<double, 4>;
struct CartPoleEpisode {{
  CartPoleState start;
  std::vector<CartPoleState> states;  // after each step; the last one ends the episode
}};

inline const std::vector<CartPoleEpisode> cart_pole_episodes = {{
    {episodes}}};
"""
    pathlib.Path(__file__).with_suffix(".hpp").write_text(text)


if __name__ == "__main__":
    main()
