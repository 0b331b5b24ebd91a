#pragma once
#include "../rmsnorm/native.h"

namespace inkling {

inline Tensor embed_norm(const Tensor& tokens, const Tensor& table, const Tensor& weight, const Tensor&, const Tensor& rank,
                         double eps, int64_t world) {
  int64_t count = tokens.size(0), vocab = table.size(0), width = table.size(1);
  Tensor hidden = make(table.scalar_type(), {count, width});
  by_dtype(table, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int32_t* ids = data<int32_t>(tokens);
    const T *rows = data<T>(table), *gain = data<T>(weight);
    T* out = data<T>(hidden);
    std::vector<T> zeros(width);  // of another rank's token
    int64_t first = world > 1 ? data<int32_t>(rank)[0] * vocab : 0;
    for (int64_t t = 0; t < count; t++) {
      int64_t own = ids[t] - first;
      bool held = own >= 0 && own < vocab;
      STD_TORCH_CHECK(held || world > 1, "token ", ids[t], " has no embedding");
      rmsnorm_row(held ? rows + own * width : zeros.data(), gain, out + t * width, width, eps);
    }
  });
  return hidden;
}

}  // namespace inkling
