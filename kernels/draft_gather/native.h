#pragma once
#include "../native/common.h"

#include <algorithm>

namespace inkling {

inline Tensor draft_gather(const Tensor& hidden, const Tensor& draft_hidden, const Tensor& token_rows,
                           const Tensor& hidden_rows, const Tensor& sources, const Tensor& starts) {
  int64_t count = token_rows.size(0), tokens = hidden.size(0), width = hidden.size(1), drafts = draft_hidden.size(1);
  int64_t live = data<int32_t>(starts)[sources.size(0)];
  Tensor gathered = make(hidden.scalar_type(), {count, width});
  by_dtype(hidden, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* out = data<T>(gathered);
    for (int64_t i = 0; i < live; i++) {
      int64_t from = data<int32_t>(hidden_rows)[i], slot = data<int32_t>(sources)[data<int32_t>(token_rows)[i]];
      const T* row = data<T>(hidden) + from * width;
      if (from >= tokens) row = data<T>(draft_hidden) + (slot * drafts + from - tokens) * width;
      std::copy_n(row, width, out + i * width);
    }
    std::fill(out + live * width, out + count * width, T{});
  });
  return gathered;
}

}  // namespace inkling
