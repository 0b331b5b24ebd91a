#pragma once
#include "../native/gemm.h"

namespace inkling {
namespace mixture {

// One expert's MLP over `count` gathered rows: out [count, hidden] fp32. silu(g) * u is rounded to T.
template <typename T>
inline void run_expert(gemm::Rows rows, int64_t count, gemm::Weight<T> w13, gemm::Weight<T> w2, float* gate_up,
                       gemm::RowBuffer& activation, float* out) {
  gemm::multiply(rows, count, w13, gate_up);
  for (int64_t i = 0; i < count; i++) {
    const float *gate = gate_up + i * w13.columns, *up = gate + w2.depth;
    activation.fill(i, [&](int64_t c) {
      T rounded;
      store(&rounded, silu(gate[c]) * up[c]);
      return load(&rounded);
    });
  }
  gemm::multiply(activation.rows(), count, w2, out);
}

// y = sum over j of weights[j] * down[place[j]], in this order, fp32, one rounding.
template <typename T>
inline void combine(const float* down, const float* weights, const int32_t* places, int64_t slots, int64_t hidden,
                    float* sum, T* y) {
  std::fill_n(sum, hidden, 0.0f);
  for (int64_t j = 0; j < slots; j++) {
    const float *term = down + places[j] * hidden, weight = weights[j];
    for (int64_t c = 0; c < hidden; c++) sum[c] = multiply_add(weight, term[c], sum[c]);
  }
  for (int64_t c = 0; c < hidden; c++) store(y + c, sum[c]);
}

// Assignments [0, count) grouped by expert, ascending within one; offsets [experts + 1].
inline void group(const int32_t* expert_of, int64_t count, int64_t experts, int32_t* order, int32_t* offsets) {
  std::fill_n(offsets, experts + 1, 0);
  for (int64_t a = 0; a < count; a++)
    STD_TORCH_CHECK(0 <= expert_of[a] && expert_of[a] < experts, "expert ", expert_of[a], " of ", experts);
  for (int64_t a = 0; a < count; a++) offsets[expert_of[a] + 1]++;
  for (int64_t e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
  std::vector<int32_t> next(offsets, offsets + experts);
  for (int64_t a = 0; a < count; a++) order[next[expert_of[a]]++] = a;
}

}  // namespace mixture

inline Tensor experts(const Tensor& y, const Tensor& w13, const Tensor& w2, const Tensor& chosen, const Tensor& weights,
                      const Tensor&, const Tensor& starts) {
  int64_t tokens = y.size(0), hidden = y.size(1), count = w2.size(0), width = w2.size(2), slots = weights.size(1);
  int64_t assigned = data<int32_t>(starts)[starts.size(0) - 1] * slots, most = 0;
  std::vector<int32_t> assignments(assigned), bounds(count + 1);
  mixture::group(data<int32_t>(chosen), assigned, count, assignments.data(), bounds.data());
  for (int64_t e = 0; e < count; e++) most = std::max<int64_t>(most, bounds[e + 1] - bounds[e]);
  Tensor out = make(y.scalar_type(), {tokens, hidden});
  gemm::RowBuffer rows(most, hidden), activation(most, width);
  std::unique_ptr<float[]> gate_up(new float[most * 2 * width]), down(new float[assigned * hidden]);
  std::vector<int32_t> places(assigned);  // where in `down` an assignment is
  std::vector<float> sum(hidden);
  by_dtype(y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t e = 0; e < count; e++) {
      int64_t first = bounds[e], members = bounds[e + 1] - first;
      for (int64_t i = 0; i < members; i++) {
        int64_t assignment = assignments[first + i];
        places[assignment] = first + i;
        rows.copy(i, data<T>(y) + assignment / slots * hidden);
      }
      gemm::Weight<T> up{data<T>(w13) + e * 2 * width * hidden, 2 * width, hidden};
      gemm::Weight<T> back{data<T>(w2) + e * hidden * width, hidden, width};
      if (members)
        mixture::run_expert(rows.rows(), members, up, back, gate_up.get(), activation, down.get() + first * hidden);
    }
    int64_t live = assigned / slots;
    for (int64_t t = 0; t < live; t++)
      mixture::combine(down.get(), data<float>(weights) + t * slots, places.data() + t * slots, slots, hidden, sum.data(),
                   data<T>(out) + t * hidden);
    std::fill(data<T>(out) + live * hidden, data<T>(out) + tokens * hidden, T{});
  });
  return out;
}

}  // namespace inkling
