#pragma once
#include "../native/gemm.h"

namespace inkling {
namespace routing {

// What an expert is chosen by; NaN loses to every number and is still a valid choice.
inline float choice_score(float logit, float bias) {
  float score = sigmoid(logit) + bias;
  return score != score ? -std::numeric_limits<float>::infinity() : score;
}

// The `count` best of `scores`, highest first, ties to the lower index. Each is the best of those
// that stand after the one before in this order.
inline void choose(const float* scores, int64_t experts, int64_t count, int32_t* chosen) {
  int64_t last = -1;
  for (int64_t i = 0; i < count; i++) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++) {
      bool after = last < 0 || scores[e] < scores[last] || (scores[e] == scores[last] && e > last);
      if (after && (best < 0 || scores[e] > scores[best])) best = e;
    }
    chosen[i] = last = best;
  }
}

inline float log_sigmoid(float x) { return (x < 0 ? x : 0.0f) - std::log1p(std::exp(-std::fabs(x))); }

// weights = scale * softmax(log_sigmoid(logits of the chosen)).
inline void weigh(const float* logits, const int32_t* chosen, int64_t count, float scale, float* weights) {
  float maximum = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t i = 0; i < count; i++) {
    weights[i] = log_sigmoid(logits[chosen[i]]);
    maximum = weights[i] > maximum ? weights[i] : maximum;
  }
  for (int64_t i = 0; i < count; i++) sum += weights[i] = std::exp(weights[i] - maximum);
  for (int64_t i = 0; i < count; i++) weights[i] = weights[i] / sum * scale;
}

}  // namespace routing

inline std::tuple<Tensor, Tensor, Tensor> router(const Tensor& y, const Tensor& gate_weight, const Tensor& gate_bias,
                                                 const Tensor& gate_scale, const Tensor& starts, int64_t top_k,
                                                 int64_t shared, double route_scale) {
  int64_t tokens = y.size(0), depth = y.size(1), all = gate_weight.size(0), routed = gate_bias.size(0);
  int64_t slots = top_k + shared, live = data<int32_t>(starts)[starts.size(0) - 1];
  STD_TORCH_CHECK(routed + shared == all && top_k <= routed, "a gate of ", all, " rows, not ", routed, " + ", shared);
  Tensor experts = make(ScalarType::Int, {tokens, slots}), weights = make(ScalarType::Float, {tokens, slots});
  Tensor places = make(ScalarType::Char, {tokens, routed});
  std::vector<float> logits(live * all), scores(routed);
  by_dtype(y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    gemm::multiply(data<T>(y), live, gemm::Weight<T>{data<T>(gate_weight), all, depth}, logits.data());
  });
  int32_t* chosen = data<int32_t>(experts);
  float *weight = data<float>(weights), scale = static_cast<float>(route_scale) * *data<float>(gate_scale);
  const float* bias = data<float>(gate_bias);
  int8_t* place = data<int8_t>(places);
  std::fill(place, place + tokens * routed, int8_t{0});
  for (int64_t t = 0; t < live; t++) {
    const float* of_token = logits.data() + t * all;
    for (int64_t e = 0; e < routed; e++) scores[e] = routing::choice_score(of_token[e], bias[e]);
    routing::choose(scores.data(), routed, top_k, chosen + t * slots);
    for (int64_t j = 0; j < top_k; j++) place[t * routed + chosen[t * slots + j]] = static_cast<int8_t>(j + 1);
    for (int64_t j = 0; j < shared; j++) chosen[t * slots + top_k + j] = routed + j;
    routing::weigh(of_token, chosen + t * slots, slots, scale, weight + t * slots);
  }
  std::fill(chosen + live * slots, chosen + tokens * slots, 0);
  std::fill(weight + live * slots, weight + tokens * slots, 0.0f);
  return {experts, weights, places};
}

}  // namespace inkling
