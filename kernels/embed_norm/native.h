#pragma once
#include "../rmsnorm/native.h"

namespace inkling {

inline Tensor embed_norm(const Tensor& tokens, const Tensor& table, const Tensor& weight, const Tensor&, const Tensor&,
                         double eps, int64_t world) {
  STD_TORCH_CHECK(world == 1, "embed_norm holds the whole vocabulary, not a share of ", world);
  int64_t count = tokens.size(0), vocab = table.size(0), width = table.size(1);
  Tensor hidden = make(table.scalar_type(), {count, width});
  by_dtype(table, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int32_t* ids = data<int32_t>(tokens);
    const T *rows = data<T>(table), *gain = data<T>(weight);
    T* out = data<T>(hidden);
    for (int64_t t = 0; t < count; t++) {
      STD_TORCH_CHECK(ids[t] >= 0 && ids[t] < vocab, "token ", ids[t], " has no embedding");
      rmsnorm_row(rows + ids[t] * width, gain, out + t * width, width, eps);
    }
  });
  return hidden;
}

}  // namespace inkling
