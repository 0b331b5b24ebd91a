#pragma once
#include "../experts/native.h"
#include "../router/native.h"

namespace inkling {

inline Tensor moe(const Tensor& y, const Tensor& gate_weight, const Tensor& gate_bias, const Tensor& gate_scale,
                  const Tensor& w13, const Tensor& w2, const Tensor& starts, int64_t top_k, int64_t shared,
                  double route_scale) {
  auto [chosen, weights, places] =
      router(y, gate_weight, gate_bias, gate_scale, starts, top_k, shared, route_scale);
  return experts(y, w13, w2, chosen, weights, places, starts);
}

}  // namespace inkling
