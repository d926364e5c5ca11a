#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/blas.h"
#include "cpu/chain.h"
#include "cpu/elementwise.h"
#include "cpu/operators.h"
#include "cpu/transpose.h"

namespace tnt {
namespace {

// mat_i(G) is (d, columns); a column is an index over all other modes. A sum over columns does not
// depend on their order, so their dimensions are sorted by stride and merged if possible: a
// contiguous or channels_last tensor has one or two dimensions of columns.
struct Unfolding {
  const void* data;
  Element element;
  int64_t d;
  int64_t row_stride;
  int64_t columns;
  Dimensions<1> column_dimensions;

  int64_t fastest() const { return column_dimensions.back().strides[0]; }
};

Unfolding unfold(const TensorView& tensor, int64_t mode) {
  Dimensions<1> all, merged;
  int64_t columns = 1;
  for (int64_t i = 0; i < tensor.order; ++i) {
    if (i == mode) continue;
    columns *= tensor.sizes[i];
    if (tensor.sizes[i] != 1) all.push_back({tensor.sizes[i], {tensor.strides[i]}});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.strides[0] > b.strides[0]; });
  for (const auto& dimension : all) append(merged, dimension);
  if (merged.empty()) merged.push_back({1, {1}});
  const int64_t d = tensor.sizes[mode];
  return {tensor.data, tensor.element, d, d > 1 ? tensor.strides[mode] : 1, columns, merged};
}

// A panel of mat_i(G) for the BLAS: row-major, or (columns, rows) row-major if transposed.
template <typename T>
struct Panel {
  const T* data;
  int64_t stride;  // the leading dimension
  bool transposed;
};

// The type in which numbers of type T are computed.
template <typename T>
using Widest = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Copies a panel to `out` (columns, rows), as T.
template <typename T>
Panel<T> gather(const Unfolding& x, int64_t row, int64_t rows, int64_t first, int64_t last,
                T* out) {
  with_element(x.element, [&](auto* null) {
    using From = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
    const From* base = static_cast<const From*>(x.data) + row * x.row_stride;
    T* to = out;
    const auto value = [](From number) { return round_to<T>(convert<Widest<T>>(number)); };
    for_each_run(x.column_dimensions, first, last, [&](const auto& offsets, int64_t count) {
      const From* from = base + offsets[0];
      if constexpr (std::is_same_v<From, T>) {
        if (x.fastest() == 1) {
          transpose(from, x.row_stride, to, rows, rows, count);
          to += count * rows;
          return;
        }
      }
      for (int64_t c = 0; c < count; ++c, from += x.fastest(), to += rows) {
        if (x.row_stride == 1) {
          for (int64_t r = 0; r < rows; ++r) to[r] = value(from[r]);
        } else {
          for (int64_t r = 0; r < rows; ++r) to[r] = value(from[r * x.row_stride]);
        }
      }
    });
  });
  return {out, rows, true};
}

// Whether the BLAS can read the unfolding in place.
template <typename T>
bool readable(const Unfolding& x) {
  if (x.element != kElement<T> || x.column_dimensions.size() > 1) return false;
  if (std::max({x.columns, x.row_stride, x.fastest()}) > blas::kMaxSize) return false;
  return (x.fastest() == 1 && x.row_stride >= x.columns) ||
         (x.row_stride == 1 && x.fastest() >= x.d);
}

// Whether the rows of a readable unfolding are dense; else its columns are.
bool reads_rows(const Unfolding& x) { return x.fastest() == 1 && x.row_stride >= x.columns; }

template <typename T>
Panel<T> panel_in_place(const Unfolding& x, int64_t row, int64_t first) {
  const T* data = static_cast<const T*>(x.data) + row * x.row_stride + first * x.fastest();
  const bool transposed = !reads_rows(x);
  return {data, transposed ? x.fastest() : x.row_stride, transposed};
}

// The two operands of a Gram matrix, of one shape and layout: mat_i(P) or mat_i(G), and mat_i(G).
struct Operands {
  Unfolding left, right;
  bool same;  // without P
};

// C <- alpha A B^T + beta C for two panels, which are both transposed or not.
template <typename In, typename T>
void off_diagonal(int64_t rows, int64_t columns, int64_t depth, T alpha, Panel<In> a, Panel<In> b,
                  T beta, T* c, int64_t stride) {
  const auto operand = a.transposed ? blas::Transposed::kFirst : blas::Transposed::kSecond;
  blas::gemm(operand, rows, columns, depth, alpha, a.data, a.stride, b.data, b.stride, beta, c,
             stride);
}

// For small triangles the library's rank-k update is slow, and a product wastes half its flops: up
// to kSmall, triangles are halved down to products of kLeaf.
constexpr int64_t kSmall = 200;
constexpr int64_t kLeaf = 32;
constexpr int64_t kPartialSum = 1024;

// For bfloat16, and for two operands, there is no rank-k update: triangles of any size are halved.
constexpr int64_t kLargeLeaf = 128;

int64_t half_of(int64_t n) { return (n / 2 + 15) / 16 * 16; }

// The lower triangle of the symmetric C (n, n) <- alpha A B^T + beta C; the upper one is undefined
// afterwards.
template <typename In, typename T>
void on_diagonal(int64_t n, int64_t depth, T alpha, Panel<In> a, Panel<In> b, T beta, T* c,
                 int64_t stride) {
  const bool large = n > kSmall;
  if constexpr (std::is_same_v<In, T>) {
    if (large && a.data == b.data) {
      return blas::syrk(a.transposed, n, depth, alpha, a.data, a.stride, beta, c, stride);
    }
  }
  const int64_t leaf = large || !std::is_same_v<In, T> ? kLargeLeaf : kLeaf;
  if (n <= leaf) return off_diagonal(n, n, depth, alpha, a, b, beta, c, stride);
  const int64_t half = half_of(n);
  const auto low = [&](Panel<In> x) {
    return Panel<In>{x.data + half * (x.transposed ? 1 : x.stride), x.stride, x.transposed};
  };
  on_diagonal(half, depth, alpha, a, b, beta, c, stride);
  off_diagonal(n - half, half, depth, alpha, low(a), b, beta, c + half * stride, stride);
  on_diagonal(n - half, depth, alpha, low(a), low(b), beta, c + half * (stride + 1), stride);
}

template <typename T>
T blend(T decay, T old, T fresh) {
  return decay == 0 ? fresh : decay * old + fresh;  // the old S may be NaN
}

// S (rows, columns) <- decay S + P, and its mirror image.
template <typename T>
void blend_both(const T* product, int64_t product_stride, int64_t rows, int64_t columns, T decay,
                T* stat, T* mirror, int64_t stride) {
  constexpr int64_t kBlock = 32;
  T block[kBlock * kBlock];
  for (int64_t r = 0; r < rows; r += kBlock) {
    for (int64_t c = 0; c < columns; c += kBlock) {
      const int64_t height = std::min(kBlock, rows - r), width = std::min(kBlock, columns - c);
      for (int64_t i = 0; i < height; ++i) {
        T* line = stat + (r + i) * stride + c;
        const T* fresh = product + (r + i) * product_stride + c;
        for (int64_t j = 0; j < width; ++j) {
          line[j] = block[i * kBlock + j] = blend(decay, line[j], fresh[j]);
        }
      }
      transpose(block, kBlock, mirror + c * stride + r, stride, height, width);
    }
  }
}

// blend_both for a tile on the diagonal; reads the product's lower triangle.
template <typename T>
void blend_lower(const T* product, int64_t n, T decay, T* stat, int64_t stride) {
  constexpr int64_t kBlock = 32;
  for (int64_t r = 0; r < n; r += kBlock) {
    const int64_t height = std::min(kBlock, n - r);
    blend_both(product + r * n, n, height, r, decay, stat + r * stride, stat + r, stride);
    T* corner = stat + r * (stride + 1);
    for (int64_t i = 0; i < height; ++i) {
      const T* fresh = product + (r + i) * n + r;
      for (int64_t j = 0; j <= i; ++j) {
        corner[i * stride + j] = blend(decay, corner[i * stride + j], fresh[j]);
      }
    }
    mirror_lower(corner, height, stride);
  }
}

// S (n, n) <- decay S + alpha x x^T.
template <typename T>
void blend_square(int64_t n, T alpha, const T* x, int64_t x_stride, double decay, T* stat,
                  int64_t stride) {
  T values[kSmall];
  for (int64_t i = 0; i < n; ++i) values[i] = x[i * x_stride];
  for (int64_t r = 0; r < n; ++r) {
    T* line = stat + r * stride;
    for (int64_t i = 0; i <= r; ++i) {
      // The BLAS, which serves half precision, multiplies in this order: the same bits.
      line[i] = blend(static_cast<T>(decay), line[i], alpha * (values[r] * values[i]));
    }
  }
  mirror_lower(stat, n, stride);
}

// Rows [row, row + rows) and columns [column, column + columns) of one statistic: a square on the
// diagonal, or below it.
struct Tile {
  int64_t mode;
  int64_t row, rows;
  int64_t column, columns;
  double flops;
};

// How the product of a tile is computed, from operands of type In.
struct TileProduct {
  bool triangle;   // of one panel with itself
  bool of_vector;  // by blend_square, without workspace
  bool direct;     // the BLAS reads the tensor in place
  int64_t depth;   // columns at a time
  int64_t area;    // numbers of the product
  int64_t copied;  // numbers of the panels' copies
};

template <typename In, typename T>
TileProduct product_of(const Operands& of, const Tile& tile) {
  const Unfolding& x = of.right;
  TileProduct plan{};
  plan.triangle = tile.row == tile.column && of.same;
  plan.of_vector = std::is_same_v<In, T> && x.columns == 1 && tile.rows <= kSmall &&
                   plan.triangle && x.element == kElement<T>;
  if (plan.of_vector) return plan;
  // Small products: transposed operands are fastest, because OpenBLAS then loads whole vectors. Up
  // to kUnpackedProduct it does not pack.
  const bool small = std::is_same_v<In, T> && tile.rows <= kSmall;
  plan.direct = readable<In>(x) && (!small || !reads_rows(x));
  const int64_t height = tile.rows + (plan.triangle ? 0 : tile.columns);
  plan.depth = plan.direct ? x.columns : std::max<int64_t>(64, (1 << 16) / height);
  if (small) {
    const int64_t side = tile.rows <= kLeaf ? tile.rows : half_of(tile.rows);
    // OpenBLAS's small kernels add all columns one by one; sums of partial sums round less.
    plan.depth = std::min({plan.depth, kPartialSum, blas::kUnpackedProduct / (side * side)});
  }
  plan.area = tile.rows * tile.columns;
  plan.copied = plan.direct ? 0 : height * std::min(plan.depth, x.columns);
  return plan;
}

template <typename In, typename T>
void update_tile(const GramMode& mode, const Operands& of, const Tile& tile, double decay,
                 Scratch scratch) {
  const Unfolding& x = of.right;
  const T alpha = static_cast<T>((1 - decay) * mode.weight);
  T* stat = static_cast<T*>(mode.stat);
  T* lower = stat + tile.row * x.d + tile.column;
  const auto [triangle, of_vector, direct, depth, area, copied] = product_of<In, T>(of, tile);
  if constexpr (std::is_same_v<In, T>) {
    if (of_vector) {
      const T* vector = static_cast<const T*>(x.data) + tile.row * x.row_stride;
      return blend_square(tile.rows, alpha, vector, x.row_stride, decay, lower, x.d);
    }
  }
  const bool square = tile.row == tile.column;
  // The product stays in the cache until one pass blends it into S.
  T* product = scratch.take<T>(area + copied);
  In* copies = reinterpret_cast<In*>(product + area);
  if (x.columns == 0) std::fill_n(product, area, T(0));
  T beta = 0;
  for (int64_t first = 0; first < x.columns; first += depth, beta = 1) {
    const int64_t last = std::min(first + depth, x.columns), width = last - first;
    const auto panel = [&, direct = direct](const Unfolding& from, int64_t row, int64_t rows,
                                            In* out) {
      return direct ? panel_in_place<In>(from, row, first)
                    : gather(from, row, rows, first, last, out);
    };
    const Panel<In> a = panel(of.left, tile.row, tile.rows, copies);
    const Panel<In> b =
        triangle ? a : panel(x, tile.column, tile.columns, copies + tile.rows * width);
    if (square) {
      on_diagonal(tile.rows, width, alpha, a, b, beta, product, tile.columns);
    } else {
      off_diagonal(tile.rows, tile.columns, width, alpha, a, b, beta, product, tile.columns);
    }
  }
  T* upper = stat + tile.column * x.d + tile.row;
  if (square) {
    blend_lower(product, tile.rows, static_cast<T>(decay), lower, x.d);
  } else {
    blend_both(product, tile.columns, tile.rows, tile.columns, static_cast<T>(decay), lower, upper,
               x.d);
  }
}

// Diagonal statistics are summed in double: a float sum of many small squares stops growing.
int64_t diagonal_depth(const Unfolding& x) { return std::min<int64_t>(256, x.columns); }
int64_t diagonal_workspace(const Unfolding& x, const Tile& tile) {
  return tile.rows * (2 * diagonal_depth(x) + 1);
}

template <typename T>
void update_diagonal(const GramMode& mode, const Operands& of, const Tile& tile, double decay,
                     Scratch scratch) {
  const Unfolding& x = of.right;
  const int64_t depth = diagonal_depth(x);
  double* sums = scratch.take<double>(diagonal_workspace(x, tile));
  double *products = sums + tile.rows, *others = products + tile.rows * depth;
  std::fill_n(sums, tile.rows, 0.0);
  for (int64_t first = 0; first < x.columns; first += depth) {
    const int64_t last = std::min(first + depth, x.columns), width = last - first;
    gather(x, tile.row, tile.rows, first, last, products);
    if (!of.same) gather(of.left, tile.row, tile.rows, first, last, others);
    const double* factors = of.same ? products : others;
    for (int64_t i = 0; i < tile.rows * width; ++i) products[i] *= factors[i];
    for (int64_t c = 0; c < width; ++c) {
      for (int64_t r = 0; r < tile.rows; ++r) sums[r] += products[c * tile.rows + r];
    }
  }
  T* stat = static_cast<T*>(mode.stat) + tile.row;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const T fresh = static_cast<T>((1 - decay) * mode.weight) * static_cast<T>(sums[r]);
    stat[r] = blend(static_cast<T>(decay), stat[r], fresh);
  }
}

// The longest side of a tile: its product must stay in a second-level cache.
constexpr int64_t kLongestSide = 512;
constexpr int64_t kLeastSide = 96;

// Adds the tiles of one statistic, each side split into `cuts`.
void cut(const Unfolding& x, int64_t mode, bool diagonal, int64_t cuts, std::vector<Tile>& tiles) {
  const double columns = static_cast<double>(x.columns) + 8;  // 8: the cost of updating S
  if (diagonal) {
    constexpr int64_t kRows = 256;
    for (int64_t r = 0; r < x.d; r += kRows) {
      const int64_t rows = std::min(kRows, x.d - r);
      tiles.push_back({mode, r, rows, r, rows, 2 * static_cast<double>(rows) * columns});
    }
    return;
  }
  const int64_t side = std::max<int64_t>(((x.d + cuts - 1) / cuts + 15) / 16 * 16, 1);
  for (int64_t r = 0; r < x.d; r += side) {
    for (int64_t c = 0; c <= r; c += side) {
      const int64_t rows = std::min(side, x.d - r), width = std::min(side, x.d - c);
      const double area = static_cast<double>(rows) * static_cast<double>(width);
      tiles.push_back({mode, r, rows, c, width, area * columns * (r == c ? 1 : 2)});
    }
  }
}

// The largest load of a thread over the average, if each thread takes the next tile when it is
// done.
double imbalance(const std::vector<Tile>& tiles, int64_t threads) {
  std::vector<double> loads(static_cast<size_t>(threads), 0.0);
  double total = 0;
  for (const Tile& tile : tiles) {
    *std::min_element(loads.begin(), loads.end()) += tile.flops;
    total += tile.flops;
  }
  const double most = *std::max_element(loads.begin(), loads.end());
  return total < kParallelFlops ? 1 : most * static_cast<double>(loads.size()) / total;
}

// Splits the statistics into tiles, the longest first: as few as balance the threads' loads,
// because the BLAS packs both operands of every tile.
std::vector<Tile> cut_evenly(const std::vector<GramMode>& modes, const std::vector<Operands>& all,
                             int64_t threads) {
  constexpr double kUneven = 1.05;
  std::vector<int64_t> cuts(modes.size());
  for (size_t i = 0; i < modes.size(); ++i) {
    cuts[i] = std::max<int64_t>((all[i].right.d + kLongestSide - 1) / kLongestSide, 1);
  }
  const auto can_be_cut = [&](const Tile& tile) {
    const auto mode = static_cast<size_t>(tile.mode);
    return !modes[mode].diagonal && all[mode].right.d / (cuts[mode] + 1) >= kLeastSide;
  };
  std::vector<Tile> tiles;
  for (;;) {
    tiles.clear();
    for (size_t i = 0; i < modes.size(); ++i) {
      cut(all[i].right, static_cast<int64_t>(i), modes[i].diagonal, cuts[i], tiles);
    }
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const Tile& a, const Tile& b) { return a.flops > b.flops; });
    if (imbalance(tiles, threads) <= kUneven) return tiles;
    const auto largest = std::find_if(tiles.begin(), tiles.end(), can_be_cut);
    if (largest == tiles.end()) return tiles;
    ++cuts[static_cast<size_t>(largest->mode)];
  }
}

// Whether a mode is large enough for bfloat16 products; the caller checks that they are allowed.
bool in_bfloat16(const GramMode& mode) {
  const int64_t d = mode.tensor.sizes[mode.mode];
  return blas::multiplies_bfloat16() && !mode.diagonal && d >= blas::kLeastRounded &&
         mode.tensor.count() >= blas::kLeastRounded * d;
}

// Calls use(In, T) with a zero of the type of a full mode's products and of its statistic.
template <typename Use>
auto with_types(const GramMode& mode, const Operands& of, const Use& use) {
  return with_state(mode.tensor.element, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, float>) {
      if (of.right.element == Element::kBFloat16 && in_bfloat16(mode)) return use(BFloat16{}, zero);
    }
    return use(zero, zero);
  });
}

// Statistics, split into tiles. The addresses of their tensors may be set later.
struct Plan {
  std::vector<GramMode> modes;
  std::vector<Operands> operands;
  std::vector<Tile> tiles;
  double flops = 0;  // of all tiles
  size_t bytes = 0;  // of workspace for all threads
};

// Plans the tiles of modes whose operands have these layouts, for this number of threads.
Plan plan_of(std::vector<GramMode> modes, std::vector<Operands> operands, int64_t threads) {
  Plan plan{std::move(modes), std::move(operands), {}};
  plan.tiles = cut_evenly(plan.modes, plan.operands, threads);
  for (const Tile& tile : plan.tiles) {
    plan.flops += tile.flops;
    const GramMode& mode = plan.modes[static_cast<size_t>(tile.mode)];
    const Operands& of = plan.operands[static_cast<size_t>(tile.mode)];
    size_t bytes = 0;
    if (mode.diagonal) {
      bytes = Scratch::bytes_of<double>(diagonal_workspace(of.right, tile));
    } else {
      bytes = with_types(mode, of, [&](auto in, auto zero) {
        using T = decltype(zero);
        const TileProduct product = product_of<decltype(in), T>(of, tile);
        return Scratch::bytes_of<T>(product.area + product.copied);
      });
    }
    plan.bytes = std::max(plan.bytes, bytes);
  }
  plan.bytes *= static_cast<size_t>(plan.flops < kParallelFlops ? 1 : threads);
  return plan;
}

// S <- decay S + (1 - decay) times the Gram matrix, for all statistics of a plan. `memory` has
// plan.bytes bytes.
void update(const Plan& plan, double decay, Scratch memory) {
  const auto count = static_cast<int64_t>(plan.tiles.size());
  run_tasks(count, plan.flops, memory, [&](int64_t task, Scratch scratch) {
    const Tile& tile = plan.tiles[static_cast<size_t>(task)];
    const GramMode& mode = plan.modes[static_cast<size_t>(tile.mode)];
    const Operands& of = plan.operands[static_cast<size_t>(tile.mode)];
    with_types(mode, of, [&](auto in, auto zero) {
      using T = decltype(zero);
      if (mode.diagonal) return update_diagonal<T>(mode, of, tile, decay, scratch);
      update_tile<decltype(in), T>(mode, of, tile, decay, scratch);
    });
  });
}

// Whether a mode's float tensor is multiplied as a copy in bfloat16.
bool is_rounded(const GramMode& mode, bool rounded) {
  return rounded && mode.tensor.element == Element::kFloat && in_bfloat16(mode);
}

// A whitened Gram matrix of one mode of a tensor, and its plan.
struct WhitenedMode {
  TensorView tensor;
  std::vector<Factor> factors;  // the mode's own factor is ones
  Strides strides;              // of G and P, contiguous
  size_t mode;
  bool rounds;  // whether the Gram matrix rounds G and P to bfloat16
  Plan plan;
  size_t bytes;  // of workspace
};

template <typename T>
WhitenedMode plan_whitened(const WhitenedTensor& of, size_t mode, bool rounded, int64_t threads) {
  const TensorView& tensor = of.tensor;
  WhitenedMode result{tensor, of.factors, contiguous_strides(tensor), mode, false, {}, 0};
  result.factors[mode].diagonal = true;
  TensorView read{nullptr, kElement<T>, tensor.order, tensor.sizes, result.strides.data()};
  const GramMode gram{read, static_cast<int64_t>(mode), of.stats[mode], of.diagonal[mode]};
  result.rounds = is_rounded(gram, rounded);
  if (result.rounds) read.element = Element::kBFloat16;
  const Unfolding unfolding = unfold(read, static_cast<int64_t>(mode));
  result.plan = plan_of({gram}, {{unfolding, unfolding, false}}, threads);
  const int64_t count = tensor.count();
  const auto halves = Scratch::bytes_of<BFloat16>(result.rounds ? count : 0);
  // The chain's buffers are free again when the Gram matrix is computed.
  result.bytes = Scratch::bytes_of<T>(count) + Scratch::bytes_of<T>(tensor.sizes[mode]) +
                 Scratch::bytes_of<T>(copied_count<T>(tensor)) +
                 std::max(Scratch::bytes_of<T>(chain_scratch(result.factors, rounded)),
                          2 * halves + result.plan.bytes);
  return result;
}

template <typename T>
void update_whitened(WhitenedMode& of, double decay, bool rounded, Scratch scratch) {
  const int64_t count = of.tensor.count(), d = of.tensor.sizes[of.mode];
  T *product = scratch.take<T>(count), *ones = scratch.take<T>(d);
  T* copy = scratch.take<T>(copied_count<T>(of.tensor));
  std::fill_n(ones, d, T(1));
  of.factors[of.mode].data = ones;
  const T* tensor = contiguous_data(of.tensor, copy);
  Scratch buffers = scratch;
  chain_product(of.factors, tensor, T(1), T(0), product,
                buffers.take<T>(chain_scratch(of.factors, rounded)), rounded);
  const double trace = inner_product(tensor, product, count);
  GramMode& gram = of.plan.modes.front();
  gram.weight = trace <= 0 ? 0 : inner_product(tensor, tensor, count) / trace;
  // An infinite trace would give the weight 0, with which the BLAS does not read the product.
  if (std::isinf(trace)) gram.weight = std::numeric_limits<double>::quiet_NaN();
  Operands& operands = of.plan.operands.front();
  operands.left.data = product;
  operands.right.data = tensor;
  if constexpr (std::is_same_v<T, float>) {
    for (Unfolding* operand : {&operands.left, &operands.right}) {
      if (!of.rounds) continue;
      auto* halves = scratch.take<BFloat16>(count);
      round_all(static_cast<const float*>(operand->data), count, halves);
      operand->data = halves;
    }
  }
  update(of.plan, decay, scratch);
}

}  // namespace

void gram_ema(const std::vector<GramMode>& modes, double decay, bool rounded) {
  if (decay == 1) return;
  blas::use_one_thread_per_call();
  // The modes of a tensor are neighbours in the list, and share one copy.
  int64_t count = 0;
  const int64_t* last = nullptr;
  for (const GramMode& mode : modes) {
    if (!is_rounded(mode, rounded) || mode.tensor.sizes == last) continue;
    count += mode.tensor.count();
    last = mode.tensor.sizes;
  }
  const Workspace copies(Scratch::bytes_of<BFloat16>(count));
  auto* memory = copies.all().take<BFloat16>(count);
  std::vector<Operands> operands;
  operands.reserve(modes.size());
  TensorView copy{};
  Strides strides;
  last = nullptr;
  for (const GramMode& mode : modes) {
    TensorView tensor = mode.tensor;
    if (is_rounded(mode, rounded)) {
      if (tensor.sizes != last) {
        copy = rounded_copy(tensor, strides, memory);
        memory += tensor.count();
        last = tensor.sizes;
      }
      tensor = copy;
    }
    const Unfolding unfolding = unfold(tensor, mode.mode);
    operands.push_back({unfolding, unfolding, true});
  }
  const Plan plan = plan_of(modes, std::move(operands), parallelism());
  const Workspace workspace(plan.bytes);
  update(plan, decay, workspace.all());
}

void whitened_gram_ema(const std::vector<WhitenedTensor>& tensors, double decay, bool rounded) {
  if (decay == 1) return;
  blas::use_one_thread_per_call();
  std::vector<std::pair<const WhitenedTensor*, size_t>> modes;
  std::vector<double> flops;
  for (const WhitenedTensor& of : tensors) {
    for (size_t i = 0; i < of.factors.size(); ++i) {
      modes.emplace_back(&of, i);
      flops.push_back(chain_flops(of.factors));
    }
  }
  const Order order = order_by_cost(flops);
  std::vector<WhitenedMode> whitened(modes.size());
  const auto plan = [&](const std::vector<size_t>& tasks, int64_t threads) {
    for (const size_t i : tasks) {
      const auto& [of, mode] = modes[i];
      whitened[i] = with_state(of->tensor.element, [&, of = of, mode = mode](auto zero) {
        return plan_whitened<decltype(zero)>(*of, mode, rounded, threads);
      });
    }
  };
  plan(order.large, parallelism());
  plan(order.rest, 1);
  run_in_order(
      order, [&](size_t i) { return whitened[i].bytes; },
      [&](size_t i, Scratch scratch) {
        with_state(whitened[i].tensor.element, [&](auto zero) {
          update_whitened<decltype(zero)>(whitened[i], decay, rounded, scratch);
        });
      });
}

}  // namespace tnt
