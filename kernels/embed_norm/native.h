#pragma once
#include "../rmsnorm/native.h"

namespace inkling {

inline Tensor embed_norm(const Tensor& tokens, const Tensor& table, const Tensor& weight, const Tensor&, const Tensor&,
                         double eps, int64_t world) {
  STD_TORCH_CHECK(world == 1, "embed_norm holds the whole vocabulary, not a share of ", world);
  int64_t count = tokens.size(0), width = table.size(1);
  Tensor hidden = make(table.scalar_type(), {count, width});
  by_dtype(table, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t t = 0; t < count; t++) {
      int64_t token = data<int32_t>(tokens)[t];
      STD_TORCH_CHECK(token >= 0 && token < table.size(0), "token ", token, " has no embedding");
      rmsnorm_row(data<T>(table) + token * width, data<T>(weight), data<T>(hidden) + t * width, width, eps);
    }
  });
  return hidden;
}

}  // namespace inkling
