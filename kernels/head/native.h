#pragma once
#include "../native/gemm.h"

namespace inkling {

inline Tensor head(const Tensor& x, const Tensor& weight, const Tensor& sample_rows, const Tensor& emits, double scale,
                   int64_t vocab) {
  int64_t rows = sample_rows.size(0), depth = x.size(1);
  STD_TORCH_CHECK(vocab <= weight.size(0), "a vocabulary of ", vocab, " in a head of ", weight.size(0));
  std::vector<int64_t> emitting;
  for (int64_t row = 0; row < rows; row++)
    if (data<int32_t>(emits)[row]) emitting.push_back(row);
  int64_t count = emitting.size();
  Tensor logits = make(ScalarType::Float, {rows, vocab});
  float* out = data<float>(logits);
  by_dtype(x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    gemm::RowBuffer sampled(count, depth);
    for (int64_t i = 0; i < count; i++)
      sampled.copy(i, data<T>(x) + data<int32_t>(sample_rows)[emitting[i]] * depth);
    gemm::multiply(sampled.rows(), count, gemm::Weight<T>{data<T>(weight), vocab, depth}, out);
  });
  // The products stand in the first `count` rows; from the last one on each moves to its own.
  for (int64_t row = rows - 1, i = count; row >= 0; row--) {
    float* to = out + row * vocab;
    if (i == 0 || emitting[i - 1] != row) {
      std::fill_n(to, vocab, 0.0f);
    } else {
      const float* from = out + --i * vocab;
      for (int64_t token = 0; token < vocab; token++) to[token] = from[token] * static_cast<float>(scale);
    }
  }
  return logits;
}

}  // namespace inkling
