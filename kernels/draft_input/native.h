#pragma once
#include "../embed_norm/native.h"

namespace inkling {

inline Tensor draft_input(const Tensor& hidden, const Tensor& ids, const Tensor& table, const Tensor& embed_norm,
                          const Tensor& hidden_norm, const Tensor& token_norm, const Tensor& token_rows,
                          const Tensor& starts, const Tensor& peers, Tensor exchange, const Tensor& step_counter,
                          const Tensor& rank, int64_t depth, int64_t drafts, int64_t call, int64_t calls, double eps,
                          int64_t world, bool backbone_norm) {
  int64_t count = hidden.size(0), width = hidden.size(1);
  int64_t live = data<int32_t>(starts)[starts.size(0) - 1];
  Tensor z = make(hidden.scalar_type(), {count, 2 * width});
  by_dtype(hidden, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* out = data<T>(z);
    std::vector<T> known(width);  // normed
    auto token = [&](int64_t i) { return data<int32_t>(ids)[i + data<int32_t>(token_rows)[i] * drafts + depth]; };
    Embedded<T> embedded(table, live, token, peers, exchange, step_counter, rank, call, calls, world);
    for (int64_t i = 0; i < live; i++) {
      const T* embedding = embedded.row(i, token(i));
      if (backbone_norm) {
        rmsnorm_row(embedding, data<T>(embed_norm), known.data(), width, eps);
        embedding = known.data();
      }
      rmsnorm_row(data<T>(hidden) + i * width, data<T>(hidden_norm), out + 2 * i * width, width, eps);
      rmsnorm_row(embedding, data<T>(token_norm), out + (2 * i + 1) * width, width, eps);
    }
    std::fill(out + 2 * live * width, out + 2 * count * width, T{});
  });
  return z;
}

}  // namespace inkling
