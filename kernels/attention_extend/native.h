// Attention over keys in ascending absolute position, in blocks aligned at multiples of 64.
//
// Each (token, head) keeps a running softmax of its own; a block changes it by a sequence of
// operations that depends only on that query and the block's visible keys. How many tokens share a
// block's keys is thus invisible in the result: decode and any chunking give the same bits.
#pragma once
#include "../native/vector.h"

#include <algorithm>
#include <memory>

namespace inkling {
namespace attention {

constexpr int64_t BLOCK = 64;  // keys
constexpr int64_t CHUNK = 32;  // lanes of a sum over keys; pads the width of values
constexpr int64_t PAIR = 2 * WIDTH;
constexpr int64_t TILE = 16;   // tokens of a row that share a block's transposed keys

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct alignas(64) Line {
  float values[LANES];
};

// Uninitialised floats on a cache-line boundary.
class Buffer {
 public:
  explicit Buffer(int64_t count) : lines_(new Line[round_up(count, LANES) / LANES]) {}
  operator float*() { return lines_[0].values; }

 private:
  std::unique_ptr<Line[]> lines_;
};

struct Shape {
  int64_t heads, kv_heads, group, dim, padded_dim, rel, extent, bank_width, window, first_key, page_size, table_width;

  Shape(const Tensor& q, const Tensor& rel_proj, const Tensor& kv_pool, const Tensor& page_table, int64_t window,
        int64_t first_key)
      : heads(q.size(1)), kv_heads(kv_pool.size(3)), group(heads / kv_heads), dim(q.size(2)),
        padded_dim(round_up(dim, CHUNK)), rel(rel_proj.size(0)), extent(rel_proj.size(1)),
        bank_width(extent + 2 * BLOCK), window(window), first_key(first_key),
        page_size(kv_pool.size(4)), table_width(page_table.size(1)) {}

  // First position that a query at `position` sees.
  int64_t first(int64_t position) const {
    return window ? std::max(position - window + 1, first_key) : first_key;
  }
};

// The running softmax of one query: everything is relative to `maximum`.
struct alignas(64) Running {
  float sum[CHUNK];  // by key % CHUNK
  float maximum;
};

// What one block needs; the buffers are reused from block to block.
struct Scratch {
  Buffer keys, values, scores;  // [dim][BLOCK], [BLOCK][padded_dim], [4][BLOCK]
  Buffer query, output;         // [queries][dim], [queries][padded_dim]
  std::vector<Running> running;

  Scratch(const Shape& shape, int64_t queries)
      : keys(round_up(shape.dim, WIDTH) * BLOCK), values(BLOCK * shape.padded_dim), scores(4 * BLOCK),
        query(queries * shape.dim), output(queries * shape.padded_dim), running(queries) {}
};

// The relative bank [rel][BLOCK + extent + BLOCK] in fp32, distances descending, zeros on both sides:
// distance d is at BLOCK + extent - 1 - d, so ascending keys read it forwards.
template <typename T>
inline void reverse_bank(const T* rel_proj, const Shape& shape, float* bank) {
  for (int64_t c = 0; c < shape.rel; c++) {
    const T* from = rel_proj + c * shape.extent;
    float* to = bank + c * shape.bank_width;
    std::fill_n(to, BLOCK, 0.0f);
    for (int64_t i = 0; i < shape.extent; i++) to[BLOCK + i] = load(from + shape.extent - 1 - i);
    std::fill_n(to + BLOCK + shape.extent, BLOCK, 0.0f);
  }
}

// keys [dim][BLOCK] of the lanes [begin, end), rounded out to WIDTH.
template <typename T>
inline void transpose_keys(const T* const* rows, int64_t begin, int64_t end, int64_t dim, float* keys) {
  for (int64_t j = begin / WIDTH * WIDTH; j < end; j += WIDTH)
    for (int64_t d = 0; d < dim; d += WIDTH) {
      vec square[WIDTH];
      for (int i = 0; i < WIDTH; i++) square[i] = load_vec(rows[j + i] + d, dim - d);
      transpose(square);
      for (int i = 0; i < WIDTH; i++) store_vec(keys + (d + i) * BLOCK + j, square[i]);
    }
}

// scores[h][j] = sum_d q[h][d] * key_j[d] + sum_c r[h][c] * bank[c][j] for j in [begin, end), rounded
// out to PAIR. `bank` null: the whole block is beyond the extent.
template <int HEADS>
[[gnu::noinline]] void score(const float* q, const float* keys, const float* r, const float* bank, const Shape& shape,
                             int64_t begin, int64_t end, float* scores) {
  for (int64_t j = begin / PAIR * PAIR; j < end; j += PAIR) {
    vec sums[HEADS][2] = {};
    auto add = [&](const float* factors, int64_t stride, const float* terms) {
      vec low = load_vec(terms), high = load_vec(terms + WIDTH);
      for (int h = 0; h < HEADS; h++) {
        vec factor = broadcast(factors[h * stride]);
        sums[h][0] = multiply_add(factor, low, sums[h][0]);
        sums[h][1] = multiply_add(factor, high, sums[h][1]);
      }
    };
    for (int64_t d = 0; d < shape.dim; d++) add(q + d, shape.dim, keys + d * BLOCK + j);
    for (int64_t c = 0; bank && c < shape.rel; c++) add(r + c, shape.rel, bank + c * shape.bank_width + j);
    for (int h = 0; h < HEADS; h++) {
      store_vec(scores + h * BLOCK + j, sums[h][0]);
      store_vec(scores + h * BLOCK + j + WIDTH, sums[h][1]);
    }
  }
}

// Turns the scores of [begin, end) into weights relative to the new maximum and rescales what was
// summed before. Masked lanes become 0 whatever they held.
[[gnu::noinline]] inline void weigh(float* __restrict scores, int64_t begin, int64_t end, Running& running,
                                    float* __restrict output, int64_t width) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  int64_t low = begin / CHUNK * CHUNK, high = round_up(end, CHUNK);
  for (int64_t j = low; j < begin; j++) scores[j] = NONE;
  for (int64_t j = end; j < high; j++) scores[j] = NONE;
  float lanes[CHUNK];
  for (int i = 0; i < CHUNK; i++) lanes[i] = running.maximum;
  for (int64_t j = low; j < high; j += CHUNK)
    for (int i = 0; i < CHUNK; i++) lanes[i] = scores[j + i] > lanes[i] ? scores[j + i] : lanes[i];
  float maximum = NONE;
  for (float lane : lanes) maximum = lane > maximum ? lane : maximum;
  float decay = exponential(running.maximum - maximum);
  float added[CHUNK] = {};
  for (int64_t j = low; j < high; j += CHUNK)
    for (int i = 0; i < CHUNK; i++) {
      scores[j + i] = exponential(scores[j + i] - maximum);
      added[i] += scores[j + i];
    }
  for (int i = 0; i < CHUNK; i++) running.sum[i] = running.sum[i] * decay + added[i];
  for (int64_t d = 0; d < width; d++) output[d] *= decay;
  running.maximum = maximum;
}

// output[h] += sum_j weights[h][j] * values[j], keys in ascending order.
template <int HEADS>
[[gnu::noinline]] void mix(const float* weights, const float* values, int64_t begin, int64_t end,
                           int64_t width, float* output) {
  for (int64_t d = 0; d < width; d += PAIR) {
    vec sums[HEADS][2];
    for (int h = 0; h < HEADS; h++)
      for (int i = 0; i < 2; i++) sums[h][i] = load_vec(output + h * width + d + i * WIDTH);
    for (int64_t j = begin; j < end; j++) {
      vec low = load_vec(values + j * width + d), high = load_vec(values + j * width + d + WIDTH);
      for (int h = 0; h < HEADS; h++) {
        vec weight = broadcast(weights[h * BLOCK + j]);
        sums[h][0] = multiply_add(weight, low, sums[h][0]);
        sums[h][1] = multiply_add(weight, high, sums[h][1]);
      }
    }
    for (int h = 0; h < HEADS; h++)
      for (int i = 0; i < 2; i++) store_vec(output + h * width + d + i * WIDTH, sums[h][i]);
  }
}

// One layer of one op call.
template <typename T>
class Layer {
 public:
  Layer(const T* q, const float* r, const T* pool, const int32_t* page_table, const float* bank, const Shape& shape,
        int64_t tile, T* output)
      : q_(q), r_(r), pool_(pool), page_table_(page_table), bank_(bank), shape_(shape), output_(output),
        scratch_(shape, tile * shape.group) {}

  // Tokens [token, token + count) of one row, the first of them at `position`.
  void tile(int64_t token, int64_t count, int64_t position, int64_t slot) {
    for (int64_t head = 0; head < shape_.kv_heads; head++) {
      begin(token, count, head);
      int64_t low = shape_.first(position), high = position + count;
      for (int64_t block = low / BLOCK * BLOCK; block < high; block += BLOCK) {
        const int32_t* table = page_table_ + slot * shape_.table_width;
        gather(table, head, block, std::max(low, block), std::min(high, block + BLOCK));
        for (int64_t i = 0; i < count; i++) visit(i, token + i, position + i, head, block);
      }
      finish(token, count, head);
    }
  }

 private:
  // Queries over D in fp32, states empty.
  void begin(int64_t token, int64_t count, int64_t head) {
    float scale = 1.0f / static_cast<float>(shape_.dim);
    int64_t per_token = shape_.group * shape_.dim;
    for (int64_t i = 0; i < count; i++) {
      const T* from = q_ + (token + i) * shape_.heads * shape_.dim + head * per_token;
      float* to = scratch_.query + i * per_token;
      for (int64_t d = 0; d < per_token; d++) to[d] = load(from + d) * scale;
    }
    int64_t queries = count * shape_.group;
    std::fill_n<float*>(scratch_.output, queries * shape_.padded_dim, 0.0f);
    for (int64_t i = 0; i < queries; i++) scratch_.running[i] = {{}, -std::numeric_limits<float>::infinity()};
  }

  // Keys (transposed) and values of positions [low, high) of a block; other lanes hold anything.
  void gather(const int32_t* table, int64_t head, int64_t block, int64_t low, int64_t high) {
    const T* rows[BLOCK];
    int64_t plane = shape_.page_size * shape_.dim, part = shape_.kv_heads * plane;
    for (int64_t position = low; position < high;) {
      int64_t page = position / shape_.page_size, offset = position % shape_.page_size;
      const T* base = pool_ + table[page % shape_.table_width] * 2 * part + head * plane;
      for (; offset < shape_.page_size && position < high; offset++, position++)
        rows[position - block] = base + offset * shape_.dim;
    }
    int64_t begin = low - block, end = high - block;
    take_values(rows, part, begin, end);
    std::fill(rows + begin / WIDTH * WIDTH, rows + begin, rows[begin]);
    std::fill(rows + end, rows + round_up(end, WIDTH), rows[begin]);
    transpose_keys(rows, begin, end, shape_.dim, scratch_.keys);
  }

  // Values of the lanes [begin, end), in place if they lie in the pool as `mix` reads them.
  void take_values(const T* const* rows, int64_t part, int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, float>)
      if (shape_.page_size % BLOCK == 0 && shape_.dim == shape_.padded_dim) {
        values_ = rows[begin] + part - begin * shape_.dim;
        return;
      }
    values_ = scratch_.values;
    for (int64_t j = begin; j < end; j++)
      for (int64_t d = 0; d < shape_.dim; d++) scratch_.values[j * shape_.padded_dim + d] = load(rows[j] + part + d);
  }

  // One token's query heads against the block.
  void visit(int64_t i, int64_t token, int64_t position, int64_t head, int64_t block) {
    int64_t begin = std::max(shape_.first(position) - block, int64_t{0}), end = std::min(position + 1 - block, BLOCK);
    if (begin >= end) return;
    int64_t start = BLOCK + shape_.extent - 1 - (position - block);  // of the block in the reversed bank
    const float* bank = start > 0 ? bank_ + start : nullptr;  // else all visible keys are beyond the extent
    const float* r = r_ + (token * shape_.heads + head * shape_.group) * shape_.rel;
    int64_t g = 0;
    for (; g + 4 <= shape_.group; g += 4) heads<4>(i * shape_.group + g, r + g * shape_.rel, bank, begin, end);
    for (; g + 2 <= shape_.group; g += 2) heads<2>(i * shape_.group + g, r + g * shape_.rel, bank, begin, end);
    for (; g < shape_.group; g++) heads<1>(i * shape_.group + g, r + g * shape_.rel, bank, begin, end);
  }

  template <int HEADS>
  void heads(int64_t query, const float* r, const float* bank, int64_t begin, int64_t end) {
    float *scores = scratch_.scores, *output = scratch_.output + query * shape_.padded_dim;
    score<HEADS>(scratch_.query + query * shape_.dim, scratch_.keys, r, bank, shape_, begin, end, scores);
    for (int h = 0; h < HEADS; h++)
      weigh(scores + h * BLOCK, begin, end, scratch_.running[query + h], output + h * shape_.padded_dim,
            shape_.padded_dim);
    mix<HEADS>(scores, values_, begin, end, shape_.padded_dim, output);
  }

  void finish(int64_t token, int64_t count, int64_t head) {
    for (int64_t i = 0; i < count; i++)
      for (int64_t g = 0; g < shape_.group; g++) {
        float* sum = scratch_.running[i * shape_.group + g].sum;
        for (int64_t half = CHUNK / 2; half > 0; half /= 2)
          for (int64_t lane = 0; lane < half; lane++) sum[lane] += sum[lane + half];
        const float* from = scratch_.output + (i * shape_.group + g) * shape_.padded_dim;
        T* to = output_ + ((token + i) * shape_.heads + head * shape_.group + g) * shape_.dim;
        for (int64_t d = 0; d < shape_.dim; d++) store(to + d, from[d] / sum[0]);
      }
  }

  const T* q_;
  const float* r_;
  const T* pool_;
  const int32_t* page_table_;
  const float* bank_;
  const Shape& shape_;
  T* output_;
  Scratch scratch_;
  const float* values_ = nullptr;  // of the block, [BLOCK][padded_dim]
};

}  // namespace attention

inline Tensor attention_extend(const Tensor& q, const Tensor& r, const Tensor& rel_proj, const Tensor& kv_pool,
                               const Tensor& page_table, const Tensor& slots, const Tensor& starts,
                               const Tensor& lengths, int64_t layer, int64_t window, int64_t first) {
  attention::Shape shape(q, rel_proj, kv_pool, page_table, window, first);
  int64_t tokens = q.size(0), width = shape.heads * shape.dim;
  Tensor output = make(q.scalar_type(), {tokens, width});
  const int32_t *bounds = data<int32_t>(starts), *held = data<int32_t>(lengths), *lines = data<int32_t>(slots);
  by_dtype(q, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    attention::Buffer bank(shape.rel * shape.bank_width);
    attention::reverse_bank(data<T>(rel_proj), shape, bank);
    int64_t tile = 0, rows = slots.size(0);
    for (int64_t row = 0; row < rows; row++) tile = std::max<int64_t>(tile, bounds[row + 1] - bounds[row]);
    tile = std::min(tile, attention::TILE);
    attention::Layer<T> work(data<T>(q), data<float>(r), data<T>(kv_pool) + layer * kv_pool.stride(0),
                             data<int32_t>(page_table), bank, shape, tile, data<T>(output));
    for (int64_t row = 0; row < rows; row++)
      for (int64_t t = bounds[row]; t < bounds[row + 1]; t += tile)
        work.tile(t, std::min(tile, bounds[row + 1] - t), held[row] + t - bounds[row], lines[row]);
    std::fill(data<T>(output) + bounds[rows] * width, data<T>(output) + tokens * width, T{});
  });
  return output;
}

}  // namespace inkling
