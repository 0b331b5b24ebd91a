// y = x @ weight^T for weights stored [columns, depth], with the same bits for any number of rows.
//
// One order of summation defines every output element: lane c (of 16) sums the terms k = c, c+16,
// c+32, ... one after another; then lanes are added in halves (c and c+8, then +4, +2, +1). Two
// forms compute exactly that:
//   * dot: vectors run along depth and are folded at the end; weights are read once, in place, so
//     a few rows cost little more than the memory traffic;
//   * panel: weights are transposed into panels whose vectors run along columns, and lanes follow
//     one another; packing pays from some rows on.
#pragma once
#include "vector.h"

#include <algorithm>
#include <array>
#include <memory>

namespace inkling::gemm {

// Rows of floats, `stride` apart, zero from their width up to a multiple of LANES.
struct Rows {
  const float* data;
  int64_t stride;
  Rows from(int64_t row) const { return {data + row * stride, stride}; }
};

// Memory for `count` rows of `width` floats.
class RowBuffer {
 public:
  RowBuffer(int64_t count, int64_t width)
      : width_(width), stride_((width + LANES - 1) / LANES * LANES), memory_(new vec[count * stride_ / WIDTH]) {}

  // Sets a row to f(i) for i < width.
  template <typename F>
  void fill(int64_t row, F f) {
    float* to = reinterpret_cast<float*>(memory_.get()) + row * stride_;
    for (int64_t i = 0; i < width_; i++) to[i] = f(i);
    std::fill(to + width_, to + stride_, 0.0f);
  }

  template <typename T>
  void copy(int64_t row, const T* from) {
    fill(row, [&](int64_t i) { return load(from + i); });
  }

  Rows rows() const { return {reinterpret_cast<const float*>(memory_.get()), stride_}; }

 private:
  int64_t width_, stride_;
  std::unique_ptr<vec[]> memory_;
};

template <typename W>
struct Weight {
  const W* data;
  int64_t columns, depth;
  // Columns past the last one repeat it; what they give is not stored.
  const W* column(int64_t n) const { return data + std::min(n, columns - 1) * depth; }
};

// The order in which lanes are added in halves: 0 8 4 12 2 10 6 14 1 9 ... (its own inverse).
constexpr auto LANE_ORDER = [] {
  std::array<int, LANES> order{};
  for (int lane = 0; lane < LANES; lane++)
    for (int bit = 1; bit < LANES; bit *= 2) order[lane] = order[lane] * 2 + lane / bit % 2;
  return order;
}();

// Adds COUNT arrays of SUMS vectors in halves, given in LANE_ORDER: like the digits of a binary
// counter, a sum waits at its level for its neighbour; the last level ends with the total.
template <int SUMS, int COUNT>
struct LaneTree {
  static constexpr int LEVELS = std::bit_width(static_cast<unsigned>(COUNT));
  vec waiting[LEVELS][SUMS];

  void add(int index, const vec (&sums)[SUMS]) {
    vec carried[SUMS];
    std::copy_n(sums, SUMS, carried);
    int level = 0;
    for (; index >> level & 1; level++)
      for (int i = 0; i < SUMS; i++) carried[i] = waiting[level][i] + carried[i];
    std::copy_n(carried, SUMS, waiting[level]);
  }

  vec* total() { return waiting[LEVELS - 1]; }
};

// Adds to `lanes` the WIDTH lanes from `part` on of ROWS x COLUMNS outputs, row-major.
template <int ROWS, int COLUMNS, typename W>
inline void dot_lanes(Rows x, const W* const* w, int64_t depth, int part, vec (&lanes)[WIDTH]) {
  auto step = [&](int64_t k, auto load_weight) {
    vec columns[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) columns[j] = load_weight(w[j] + k);
    for (int i = 0; i < ROWS; i++) {
      vec row = load_vec(x.data + i * x.stride + k);
      for (int j = 0; j < COLUMNS; j++)
        lanes[i * COLUMNS + j] = multiply_add(row, columns[j], lanes[i * COLUMNS + j]);
    }
  };
  int64_t k = part;
  for (; k + WIDTH <= depth; k += LANES) step(k, [](const W* p) { return load_vec(p); });
  if (k < depth) step(k, [&](const W* p) { return load_vec(p, depth - k); });
}

// WIDTH outputs: ROWS rows by WIDTH / ROWS columns from `first` on, row-major.
template <int ROWS, typename W>
inline vec dot_block(Rows x, const Weight<W>& weight, int64_t first) {
  constexpr int COLUMNS = WIDTH / ROWS, PARTS = LANES / WIDTH;
  const W* w[COLUMNS];
  for (int j = 0; j < COLUMNS; j++) w[j] = weight.column(first + j);
  LaneTree<WIDTH, PARTS> tree;
  for (int part = 0; part < PARTS; part++) {
    vec lanes[WIDTH] = {};
    dot_lanes<ROWS, COLUMNS>(x, w, weight.depth, LANE_ORDER[part], lanes);
    tree.add(part, lanes);
  }
  return sum_rows(tree.total());
}

// ROWS rows of y, columns [first, last).
template <int ROWS, typename W, typename Out>
inline void dot_rows(Rows x, const Weight<W>& weight, int64_t first, int64_t last, Out* y) {
  constexpr int COLUMNS = WIDTH / ROWS;
  for (int64_t n = first; n < last; n += COLUMNS) {
    Out block[WIDTH];
    store_vec(block, dot_block<ROWS>(x, weight, n));
    for (int i = 0; i < ROWS; i++) {
      Out* row = y + i * weight.columns + n;
      if (n + COLUMNS <= last)  // a copy of constant size
        std::memcpy(row, block + i * COLUMNS, COLUMNS * sizeof(Out));
      else
        std::copy_n(block + i * COLUMNS, last - n, row);
    }
  }
}

template <typename W, typename Out>
void multiply_dot(Rows x, int64_t rows, const Weight<W>& weight, Out* y) {
  for (int64_t first = 0; first < weight.columns; first += LANES) {
    int64_t last = std::min(first + LANES, weight.columns), row = 0;
    auto blocks_of = [&]<int ROWS>() {
      for (; row + ROWS <= rows; row += ROWS)
        dot_rows<ROWS>(x.from(row), weight, first, last, y + row * weight.columns);
    };
    blocks_of.template operator()<4>();
    blocks_of.template operator()<2>();
    blocks_of.template operator()<1>();
  }
}

constexpr int PANEL = 2 * WIDTH;                   // columns of a panel
constexpr int PANEL_ROWS = WIDTH == 16 ? 8 : 6;    // rows of a block: its sums fill the registers
constexpr int64_t PANEL_FROM = 10;                 // rows from which packing pays

// The panel of columns `first`..: lane by lane in LANE_ORDER, term by term, PANEL columns each.
template <typename W>
inline void pack_panel(const Weight<W>& weight, int64_t first, int64_t terms, float* panel) {
  for (int half = 0; half < PANEL; half += WIDTH)
    for (int64_t k = 0; k < terms * LANES; k += WIDTH) {
      vec block[WIDTH];
      if (k + WIDTH <= weight.depth)
        for (int j = 0; j < WIDTH; j++) block[j] = load_vec(weight.column(first + half + j) + k);
      else
        for (int j = 0; j < WIDTH; j++)
          block[j] = load_vec(weight.column(first + half + j) + k, weight.depth - k);
      transpose(block);
      float* to = panel + k / LANES * PANEL + half;
      for (int i = 0; i < WIDTH; i++) store_vec(to + LANE_ORDER[k % LANES + i] * terms * PANEL, block[i]);
    }
}

// Adds to `sums` one lane of ROWS x PANEL outputs; x points to the lane's first term.
template <int ROWS>
inline void panel_lane(Rows x, const float* panel, int64_t terms, vec (&sums)[2 * ROWS]) {
  for (int64_t term = 0; term < terms; term++) {
    vec left = load_vec(panel + term * PANEL), right = load_vec(panel + term * PANEL + WIDTH);
    for (int i = 0; i < ROWS; i++) {
      vec value = broadcast(x.data[i * x.stride + term * LANES]);
      sums[2 * i] = multiply_add(value, left, sums[2 * i]);
      sums[2 * i + 1] = multiply_add(value, right, sums[2 * i + 1]);
    }
  }
}

// ROWS x PANEL outputs to y, of which `columns` are stored. Lanes go in pairs: a pair's sums meet
// in registers.
template <int ROWS, typename Out>
inline void panel_block(Rows x, const float* panel, int64_t terms, Out* y, int64_t stride, int64_t columns) {
  LaneTree<2 * ROWS, LANES / 2> tree;
  for (int pair = 0; pair < LANES / 2; pair++) {
    vec sums[2 * ROWS] = {}, neighbours[2 * ROWS] = {};
    auto lane = [&](int index, auto& target) {
      Rows terms_of_lane{x.data + LANE_ORDER[index], x.stride};
      panel_lane<ROWS>(terms_of_lane, panel + index * terms * PANEL, terms, target);
    };
    lane(2 * pair, sums);
    lane(2 * pair + 1, neighbours);
    for (int i = 0; i < 2 * ROWS; i++) sums[i] += neighbours[i];
    tree.add(pair, sums);
  }
  const vec* total = tree.total();
  for (int i = 0; i < ROWS; i++) {
    store_vec(y + i * stride, total[2 * i], columns);
    store_vec(y + i * stride + WIDTH, total[2 * i + 1], columns - WIDTH);
  }
}

template <typename W, typename Out>
void multiply_panel(Rows x, int64_t rows, const Weight<W>& weight, Out* y) {
  int64_t terms = (weight.depth + LANES - 1) / LANES;
  std::unique_ptr<vec[]> memory(new vec[terms * LANES * PANEL / WIDTH]);
  float* panel = reinterpret_cast<float*>(memory.get());
  for (int64_t first = 0; first < weight.columns; first += PANEL) {
    pack_panel(weight, first, terms, panel);
    int64_t row = 0;
    auto blocks_of = [&]<int ROWS>() {
      for (; row + ROWS <= rows; row += ROWS)
        panel_block<ROWS>(x.from(row), panel, terms, y + row * weight.columns + first, weight.columns,
                          weight.columns - first);
    };
    blocks_of.template operator()<PANEL_ROWS>();
    blocks_of.template operator()<2>();
    blocks_of.template operator()<1>();
  }
}

// y [rows, columns] = x [rows, depth] @ weight [columns, depth]^T, accumulated in fp32.
template <typename W, typename Out>
[[gnu::noinline]] void multiply(Rows x, int64_t rows, const Weight<W>& weight, Out* y) {
  if (rows >= PANEL_FROM && weight.columns >= PANEL)
    multiply_panel(x, rows, weight, y);
  else
    multiply_dot(x, rows, weight, y);
}

// The same for dense rows of any type, copied where they are not as `Rows` wants them.
template <typename T, typename Out>
void multiply(const T* x, int64_t rows, const Weight<T>& weight, Out* y) {
  if constexpr (std::is_same_v<T, float>)
    if (weight.depth % LANES == 0) return multiply(Rows{x, weight.depth}, rows, weight, y);
  RowBuffer buffer(rows, weight.depth);
  for (int64_t row = 0; row < rows; row++) buffer.copy(row, x + row * weight.depth);
  multiply(buffer.rows(), rows, weight, y);
}

}  // namespace inkling::gemm
