// Vectors as wide as the target's registers, on the compiler's vector types.
#pragma once
#include "common.h"

#include <utility>
#ifdef __FMA__
#include <immintrin.h>
#endif

namespace inkling {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
static_assert(LANES % WIDTH == 0);

typedef float vec __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t vec_bits __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t vec_half __attribute__((vector_size(WIDTH * 2)));
using Lanes = std::make_integer_sequence<int, WIDTH>;

inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

template <int... I>
inline vec broadcast(float value, std::integer_sequence<int, I...>) {
  return vec{((void)I, value)...};
}
inline vec broadcast(float value) { return broadcast(value, Lanes{}); }

inline vec load_vec(const float* p) {
  vec value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
inline vec load_vec(const bf16* p) {
  vec_half half;
  std::memcpy(&half, p, sizeof half);
  return (vec)(__builtin_convertvector(half, vec_bits) << 16);
}

// The first `count` elements, then zeros.
template <typename T>
inline vec load_vec(const T* p, int64_t count) {
  if (count >= WIDTH) return load_vec(p);
  T some[WIDTH] = {};
  for (int64_t i = 0; i < count; i++) some[i] = p[i];
  return load_vec(some);
}

inline void store_vec(float* p, vec value) { std::memcpy(p, &value, sizeof value); }
inline void store_vec(bf16* p, vec value) {  // as `store`
  vec_bits wide = (vec_bits)value;
  vec_bits rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  vec_half half = __builtin_convertvector(value != value ? vec_bits{} + 0x7fc0 : rounded, vec_half);
  std::memcpy(p, &half, sizeof half);
}

// The first `count` elements.
template <typename T>
inline void store_vec(T* p, vec value, int64_t count) {
  if (count >= WIDTH) return store_vec(p, value);
  for (int64_t i = 0; i < count; i++) store(p + i, value[i]);
}

// a0 b0 a1 b1 ... of the lower (HALF 0) or upper (HALF 1) half of the elements.
template <int HALF, int... I>
inline vec interleave(vec a, vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * WIDTH + HALF * WIDTH / 2)...);
}

// Transposes a WIDTH x WIDTH matrix: log2(WIDTH) rounds of perfect shuffles of its rows.
inline void transpose(vec (&rows)[WIDTH]) {
  for (int round = 1; round < WIDTH; round *= 2) {
    vec next[WIDTH];
    for (int i = 0; i < WIDTH / 2; i++) {
      next[2 * i] = interleave<0>(rows[i], rows[i + WIDTH / 2], Lanes{});
      next[2 * i + 1] = interleave<1>(rows[i], rows[i + WIDTH / 2], Lanes{});
    }
    for (int i = 0; i < WIDTH; i++) rows[i] = next[i];
  }
}

// The lower (HALF 0) or upper halves of the groups of SIZE elements of a and b: a0 b0 a1 b1 ...
template <int SIZE, int HALF, int... I>
inline vec group_halves(vec a, vec b, std::integer_sequence<int, I...>) {
  constexpr int KEPT = SIZE / 2;
  return __builtin_shufflevector(
      a, b, (I / KEPT / 2 * SIZE + I % KEPT + I / KEPT % 2 * WIDTH + HALF * KEPT)...);
}

// Element i of the result is the sum of rows[i]: halves are added until one element is left, so
// the order is c + (c + WIDTH/2), then + WIDTH/4, ... `rows` is overwritten.
template <int SIZE = WIDTH>
inline vec sum_rows(vec* rows) {
  if constexpr (SIZE == 1) {
    return rows[0];
  } else {
    for (int i = 0; i < SIZE / 2; i++) {
      vec a = rows[i], b = rows[i + SIZE / 2];
      rows[i] = group_halves<SIZE, 0>(a, b, Lanes{}) + group_halves<SIZE, 1>(a, b, Lanes{});
    }
    return sum_rows<SIZE / 2>(rows);
  }
}

}  // namespace inkling
