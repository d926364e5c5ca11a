// The Gram kernel against the definition written as three loops. All values are small integers and
// the decays multiples of 1/4, so that every sum is exact in float, in whatever order it is taken:
// the results must be equal, with no tolerance to argue about.

#include <limits>
#include <random>
#include <vector>

#include "cpu/gram_ema.h"
#include "expect.h"

namespace {

using tnt::ModeView;

template <typename T>
std::vector<T> random_integers(size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_int_distribution<int> between(-8, 8);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(between(engine));
  return values;
}

// sum over the other modes of G[.., row, ..] G[.., column, ..]
template <typename T>
double contraction(const std::vector<T>& tensor, ModeView view, int64_t row, int64_t column) {
  double sum = 0;
  for (int64_t a = 0; a < view.before; ++a) {
    for (int64_t b = 0; b < view.after; ++b) {
      sum += static_cast<double>(tensor[(a * view.d + row) * view.after + b]) *
             tensor[(a * view.d + column) * view.after + b];
    }
  }
  return sum;
}

template <typename T>
void check(ModeView view, double decay) {
  const auto [before, d, after] = view;
  // Exact sizes, so that the address sanitizer sees the first element too many.
  const auto tensor = random_integers<T>(before * d * after, 1);

  auto full = random_integers<T>(d * d, 2);
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c < r; ++c) full[c * d + r] = full[r * d + c];
  }
  auto diagonal = random_integers<T>(d, 3);
  const auto old_full = full, old_diagonal = diagonal;
  // Decay 0 must not read what was there.
  if (decay == 0) {
    full.assign(full.size(), std::numeric_limits<T>::quiet_NaN());
    diagonal.assign(diagonal.size(), std::numeric_limits<T>::quiet_NaN());
  }

  tnt::gram_ema(full.data(), tensor.data(), view, decay);
  tnt::diagonal_gram_ema(diagonal.data(), tensor.data(), view, decay);

  bool equal = true, symmetric = true;
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c < d; ++c) {
      const double wanted =
          decay * old_full[r * d + c] + (1 - decay) * contraction(tensor, view, r, c);
      equal = equal && full[r * d + c] == wanted;
      symmetric = symmetric && full[r * d + c] == full[c * d + r];
    }
    const double wanted = decay * old_diagonal[r] + (1 - decay) * contraction(tensor, view, r, r);
    equal = equal && diagonal[r] == wanted;
  }
  if (!EXPECT(equal) || !EXPECT(symmetric)) {
    std::fprintf(stderr, "  at (%ld, %ld, %ld), decay %g\n", static_cast<long>(before),
                 static_cast<long>(d), static_cast<long>(after), decay);
  }
}

// Decay 1 leaves S as it is and does not look at G.
void check_decay_one() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> tensor(12, nan), old{1, 2, 2, 3, 5, 6, 7, 8, 9};
  auto full = old;
  tnt::gram_ema(full.data(), tensor.data(), {2, 3, 2}, 1.0);
  EXPECT(full == old);
  tnt::diagonal_gram_ema(full.data(), tensor.data(), {2, 3, 2}, 1.0);
  EXPECT(full == old);
}

template <typename T>
void check_all() {
  const std::vector<ModeView> views = {
      {1, 1, 1},  {1, 9, 1},   {1, 9, 63}, {63, 9, 1},  {7, 1, 5},   {5, 63, 3},
      {3, 65, 9}, {65, 10, 1}, {1, 65, 2}, {300, 2, 1}, {2, 3, 700}, {40, 33, 27},
      {0, 3, 4},  {4, 3, 0},   {4, 0, 3},  {1, 0, 1},
  };
  for (const ModeView view : views) {
    for (const double decay : {0.0, 0.25, 0.75}) check<T>(view, decay);
  }
}

}  // namespace

int main() {
  check_all<float>();
  check_all<double>();
  check_decay_one();
  return expect::finish();
}
