// Enough of a test harness: EXPECT counts, reports and goes on; finish() is main's exit status.
#pragma once

#include <cstdio>

namespace expect {

inline int checks = 0;
inline int failures = 0;

inline bool report(bool holds, const char* what, const char* file, int line) {
  ++checks;
  if (!holds) {
    ++failures;
    std::fprintf(stderr, "%s:%d: %s does not hold\n", file, line, what);
  }
  return holds;
}

inline int finish() {
  if (checks == 0) std::fprintf(stderr, "nothing was checked\n");
  std::printf("%d passed, %d failed\n", checks - failures, failures);
  return checks > 0 && failures == 0 ? 0 : 1;
}

}  // namespace expect

#define EXPECT(condition) ::expect::report((condition), #condition, __FILE__, __LINE__)
