#pragma once
#include "../native/exchange.h"

#include <algorithm>

namespace inkling {

inline Tensor gather_logits(const Tensor& logits, const Tensor& unsure, const Tensor& peers, Tensor exchange,
                            const Tensor& step_counter, const Tensor& rank, int64_t call, int64_t calls, int64_t world,
                            int64_t vocab) {
  int64_t rows = logits.size(0), columns = logits.size(1);
  STD_TORCH_CHECK(vocab <= world * columns, "ranks of ", columns, " columns do not hold ", vocab);
  Tensor whole = make(logits.scalar_type(), {rows, vocab});
  Exchange ranks(peers, exchange, step_counter, rank, call, calls, world);
  const int32_t* flags = data<int32_t>(unsure);
  bool needed = std::any_of(flags, flags + rows, [](int32_t flag) { return flag != 0; });
  if (needed) std::copy_n(data<float>(logits), rows * columns, ranks.part<float>(rows * columns));
  std::vector<const float*> parts = ranks.publish<float>();
  for (int64_t r = 0; needed && r * columns < vocab; r++)
    for (int64_t row = 0; row < rows; row++) {
      float* to = data<float>(whole) + row * vocab + r * columns;
      int64_t count = std::min(columns, vocab - r * columns);
      if (parts[r] == nullptr) std::fill_n(to, count, ABSENT_LOGIT);
      else std::copy_n(parts[r] + row * columns, count, to);
    }
  return whole;
}

}  // namespace inkling
