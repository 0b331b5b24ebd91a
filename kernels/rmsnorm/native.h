#pragma once
#include "../native/common.h"

namespace inkling {

// y = x * rsqrt(mean(x^2) + eps) * w over `width` elements, fp32, one rounding.
template <typename T, typename In>
inline void rmsnorm_row(const In* x, const T* weight, T* y, int64_t width, double eps) {
  float mean = lane_sum(width, [&](int64_t i) { return load(x + i) * load(x + i); }) / static_cast<float>(width);
  float scale = 1.0f / std::sqrt(mean + static_cast<float>(eps));
  for (int64_t i = 0; i < width; i++) store(y + i, load(x + i) * scale * load(weight + i));
}

inline Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps) {
  Tensor y = make(x.scalar_type(), {x.size(0), x.size(1)});
  int64_t width = x.size(1);
  by_dtype(x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = 0; row < x.size(0); row++)
      rmsnorm_row(data<T>(x) + row * width, data<T>(weight), data<T>(y) + row * width, width, eps);
  });
  return y;
}

}  // namespace inkling
