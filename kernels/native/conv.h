// The short convolution with its ring of inputs (see `_conv.py`): z = three old inputs ++ new ones.
//
// The old inputs of all rows are copied before anything is written, so rows, sources and
// destinations may name each other's slots.
#pragma once
#include "common.h"

#include <algorithm>

namespace inkling {

constexpr int64_t TAPS = 4;
constexpr int64_t WINDOW = TAPS - 1;

// What step_metadata says of a step's rows; tokens from starts[count] on are padding.
struct StepRows {
  int64_t count, destinations;
  const int32_t *slots, *sources, *starts, *lengths, *destination_slots, *destination_offsets;

  StepRows(const Tensor& slots, const Tensor& sources, const Tensor& starts, const Tensor& lengths,
           const Tensor& destination_slots, const Tensor& destination_offsets)
      : count(slots.size(0)), destinations(destination_slots.size(1)), slots(data<int32_t>(slots)),
        sources(data<int32_t>(sources)), starts(data<int32_t>(starts)), lengths(data<int32_t>(lengths)),
        destination_slots(data<int32_t>(destination_slots)),
        destination_offsets(data<int32_t>(destination_offsets)) {}

  int64_t tokens(int64_t row) const { return starts[row + 1] - starts[row]; }
};

// y = z3 + sum_j tap_j * z_j over `width` channels, fp32, in this order; taps [4, width].
template <typename T>
[[gnu::noinline]] void convolve_token(const T* z0, const T* z1, const T* z2, const T* z3, const float* taps,
                                      int64_t width, float* __restrict y) {
  for (int64_t c = 0; c < width; c++) {
    float sum = load(z3 + c) + taps[c] * load(z0 + c);
    sum += taps[width + c] * load(z1 + c);
    sum += taps[2 * width + c] * load(z2 + c);
    y[c] = sum + taps[3 * width + c] * load(z3 + c);
  }
}

// One convolution over a step: inputs of token t at input + t * stride, rings of one layer in `pool`.
template <typename T>
class ShortConv {
 public:
  ShortConv(const T* input, int64_t stride, int64_t width, const float* weight, const Tensor& pool, int64_t layer,
            const StepRows& rows)
      : input_(input), stride_(stride), width_(width), ring_(pool.size(2)),
        pool_(data<T>(pool) + layer * pool.stride(0)), rows_(rows), old_(rows.count * WINDOW * width),
        taps_(TAPS * width), zeros_(width) {
    for (int64_t c = 0; c < width; c++)
      for (int64_t tap = 0; tap < TAPS; tap++) taps_[tap * width + c] = weight[c * TAPS + tap];
    for (int64_t row = 0; row < rows.count; row++)
      for (int64_t i = rows.tokens(row) > 0 ? masked(row) : WINDOW; i < WINDOW; i++)
        copy(&old_[(row * WINDOW + i) * width], entry(rows.sources[row], row, i));
  }

  // y of the row's i-th token.
  void token(int64_t row, int64_t i, float* y) const {
    convolve_token(z(row, i), z(row, i + 1), z(row, i + 2), z(row, i + 3), taps_.data(), width_, y);
  }

  // y of padded token t: no history.
  void padded_token(int64_t t, float* y) const {
    const T* none = zeros_.data();
    convolve_token(none, none, none, input_ + t * stride_, taps_.data(), width_, y);
  }

  // Writes what every live row leaves and its snapshots.
  void store_inputs() const {
    for (int64_t row = 0; row < rows_.count; row++) {
      int64_t slot = rows_.slots[row], end = WINDOW + rows_.tokens(row);
      if (end > WINDOW) keep(slot, row, std::max(slot == rows_.sources[row] ? WINDOW : 0, end - ring_), end);
      for (int64_t j = row * rows_.destinations; j < (row + 1) * rows_.destinations; j++) {
        int64_t offset = rows_.destination_offsets[j];
        if (rows_.destination_slots[j] != 0) keep(rows_.destination_slots[j], row, offset, offset + WINDOW);
      }
    }
  }

 private:
  // The row's z[index]: the old inputs at 0..2, then its own.
  const T* z(int64_t row, int64_t index) const {
    if (index < WINDOW) return &old_[(row * WINDOW + index) * width_];
    return input_ + (rows_.starts[row] + index - WINDOW) * stride_;
  }

  // How many of the row's z lie before position 0.
  int64_t masked(int64_t row) const { return std::max<int64_t>(WINDOW - rows_.lengths[row], 0); }

  // Where the row's z[index] lies in the ring of `slot`.
  T* entry(int64_t slot, int64_t row, int64_t index) const {
    return pool_ + (slot * ring_ + (rows_.lengths[row] + index - WINDOW) % ring_) * width_;
  }

  void copy(T* to, const T* from) const { std::memcpy(to, from, width_ * sizeof(T)); }

  void keep(int64_t slot, int64_t row, int64_t first, int64_t end) const {
    for (int64_t i = std::max(first, masked(row)); i < end; i++) copy(entry(slot, row, i), z(row, i));
  }

  const T* input_;
  int64_t stride_, width_, ring_;
  T* pool_;
  const StepRows& rows_;
  std::vector<T> old_;
  std::vector<float> taps_;
  std::vector<T> zeros_;
};

}  // namespace inkling
