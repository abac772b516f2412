// SPDX-License-Identifier: Apache-2.0
#include "snippets/prelude.hpp"

#include "support/files.hpp"

// Runs the snippets of the document that the command line names, in an empty directory, so that none resumes from the
// state of another run.
int main(int argc, char* argv[]) {
  const testing::Directory directory;
  std::filesystem::current_path(directory / "");
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
