// Greedy rows take one pass over the logits; only what a request asks for costs more.
#pragma once
#include "../native/common.h"
#include "../native/table.h"

#include <algorithm>

namespace inkling {
namespace sampling {

constexpr int64_t CHUNK = 32;  // elements that a vectorised loop takes at once
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// First word of Philox-4x32-10 (Salmon et al. 2011).
constexpr uint32_t philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    uint64_t low = uint64_t{0xD2511F53} * c0, high = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(high >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(high);
    c2 = static_cast<uint32_t>(low >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(low);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c0;
}
// Known answers of Random123.
static_assert(philox(0, 0, 0, 0, 0, 0) == 0x6627e8d5);
static_assert(philox(~0u, ~0u, ~0u, ~0u, ~0u, ~0u) == 0x408f276d);
static_assert(philox(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0) == 0xd16cfe09);

// ln(x) of a normal x > 0 to about 1 ulp, free of branches and calls. Cephes' polynomial.
inline float logarithm(float x) {
  constexpr int32_t SQRT_HALF = 0x3f3504f3;
  int32_t bits = std::bit_cast<int32_t>(x), exponent = (bits - SQRT_HALF) >> 23;
  float m = std::bit_cast<float>(bits - (exponent << 23)) - 1.0f, n = static_cast<float>(exponent);
  float p = 7.0376836292e-2f;
  p = multiply_add(p, m, -1.1514610310e-1f);
  p = multiply_add(p, m, 1.1676998740e-1f);
  p = multiply_add(p, m, -1.2420140846e-1f);
  p = multiply_add(p, m, 1.4249322787e-1f);
  p = multiply_add(p, m, -1.6668057665e-1f);
  p = multiply_add(p, m, 2.0000714765e-1f);
  p = multiply_add(p, m, -2.4999993993e-1f);
  p = multiply_add(p, m, 3.3333331174e-1f);
  float square = m * m, y = p * m * square;
  y = multiply_add(n, -2.12194440e-4f, y);
  y = multiply_add(-0.5f, square, y);
  return multiply_add(n, 0.693359375f, m + y);
}

// Standard Gumbel noise from a random word: -ln(-ln(1 - u)), with log1p where 1 - u rounds.
inline float gumbel(uint32_t word) {
  float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  u = u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
  float rest = 1.0f - u;
  float exponential = rest == 1.0f ? u : logarithm(rest) * u / (rest - 1.0f);
  return -logarithm(exponential);
}

// Noise of CHUNK token ids at a position.
[[gnu::noinline]] inline void gumbel_chunk(const uint32_t* ids, uint32_t position, uint32_t low, uint32_t high,
                                           float* __restrict noise) {
  uint32_t words[CHUNK];
  for (int64_t i = 0; i < CHUNK; i++) words[i] = philox(ids[i], position, 0, 0, low, high);
  for (int64_t i = 0; i < CHUNK; i++) noise[i] = gumbel(words[i]);
}

inline bool all_finite(const float* values, int64_t count) {
  return lane_sum(count, [&](int64_t i) { return values[i] - values[i]; }) == 0;  // each 0 or NaN
}

// The largest value; -infinity if there is none.
inline float largest(const float* values, int64_t count) {
  float lanes[CHUNK];
  std::fill_n(lanes, CHUNK, -INFINITE);
  int64_t i = 0;
  for (; i + CHUNK <= count; i += CHUNK)
    for (int64_t lane = 0; lane < CHUNK; lane++)
      lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];  // std::max would not vectorise
  for (; i < count; i++) lanes[0] = std::max(lanes[0], values[i]);
  return *std::max_element(lanes, lanes + CHUNK);
}

// Index of the first largest value.
inline int32_t first_largest(const float* values, int64_t count) {
  return static_cast<int32_t>(std::find(values, values + count, largest(values, count)) - values);
}

// Ids of the `top` largest values, by descending value, then ascending id.
inline void top_ids(const float* values, int64_t count, int64_t top, int32_t* ids) {
  int64_t found = 0;
  float least = -INFINITE;  // what an id must exceed to enter
  auto enter = [&](int64_t id) {
    int64_t place = found < top ? found++ : top - 1;
    for (; place > 0 && values[ids[place - 1]] < values[id]; place--) ids[place] = ids[place - 1];
    ids[place] = static_cast<int32_t>(id);
    if (found == top) least = values[ids[top - 1]];
  };
  for (int64_t i = 0; top > 0 && i < count; i += CHUNK) {
    int64_t end = std::min(i + CHUNK, count);
    int32_t any = 0;
    for (int64_t id = i; id < end; id++) any |= values[id] > least;
    for (int64_t id = i; any && id < end; id++)
      if (values[id] > least) enter(id);
  }
}

// Order of ids: by descending value, then ascending id.
struct Descending {
  const float* values;
  bool operator()(int32_t a, int32_t b) const { return values[a] > values[b] || (values[a] == values[b] && a < b); }
};

// Ids of `scaled` that pass min-p, top-k and top-p, in no particular order.
class Filter {
 public:
  Filter(const std::vector<float>& scaled, float min_p) : scaled_(scaled), weights_(scaled.size()) {
    float maximum = largest(scaled.data(), scaled.size());
    for (size_t id = 0; id < scaled.size(); id++) weights_[id] = exponential(scaled[id] - maximum);
    for (size_t id = 0; id < scaled.size(); id++)
      if (scaled[id] > -INFINITE && weights_[id] >= min_p) ids_.push_back(static_cast<int32_t>(id));
  }

  void keep_top_k(int64_t k) {
    if (k <= 0 || k >= count()) return;
    std::nth_element(ids_.begin(), ids_.begin() + k, ids_.end(), Descending{scaled_.data()});
    ids_.resize(k);
  }

  // Halves what is undecided: [0, begin) is kept and weighs `kept` < the goal, from `end` on nothing is.
  void keep_top_p(float top_p) {
    if (top_p >= 1 || ids_.empty()) return;
    double goal = top_p * weight(0, count()), kept = 0;
    int64_t begin = 0, end = count();
    while (end - begin > 1) {
      int64_t middle = (begin + end) / 2;
      std::nth_element(ids_.begin() + begin, ids_.begin() + middle, ids_.begin() + end, Descending{scaled_.data()});
      double upper = weight(begin, middle);
      if (kept + upper >= goal) {
        end = middle;
      } else {
        kept += upper;
        begin = middle;
      }
    }
    ids_.resize(end);
  }

  const std::vector<int32_t>& ids() const { return ids_; }

 private:
  int64_t count() const { return static_cast<int64_t>(ids_.size()); }
  double weight(int64_t begin, int64_t end) const {  // fp64: a long vocabulary's sums must not drift
    double sum = 0;
    for (int64_t i = begin; i < end; i++) sum += weights_[ids_[i]];
    return sum;
  }

  const std::vector<float>& scaled_;
  std::vector<float> weights_;  // relative to the largest
  std::vector<int32_t> ids_;
};

// An id and its value; none below it.
struct Best {
  int32_t id = 0;
  float value = -INFINITE;
};

// One row's line of the request table. Logits and counts begin with those of the id `first`.
struct Request {
  const int32_t *ints, *counts;
  const float* floats;
  int64_t generated, stop_ids, bias_ids;
  const int32_t* ahead;  // so many drafts count as generated
  int64_t drafts, first = 0;

  bool stops_masked() const { return generated + drafts < ints[table::MIN_TOKENS]; }

  bool changes_logits() const {
    const float* bias = floats + table::FLOAT_HEADER;
    return stops_masked() || floats[table::PRESENCE] != 0 || floats[table::FREQUENCY] != 0 ||
           floats[table::REPETITION] != 1 || std::any_of(bias, bias + bias_ids, [](float b) { return b != 0; });
  }

  // Bias, stop mask and penalties, in place.
  void process(std::vector<float>& logits) const {
    const int32_t *stops = ints + table::INT_HEADER, *biased = stops + stop_ids;
    for (int64_t i = 0; i < bias_ids; i++)
      if (float bias = floats[table::FLOAT_HEADER + i]; bias != 0 && has(biased[i], logits))
        logits[biased[i] - first] += bias;
    for (int64_t i = 0; stops_masked() && i < stop_ids; i++)
      if (has(stops[i], logits)) logits[stops[i] - first] = -INFINITE;
    float repetition = floats[table::REPETITION];
    float frequency = floats[table::FREQUENCY], presence = floats[table::PRESENCE];
    std::vector<int32_t> raised;
    if (drafts > 0) raised.assign(counts, counts + logits.size());
    for (int64_t i = 0; i < drafts; i++)
      if (has(ahead[i], logits)) raised[ahead[i] - first]++;
    const int32_t* seen = drafts > 0 ? raised.data() : counts;
    for (size_t id = 0; id < logits.size(); id++) {
      float logit = logits[id], repeated = logit > 0 ? logit / repetition : logit * repetition;
      int32_t output = seen[id] & (table::PROMPT_SEEN - 1);
      logit = seen[id] != 0 ? repeated : logit;
      logits[id] = logit - frequency * static_cast<float>(output) - (output > 0 ? presence : 0.0f);
    }
  }

  float noisy(float value, int32_t id, int64_t position) const {
    return value + gumbel(philox(id, position, 0, 0, ints[table::SEED_LOW], ints[table::SEED_HIGH]));
  }

  // The highest of `values` with noise among the ids `kept`, which count from `first`.
  Best noisiest(const std::vector<float>& values, const std::vector<int32_t>& kept, int64_t position) const {
    Best best;
    for (size_t begin = 0; begin < kept.size(); begin += CHUNK) {
      int64_t count = std::min<int64_t>(CHUNK, kept.size() - begin);
      uint32_t ids[CHUNK] = {};
      float noise[CHUNK];
      for (int64_t i = 0; i < count; i++) ids[i] = static_cast<uint32_t>(kept[begin + i] + first);
      gumbel_chunk(ids, position, ints[table::SEED_LOW], ints[table::SEED_HIGH], noise);
      for (int64_t i = 0; i < count; i++) {
        int32_t id = ids[i];
        float value = values[kept[begin + i]] + noise[i];
        if (value > best.value || (value == best.value && id < best.id)) best = {id, value};
      }
    }
    return best;
  }

  // The noisy choice among the ids that pass the filters, if `filtered`; `logits` becomes logits / T.
  Best draw(std::vector<float>& logits, int64_t position, bool filtered) const {
    float temperature = floats[table::TEMPERATURE];
    for (float& logit : logits) logit /= temperature;
    Filter filter(logits, filtered ? floats[table::MIN_P] : 0.0f);
    if (filtered) filter.keep_top_k(ints[table::TOP_K]);
    if (filtered) filter.keep_top_p(floats[table::TOP_P]);
    return noisiest(logits, filter.ids(), position);
  }

  // The choice from the logits of `count` ids.
  Best choose(const float* raw, int64_t count, int64_t position, bool filtered = true) const {
    bool greedy = floats[table::TEMPERATURE] == 0;
    if (greedy && !changes_logits()) return highest(raw, count);
    std::vector<float> logits(raw, raw + count);
    if (changes_logits()) process(logits);
    return greedy ? highest(logits.data(), count) : draw(logits, position, filtered);
  }

 private:
  bool has(int32_t id, const std::vector<float>& logits) const {
    return static_cast<size_t>(id - first) < logits.size();
  }

  Best highest(const float* values, int64_t count) const {
    int32_t at = first_largest(values, count);
    return {static_cast<int32_t>(at + first), values[at]};
  }
};

// The requests behind a step's samples.
struct Step {
  const Tensor &token_counts, &request_state, &request_ints, &request_floats, &tokens, &token_rows, &slots, &starts,
      &lengths, &sample_rows;
  int64_t stop_ids, bias_ids, drafts;

  // That of sample `s`, whose logits begin with the id `first`.
  Request request(int64_t s, int64_t first = 0) const {
    int64_t at = data<int32_t>(sample_rows)[s], row = data<int32_t>(token_rows)[at];
    int64_t begin = data<int32_t>(starts)[row], slot = data<int32_t>(slots)[row];
    return {data<int32_t>(request_ints) + slot * request_ints.size(1),
            data<int32_t>(token_counts) + slot * token_counts.size(1) + first,
            data<float>(request_floats) + slot * request_floats.size(1),
            data<int32_t>(request_state)[slot * table::STATE_WIDTH + table::GENERATED],
            stop_ids,
            bias_ids,
            data<int32_t>(tokens) + begin + 1,
            drafts ? at - begin : 0,
            first};
  }

  // Where the token of sample `s` is to stand.
  int64_t position(int64_t s) const {
    int64_t at = data<int32_t>(sample_rows)[s], row = data<int32_t>(token_rows)[at];
    return data<int32_t>(lengths)[row] + at - data<int32_t>(starts)[row] + 1;
  }
};

// Results of `samples` samples with up to `top` most likely ids each.
struct Results {
  Tensor chosen, logprobs, top_tokens, top_logprobs;

  static Results of(int64_t samples, int64_t top) {
    return {make(ScalarType::Int, {samples}), make(ScalarType::Float, {samples}),
            make(ScalarType::Int, {samples, top}), make(ScalarType::Float, {samples, top})};
  }

  int64_t top() const { return top_tokens.size(1); }
  int32_t* tops(int64_t s) const { return data<int32_t>(top_tokens) + s * top(); }
  float* top_logprobs_of(int64_t s) const { return data<float>(top_logprobs) + s * top(); }
  int64_t wanted(const Request& request) const {
    return std::clamp<int64_t>(request.ints[table::TOP_LOGPROBS], 0, top());
  }

  // Token 0; the logprob and the `wanted` top ones are `logprob`.
  void fill(int64_t s, float logprob, int64_t wanted) const {
    data<int32_t>(chosen)[s] = 0;
    data<float>(logprobs)[s] = logprob;
    std::fill_n(tops(s), top(), 0);
    std::fill_n(top_logprobs_of(s), top(), 0.0f);
    std::fill_n(top_logprobs_of(s), wanted, logprob);
  }
};

constexpr float NOT_FINITE = std::numeric_limits<float>::quiet_NaN();

// The result of sample `s` with the logits `raw` of all ids.
inline void draw_sample(const Step& step, const float* raw, int64_t vocab, int64_t s, const Results& results) {
  Request request = step.request(s);
  int64_t wanted = results.wanted(request);
  if (!all_finite(raw, vocab)) return results.fill(s, NOT_FINITE, wanted);
  results.fill(s, 0, 0);
  float maximum = largest(raw, vocab);
  float log_sum = std::log(lane_sum(vocab, [&](int64_t i) { return exponential(raw[i] - maximum); }));
  auto log_softmax = [&](int32_t id) { return raw[id] - maximum - log_sum; };
  int32_t token = request.choose(raw, vocab, step.position(s)).id, *tops = results.tops(s);
  data<int32_t>(results.chosen)[s] = token;
  data<float>(results.logprobs)[s] = log_softmax(token);
  top_ids(raw, vocab, wanted, tops);
  std::transform(tops, tops + wanted, results.top_logprobs_of(s), log_softmax);
}

}  // namespace sampling

inline std::tuple<Tensor, Tensor, Tensor, Tensor> sample(
    const Tensor& logits, const Tensor& token_counts, const Tensor& request_state, const Tensor& request_ints,
    const Tensor& request_floats, const Tensor& tokens, const Tensor& token_rows, const Tensor& slots,
    const Tensor& starts, const Tensor& lengths, const Tensor& sample_rows, const Tensor& emits, int64_t stop_ids,
    int64_t bias_ids, int64_t top, int64_t drafts) {
  int64_t samples = logits.size(0), vocab = logits.size(1);
  STD_TORCH_CHECK(top <= vocab, "more top logprobs than tokens");
  STD_TORCH_CHECK(token_counts.size(1) == vocab, "token counts and logits differ in vocabulary");
  sampling::Step step{token_counts, request_state, request_ints, request_floats, tokens,   token_rows, slots,
                      starts,       lengths,       sample_rows,  stop_ids,       bias_ids, drafts};
  sampling::Results results = sampling::Results::of(samples, top);
  for (int64_t s = 0; s < samples; s++) {
    if (data<int32_t>(emits)[s]) sampling::draw_sample(step, data<float>(logits) + s * vocab, vocab, s, results);
    else results.fill(s, 0, 0);
  }
  return {results.chosen, results.logprobs, results.top_tokens, results.top_logprobs};
}

}  // namespace inkling
