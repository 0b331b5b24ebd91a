#pragma once
#include "../native/gemm.h"

namespace inkling {

inline Tensor linear(const Tensor& x, const Tensor& weight) {
  int64_t rows = x.size(0), depth = x.size(1), columns = weight.size(0);
  Tensor y = make(x.scalar_type(), {rows, columns});
  by_dtype(x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    gemm::multiply(data<T>(x), rows, gemm::Weight<T>{data<T>(weight), columns, depth}, data<T>(y));
  });
  return y;
}

}  // namespace inkling
