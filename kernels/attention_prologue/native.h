#pragma once
#include "../native/conv.h"

namespace inkling {
namespace prologue {

// y = x * rsqrt(mean(x^2) + eps) * w * gain over one head, fp32, one rounding.
template <typename T>
inline void head_norm(const T* x, const T* weight, T* __restrict y, int64_t dim, float eps, float gain) {
  float mean = lane_sum(dim, [&](int64_t i) { return load(x + i) * load(x + i); }) / static_cast<float>(dim);
  float scale = 1.0f / std::sqrt(mean + eps);
  for (int64_t i = 0; i < dim; i++) store(y + i, load(x + i) * scale * load(weight + i) * gain);
}

// 1 + alpha * ln(max(1, (position + 1) / floor)); 1 without a floor.
inline float tau(int32_t position, int64_t floor, double alpha) {
  if (floor == 0) return 1.0f;
  float ratio = static_cast<float>(position + 1) / static_cast<float>(floor);
  return ratio > 1.0f ? 1.0f + static_cast<float>(alpha) * std::log(ratio) : 1.0f;
}

// One layer of a KV pool [pages, 2, kv_heads, page_size, dim].
template <typename T>
struct Pages {
  T* base;
  int64_t kv_heads, page_size, dim;

  Pages(const Tensor& pool, int64_t layer)
      : base(data<T>(pool) + layer * pool.stride(0)), kv_heads(pool.size(3)), page_size(pool.size(4)),
        dim(pool.size(5)) {}

  // k (part 0) or v (part 1) of a head at page * page_size + offset.
  T* at(int64_t location, int64_t part, int64_t head) const {
    int64_t plane = (location / page_size * 2 + part) * kv_heads + head;
    return base + (plane * page_size + location % page_size) * dim;
  }
};

// Rounds the convolved k | v of a token to T and writes them to the pages, k normalised.
template <typename T>
inline void write_kv(const float* kv, T* rounded, const T* k_norm, const Pages<T>& pages, int64_t location, float eps) {
  int64_t dim = pages.dim;
  for (int64_t c = 0; c < 2 * pages.kv_heads * dim; c++) store(rounded + c, kv[c]);
  for (int64_t head = 0; head < pages.kv_heads; head++) {
    head_norm(rounded + head * dim, k_norm, pages.at(location, 0, head), dim, eps, 1.0f);
    std::memcpy(pages.at(location, 1, head), rounded + (pages.kv_heads + head) * dim, dim * sizeof(T));
  }
}

}  // namespace prologue

inline std::tuple<Tensor, Tensor> attention_prologue(
    const Tensor& qkvr, const Tensor& kv_conv, const Tensor& q_norm, const Tensor& k_norm, Tensor kv_pool,
    Tensor conv_pool, const Tensor& positions, const Tensor&, const Tensor& locations, const Tensor& slots,
    const Tensor& sources, const Tensor& starts, const Tensor& lengths, const Tensor& destination_slots,
    const Tensor& destination_offsets, int64_t layer, int64_t heads, int64_t log_floor, double log_alpha, double eps) {
  int64_t tokens = qkvr.size(0), width = qkvr.size(1), kv_width = kv_conv.size(0), dim = q_norm.size(0);
  int64_t rel = (width - kv_width) / heads - dim;
  Tensor q = make(qkvr.scalar_type(), {tokens, heads, dim});
  Tensor r = make(ScalarType::Float, {tokens, heads, rel});
  StepRows rows(slots, sources, starts, lengths, destination_slots, destination_offsets);
  by_dtype(qkvr, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T *x = data<T>(qkvr), *q_weight = data<T>(q_norm), *k_weight = data<T>(k_norm);
    const int32_t* position = data<int32_t>(positions);
    const int64_t* location = data<int64_t>(locations);
    T* q_out = data<T>(q);
    float* r_out = data<float>(r);
    ShortConv<T> conv(x + heads * dim, width, kv_width, data<float>(kv_conv), conv_pool, layer, rows);
    prologue::Pages<T> pages(kv_pool, layer);
    std::vector<float> kv(kv_width);
    std::vector<T> rounded(kv_width);
    for (int64_t row = 0; row < rows.count; row++)
      for (int64_t t = rows.starts[row]; t < rows.starts[row + 1]; t++) {
        const T *queries = x + t * width, *relative = queries + heads * dim + kv_width;
        float tau = prologue::tau(position[t], log_floor, log_alpha);
        conv.token(row, t - rows.starts[row], kv.data());
        prologue::write_kv(kv.data(), rounded.data(), k_weight, pages, location[t], eps);
        for (int64_t i = 0; i < heads * dim; i += dim)
          prologue::head_norm(queries + i, q_weight, q_out + t * heads * dim + i, dim, eps, tau);
        for (int64_t i = 0; i < heads * rel; i++) r_out[t * heads * rel + i] = load(relative + i) * tau;
      }
    conv.store_inputs();
    int64_t live = rows.starts[rows.count];
    std::fill(q_out + live * heads * dim, q_out + tokens * heads * dim, T{});
    std::fill(r_out + live * heads * rel, r_out + tokens * heads * rel, 0.0f);
  });
  return {q, r};
}

}  // namespace inkling
