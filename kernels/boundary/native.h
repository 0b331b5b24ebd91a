#pragma once
#include "../native/conv.h"
#include "../native/exchange.h"
#include "../rmsnorm/native.h"

namespace inkling {

inline std::tuple<Tensor, Tensor> boundary(const Tensor& x, const Tensor& residual, const Tensor& conv_weight,
                                           const Tensor& norm_weight, Tensor conv_pool, const Tensor&,
                                           const Tensor& slots, const Tensor& sources, const Tensor& starts,
                                           const Tensor& lengths, const Tensor& destination_slots,
                                           const Tensor& destination_offsets, const Tensor& peers, Tensor exchange,
                                           const Tensor& step_counter, const Tensor& rank, int64_t layer,
                                           int64_t call, int64_t calls, double eps, int64_t world) {
  int64_t tokens = x.size(0), width = x.size(1);
  Tensor hidden = make(x.scalar_type(), {tokens, width}), normed = make(x.scalar_type(), {tokens, width});
  StepRows rows(slots, sources, starts, lengths, destination_slots, destination_offsets);
  by_dtype(x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* input = data<T>(x);
    std::vector<T> summed;
    if (world > 1) {
      Exchange ranks(peers, exchange, step_counter, rank, call, calls, world);
      std::copy_n(input, tokens * width, ranks.part<T>(tokens * width));
      summed.resize(tokens * width);
      rank_sum(ranks.publish<T>(), tokens * width, summed.data());
      input = summed.data();
    }
    ShortConv<T> conv(input, width, width, data<float>(conv_weight), conv_pool, layer, rows);
    const T *before = data<T>(residual), *weight = data<T>(norm_weight);
    T *sums = data<T>(hidden), *norms = data<T>(normed);
    std::vector<float> sum(width);
    auto finish = [&](int64_t t) {
      for (int64_t c = 0; c < width; c++) sum[c] = load(before + t * width + c) + sum[c];
      for (int64_t c = 0; c < width; c++) store(sums + t * width + c, sum[c]);
      rmsnorm_row(sum.data(), weight, norms + t * width, width, eps);
    };
    for (int64_t row = 0; row < rows.count; row++)
      for (int64_t t = rows.starts[row]; t < rows.starts[row + 1]; t++) {
        conv.token(row, t - rows.starts[row], sum.data());
        finish(t);
      }
    for (int64_t t = rows.starts[rows.count]; t < tokens; t++) {
      conv.padded_token(t, sum.data());
      finish(t);
    }
    conv.store_inputs();
  });
  return {hidden, normed};
}

}  // namespace inkling
