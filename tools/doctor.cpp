// SPDX-License-Identifier: Apache-2.0
//
// What this machine gives away to a program that does nothing about it: so nothing is done about it here, either.

#include <gradaccum/machine_report.hpp>

#include <iostream>

int main() { std::cout << gradaccum::machine_report(); }
