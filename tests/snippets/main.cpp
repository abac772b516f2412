// SPDX-License-Identifier: Apache-2.0
#include "snippets/prelude.hpp"

// Runs the snippets of the document that the command line names.
int main(int argc, char* argv[]) {
  int ran = 0;
  for (const Snippet& snippet : snippets) {
    if (argc != 2 || snippet.document != argv[1]) continue;
    std::printf("%s:%d\n", argv[1], snippet.line);
    std::fflush(stdout);
    snippet.run();
    optimizer.discard();
    ++ran;
  }
  return ran > 0 ? 0 : 1;
}
