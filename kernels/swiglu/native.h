#pragma once
#include "../native/common.h"

namespace inkling {

// y = silu(gate) * up * scale over `width` elements, fp32, one rounding.
template <typename T>
inline void swiglu_row(const T* gate, const T* up, float scale, T* __restrict y, int64_t width) {
  for (int64_t i = 0; i < width; i++) store(y + i, silu(load(gate + i)) * load(up + i) * scale);
}

inline Tensor swiglu(const Tensor& x, const Tensor& scale) {
  int64_t rows = x.size(0), width = x.size(1) / 2;
  Tensor y = make(x.scalar_type(), {rows, width});
  by_dtype(x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    float factor = *data<float>(scale);
    const T* gate = data<T>(x);
    T* out = data<T>(y);
    for (int64_t row = 0; row < rows; row++, gate += 2 * width, out += width)
      swiglu_row(gate, gate + width, factor, out, width);
  });
  return y;
}

}  // namespace inkling
