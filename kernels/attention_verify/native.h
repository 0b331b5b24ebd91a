#pragma once
#include "../attention_extend/native.h"

namespace inkling {

inline Tensor attention_verify(const Tensor& q, const Tensor& r, const Tensor& rel_proj, const Tensor& kv_pool,
                               const Tensor& page_table, const Tensor& slots, const Tensor& starts,
                               const Tensor& lengths, int64_t layer, int64_t window, int64_t first, int64_t most) {
  const int32_t* bounds = data<int32_t>(starts);
  for (int64_t row = 0; row < slots.size(0); row++)
    STD_TORCH_CHECK(bounds[row + 1] - bounds[row] <= most, "a row has more tokens than `most`");
  return attention_extend(q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window, first);
}

}  // namespace inkling
