// Enough of a test harness: EXPECT counts, reports and goes on; finish() is main's exit status.
#pragma once

#include <cstdio>
#include <string>
#include <utility>

namespace expect {

inline int checks = 0;
inline int failures = 0;
inline std::string current_case;

// Names what is being checked while it lives, for the reports.
class Case {
 public:
  explicit Case(const std::string& name) : outer_(current_case) {
    current_case = outer_.empty() ? name : outer_ + ", " + name;
  }
  ~Case() { current_case = std::move(outer_); }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

 private:
  std::string outer_;
};

inline bool report(bool holds, const char* what, const char* file, int line) {
  ++checks;
  if (!holds) {
    ++failures;
    std::fprintf(stderr, "%s:%d: %s does not hold", file, line, what);
    std::fprintf(stderr, current_case.empty() ? "%s\n" : ": %s\n", current_case.c_str());
  }
  return holds;
}

// A failure says how far off the number was.
inline bool report_below(double value, double bound, const char* what, const char* file, int line) {
  const bool holds = value <= bound;  // not for NaN
  if (!report(holds, what, file, line)) std::fprintf(stderr, "  %g > %g\n", value, bound);
  return holds;
}

inline int finish() {
  if (checks == 0) std::fprintf(stderr, "nothing was checked\n");
  std::printf("%d passed, %d failed\n", checks - failures, failures);
  return checks > 0 && failures == 0 ? 0 : 1;
}

}  // namespace expect

#define EXPECT(condition) ::expect::report((condition), #condition, __FILE__, __LINE__)
#define EXPECT_AT_MOST(value, bound) \
  ::expect::report_below((value), (bound), #value " <= " #bound, __FILE__, __LINE__)
