// Transposes at every edge of their blocks, in matrices with gaps: the elements are numbered, the
// gaps and what is to be overwritten poisoned.

#include <string>
#include <vector>

#include "cpu/transpose.h"
#include "expect.h"

namespace {

constexpr int kPoison = -1;
constexpr int64_t kSizes[] = {0, 1, 2, 3, 4, 5, 8, 31, 32, 33, 35, 36, 63, 64, 65, 97};

// Ends with the last element, so that the address sanitizer sees the next one.
int64_t extent(int64_t rows, int64_t columns, int64_t stride) {
  return rows == 0 || columns == 0 ? 0 : (rows - 1) * stride + columns;
}

template <typename T>
void check_transpose(int64_t rows, int64_t columns, int64_t gap) {
  const expect::Case sizes(std::to_string(rows) + " x " + std::to_string(columns) + ", gap " +
                           std::to_string(gap));
  const int64_t from_stride = columns + gap, to_stride = rows + 2 * gap;
  std::vector<T> from(extent(rows, columns, from_stride), kPoison);
  std::vector<T> to(extent(columns, rows, to_stride), kPoison);
  std::vector<T> wanted = to;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const T number = static_cast<T>(r * columns + c);
      from[r * from_stride + c] = number;
      wanted[c * to_stride + r] = number;
    }
  }
  const std::vector<T> before = from;
  tnt::transpose(from.data(), from_stride, to.data(), to_stride, rows, columns);
  EXPECT(to == wanted);
  EXPECT(from == before);
}

template <typename T>
void check_mirror(int64_t n, int64_t gap) {
  const expect::Case sizes("mirror " + std::to_string(n) + ", gap " + std::to_string(gap));
  const int64_t stride = n + gap;
  std::vector<T> matrix(extent(n, n, stride), kPoison);
  std::vector<T> wanted = matrix;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c <= r; ++c) {
      const T number = static_cast<T>(r * n + c);
      matrix[r * stride + c] = number;
      wanted[r * stride + c] = number;
      wanted[c * stride + r] = number;
    }
  }
  tnt::mirror_lower(matrix.data(), n, stride);
  EXPECT(matrix == wanted);
}

template <typename T>
void check_all(const char* name) {
  const expect::Case type(name);
  for (const int64_t gap : {0, 3}) {
    for (const int64_t rows : kSizes) {
      for (const int64_t columns : kSizes) check_transpose<T>(rows, columns, gap);
    }
    for (const int64_t n : kSizes) check_mirror<T>(n, gap);
  }
}

}  // namespace

int main() {
  check_all<float>("float");
  check_all<double>("double");
  return expect::finish();
}
