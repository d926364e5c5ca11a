// The inverse of one symmetric positive definite matrix by one thread block, in shared memory.
//
// A = L L^T is factorised from left to right, kPanel columns at a time, and X = L^-1 replaces the
// finished columns. With L_kk the factor of the current tile on the diagonal, one forward
// substitution computes a panel Q with one vector for each row or column c of the matrix:
//     c above the tile:  L_kk^-1 (column c of X's partial rows)   = the tile's final rows of X
//     c in the tile:     L_kk^-1 e_c                              = the tile's final rows of X
//     c below it:        L_kk^-1 (row c of A's partial columns)   = row c of L
// Then M(r, c) <- M(r, c) - Q_r . Q_c for all rows below the tile, where the tile's own columns
// start from 0. Right of the tile this is Cholesky's update, left of it the substitution for X.
// Finally A^-1 = X^T X. (A sweep with the tile's inverse would take fewer lines, but a pivot that
// cancels to rounding errors would include those of the inverse, and the rule would pass noise.)
//
// This takes two barriers for every 8 columns: each thread factorises the tile in its own
// registers, about 100 multiplications instead of 8 more barriers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cuda/damped_inverse.cuh"
#include "cuda/phases.cuh"

namespace tnt::cuda {

template <typename T>
TNT_DEVICE bool is_finite(T value) {
  return value - value == 0;
}

template <typename T>
class BlockInverse {
 public:
  // A = scale S + eps I with S(r, c) = stat[r * row + c * column], from its lower triangle.
  struct Source {
    const T* stat;
    int64_t row, column;
    T scale, eps;
  };

  // Bytes of shared memory for an (n, n) matrix.
  static constexpr int64_t bytes(int64_t n) {
    const int64_t size = padded(n), groups = size / kPatch;
    return kHeader + size * static_cast<int64_t>(sizeof(T)) +
           groups * static_cast<int64_t>(sizeof(Group)) +
           groups * (groups + 1) / 2 * static_cast<int64_t>(sizeof(Patch));
  }

  // `shared` is aligned to 16 bytes. Its first int is set to 1 on failure: a statistic or inverse
  // that is not finite, or a pivot that counts as 0.
  TNT_DEVICE BlockInverse(std::byte* shared, int n)
      : n_(n),
        panels_(static_cast<int>(padded(n)) / kPanel),
        bad_(*reinterpret_cast<int*>(shared)),
        diagonal_(reinterpret_cast<T*>(shared + kHeader)),
        panel_(reinterpret_cast<Group*>(diagonal_ + panels_ * kPanel)),
        patches_(reinterpret_cast<Patch*>(panel_ + panels_ * kPanel / kPatch)) {}

  // to (n, n) <- A^-1, row-major, symmetric to the bit.
  template <typename Run>
  TNT_DEVICE void phases(const Source& source, T* to, const Run& run) {
    run([&](Thread thread) { load(source, thread); });
    for (int k = 0; k < panels_; ++k) {
      run([&](Thread thread) { make_panel(k, thread); });
      run([&](Thread thread) { update(k, thread); });
    }
    run([&](Thread thread) { store(to, thread); });
  }

 private:
  static constexpr int kPatch = 4;
  static constexpr int kPanel = 8;
  static constexpr int kHeader = 16;
  static constexpr T kNoise = kPivotRoundings * std::numeric_limits<T>::epsilon();

  // One load instruction (two for double).
  struct alignas(16) Four {
    T at[kPatch];
  };
  // The lower triangle is stored in patches of 4 x 4, the panel in groups of four vectors. The gap
  // at the end of each avoids bank conflicts between neighbouring threads.
  struct Patch {
    Four rows[kPatch];
    Four gap;
  };
  struct Group {
    Four entries[kPanel];
    Four gap;
  };

  // Padding with the identity does not change the inverse: diag(A, I)^-1 = diag(A^-1, I).
  TNT_HOST_DEVICE static constexpr int64_t padded(int64_t n) {
    return (n + kPanel - 1) / kPanel * kPanel;
  }

  TNT_DEVICE int groups() const { return panels_ * kPanel / kPatch; }
  TNT_DEVICE static int first_of(int row) { return row * (row + 1) / 2; }
  TNT_DEVICE Patch& patch(int row, int column) const { return patches_[first_of(row) + column]; }

  // f(R, C, patch) for this thread's patches from row `first` on.
  template <typename F>
  TNT_DEVICE void for_patches(int first, Thread thread, const F& f) const {
    const int end = first_of(groups());
    for (int p = first_of(first) + thread.index; p < end; p += thread.count) {
      // Exact: at a row's first patch the radicand is a square, and one patch before it is 8 less.
      const int row = static_cast<int>((sqrtf(8.0f * static_cast<float>(p) + 1) - 1) / 2);
      f(row, p - first_of(row), patches_[p]);
    }
  }

  TNT_DEVICE void load(const Source& source, Thread thread) const {
    for_patches(0, thread, [&](int row, int column, Patch& to) {
      bool finite = true;
      TNT_UNROLL
      for (int a = 0; a < kPatch; ++a) {
        TNT_UNROLL
        for (int b = 0; b < kPatch; ++b) {
          const int r = kPatch * row + a, c = kPatch * column + b;
          T entry = static_cast<T>(r == c);
          if (r < n_ && c < n_) {
            const int low = r > c ? r : c, high = r > c ? c : r;
            entry = source.scale * source.stat[low * source.row + high * source.column];
            finite = finite && is_finite(entry);
            if (r == c) entry += source.eps;
          }
          if (r == c) diagonal_[r] = entry;
          to.rows[a].at[b] = entry;
        }
      }
      if (!finite) bad_ = 1;
    });
  }

  TNT_DEVICE void make_panel(int k, Thread thread) const {
    const int size = panels_ * kPanel, above = k * kPanel, group = above / kPatch;
    if (thread.index >= size) return;
    T tile[kPanel][kPanel];  // L_kk below the diagonal
    T inverse[kPanel];       // of L_kk's diagonal
    TNT_UNROLL
    for (int i = 0; i < kPanel; ++i) {
      TNT_UNROLL
      for (int j = 0; j <= i; ++j) {
        tile[i][j] = patch(group + i / kPatch, group + j / kPatch).rows[i % kPatch].at[j % kPatch];
      }
    }
    bool definite = true;
    TNT_UNROLL
    for (int j = 0; j < kPanel; ++j) {
      const T pivot = tile[j][j];
      definite = definite && pivot > kNoise * diagonal_[above + j];
      inverse[j] = 1 / std::sqrt(pivot);
      TNT_UNROLL
      for (int i = j + 1; i < kPanel; ++i) tile[i][j] *= inverse[j];
      TNT_UNROLL
      for (int i = j + 1; i < kPanel; ++i) {
        TNT_UNROLL
        for (int l = j + 1; l <= i; ++l) tile[i][l] -= tile[i][j] * tile[l][j];
      }
    }
    if (thread.index == 0 && !definite) bad_ = 1;
    for (int c = thread.index; c < size; c += thread.count) {
      T x[kPanel];
      TNT_UNROLL
      for (int t = 0; t < kPanel; ++t) {
        const int at = c / kPatch, within = c % kPatch;
        if (c < above) {
          x[t] = patch(group + t / kPatch, at).rows[t % kPatch].at[within];
        } else if (c >= above + kPanel) {
          x[t] = patch(at, group + t / kPatch).rows[within].at[t % kPatch];
        } else {
          x[t] = static_cast<T>(c == above + t);
        }
      }
      TNT_UNROLL
      for (int t = 0; t < kPanel; ++t) {
        TNT_UNROLL
        for (int s = 0; s < t; ++s) x[t] -= tile[t][s] * x[s];
        x[t] *= inverse[t];
        panel_[c / kPatch].entries[t].at[c % kPatch] = x[t];
      }
    }
  }

  TNT_DEVICE void update(int k, Thread thread) const {
    const int group = k * kPanel / kPatch, below = group + kPanel / kPatch;
    for_patches(group, thread, [&](int row, int column, Patch& to) {
      if (row < below) {
        TNT_UNROLL
        for (int a = 0; a < kPatch; ++a) {
          to.rows[a] = panel_[column].entries[(row - group) * kPatch + a];
        }
        return;
      }
      const bool fresh = column >= group && column < below;
      Four sums[kPatch];
      TNT_UNROLL
      for (int a = 0; a < kPatch; ++a) {
        TNT_UNROLL
        for (int b = 0; b < kPatch; ++b) sums[a].at[b] = fresh ? T(0) : to.rows[a].at[b];
      }
      TNT_UNROLL
      for (int t = 0; t < kPanel; ++t) {
        add_product<-1>(panel_[row].entries[t], panel_[column].entries[t], sums);
      }
      TNT_UNROLL
      for (int a = 0; a < kPatch; ++a) to.rows[a] = sums[a];
    });
  }

  TNT_DEVICE void store(T* to, Thread thread) const {
    for_patches(0, thread, [&](int row, int column, const Patch&) {
      Four sums[kPatch] = {};
      for (int below = row; below < groups(); ++below) {
        const Patch &left = patch(below, row), &right = patch(below, column);
        TNT_UNROLL
        for (int l = 0; l < kPatch; ++l) add_product<1>(left.rows[l], right.rows[l], sums);
      }
      bool finite = true;
      TNT_UNROLL
      for (int a = 0; a < kPatch; ++a) {
        TNT_UNROLL
        for (int b = 0; b < kPatch; ++b) {
          const int r = kPatch * row + a, c = kPatch * column + b;
          if (r >= n_ || c > r) continue;
          const T entry = sums[a].at[b];
          finite = finite && is_finite(entry);
          to[static_cast<int64_t>(r) * n_ + c] = entry;
          to[static_cast<int64_t>(c) * n_ + r] = entry;
        }
      }
      if (!finite) bad_ = 1;
    });
  }

  // sums <- sums + sign x y^T
  template <int sign>
  TNT_DEVICE static void add_product(const Four& x, const Four& y, Four (&sums)[kPatch]) {
    TNT_UNROLL
    for (int a = 0; a < kPatch; ++a) {
      TNT_UNROLL
      for (int b = 0; b < kPatch; ++b) sums[a].at[b] += sign * x.at[a] * y.at[b];
    }
  }

  int n_, panels_;
  int& bad_;
  T* diagonal_;     // of A, damped: pivots are compared with it
  Group* panel_;    // Q
  Patch* patches_;  // M
};

}  // namespace tnt::cuda
