#pragma once
#include "../attention_extend/native.h"
#include "../attention_prologue/native.h"

namespace inkling {

inline Tensor attention_decode(const Tensor& qkvr, const Tensor& kv_conv, const Tensor& q_norm, const Tensor& k_norm,
                               Tensor kv_pool, Tensor conv_pool, const Tensor& positions, const Tensor& token_rows,
                               const Tensor& locations, const Tensor& slots, const Tensor& sources,
                               const Tensor& starts, const Tensor& lengths, const Tensor& destination_slots,
                               const Tensor& destination_offsets, const Tensor& rel_proj, const Tensor& page_table,
                               int64_t layer, int64_t heads, int64_t window, int64_t log_floor, double log_alpha,
                               double eps) {
  const int32_t* bounds = data<int32_t>(starts);
  for (int64_t row = 0; row < slots.size(0); row++)
    STD_TORCH_CHECK(bounds[row + 1] - bounds[row] <= 1, "a decode row has at most one token");
  auto [q, r] = attention_prologue(qkvr, kv_conv, q_norm, k_norm, kv_pool, conv_pool, positions, token_rows, locations,
                                   slots, sources, starts, lengths, destination_slots, destination_offsets, layer,
                                   heads, log_floor, log_alpha, eps);
  return attention_extend(q, r, rel_proj, kv_pool, page_table, slots, starts, lengths, layer, window, 0);
}

}  // namespace inkling
