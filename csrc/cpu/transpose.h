// Transposes and mirror images of matrices.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace tnt {

template <typename T>
void transpose_block(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows,
                     int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

inline void transpose_four(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_stride);
  __m128 c = _mm_loadu_ps(from + 2 * from_stride), d = _mm_loadu_ps(from + 3 * from_stride);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + to_stride, b);
  _mm_storeu_ps(to + 2 * to_stride, c);
  _mm_storeu_ps(to + 3 * to_stride, d);
}

// to (columns, rows) <- from (rows, columns), both row-major, without overlap.
template <typename T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows,
               int64_t columns) {
  // 32 x 32 floats of both matrices stay in the first-level cache until their lines are complete.
  constexpr int64_t kBlock = 32;
  for (int64_t r = 0; r < rows; r += kBlock) {
    for (int64_t c = 0; c < columns; c += kBlock) {
      const int64_t height = std::min(kBlock, rows - r), width = std::min(kBlock, columns - c);
      const T* source = from + r * from_stride + c;
      T* target = to + c * to_stride + r;
      if constexpr (sizeof(T) == 4) {
        const int64_t whole_rows = height & ~3, whole_columns = width & ~3;
        for (int64_t y = 0; y < whole_rows; y += 4) {
          for (int64_t x = 0; x < whole_columns; x += 4) {
            transpose_four(source + y * from_stride + x, from_stride, target + x * to_stride + y,
                           to_stride);
          }
        }
        transpose_block(source + whole_columns, from_stride, target + whole_columns * to_stride,
                        to_stride, whole_rows, width - whole_columns);
        transpose_block(source + whole_rows * from_stride, from_stride, target + whole_rows,
                        to_stride, height - whole_rows, width);
        continue;
      }
      transpose_block(source, from_stride, target, to_stride, height, width);
    }
  }
}

// The upper triangle of a square matrix <- its lower triangle.
template <typename T>
void mirror_lower(T* matrix, int64_t n, int64_t stride) {
  constexpr int64_t kBlock = 32, kCorner = 4;
  for (int64_t r = 0; r < n; r += kBlock) {
    const int64_t height = std::min(kBlock, n - r);
    transpose(matrix + r * stride, stride, matrix + r, stride, height, r);
    for (int64_t q = r; q < r + height; q += kCorner) {
      const int64_t end = std::min(q + kCorner, r + height);
      transpose(matrix + q * stride + r, stride, matrix + r * stride + q, stride, end - q, q - r);
      for (int64_t i = q; i < end; ++i) {
        for (int64_t j = q; j < i; ++j) matrix[j * stride + i] = matrix[i * stride + j];
      }
    }
  }
}

}  // namespace tnt
