#pragma once
#include "../native/exchange.h"
#include "../rmsnorm/native.h"

#include <algorithm>

namespace inkling {

// Embeddings of a step's tokens: rows of the own table, or what the rank that has them gives.
template <typename T>
class Embedded {
 public:
  // token(t), t < count, are ids; with several ranks this is their exchange.
  template <typename Token>
  Embedded(const Tensor& table, int64_t count, Token token, const Tensor& peers, const Tensor& exchange,
           const Tensor& step_counter, const Tensor& rank, int64_t call, int64_t calls, int64_t world)
      : table_(data<T>(table)), vocab_(table.size(0)), width_(table.size(1)) {
    for (int64_t t = 0; t < count; t++) {
      int64_t id = token(t);
      STD_TORCH_CHECK(0 <= id && id < world * vocab_, "token ", id, " has no embedding");
    }
    if (world == 1) return;
    zeros_.resize(width_);
    Exchange ranks(peers, exchange, step_counter, rank, call, calls, world);
    T* part = ranks.part<T>(count * width_);
    for (int64_t t = 0; t < count; t++) {
      bool held = token(t) / vocab_ == data<int32_t>(rank)[0];
      const T* from = held ? table_ + token(t) % vocab_ * width_ : zeros_.data();
      std::copy_n(from, width_, part + t * width_);
    }
    parts_ = ranks.publish<T>();
  }

  // The embedding [width] of token number t, whose id is `token`.
  const T* row(int64_t t, int64_t token) const {
    if (parts_.empty()) return table_ + token * width_;
    const T* given = parts_[token / vocab_];
    return given == nullptr ? zeros_.data() : given + t * width_;
  }

 private:
  const T* table_;
  int64_t vocab_, width_;
  std::vector<T> zeros_;
  std::vector<const T*> parts_;
};

inline Tensor embed_norm(const Tensor& tokens, const Tensor& table, const Tensor& weight, const Tensor& peers,
                         Tensor exchange, const Tensor& step_counter, const Tensor& rank, int64_t call, int64_t calls,
                         double eps, int64_t world) {
  int64_t count = tokens.size(0), width = table.size(1);
  Tensor hidden = make(table.scalar_type(), {count, width});
  by_dtype(table, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int32_t* ids = data<int32_t>(tokens);
    auto token = [&](int64_t t) { return ids[t]; };
    Embedded<T> embedded(table, count, token, peers, exchange, step_counter, rank, call, calls, world);
    for (int64_t t = 0; t < count; t++)
      rmsnorm_row(embedded.row(t, ids[t]), data<T>(weight), data<T>(hidden) + t * width, width, eps);
  });
  return hidden;
}

}  // namespace inkling
