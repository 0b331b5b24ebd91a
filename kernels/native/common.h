// What every native kernel uses: typed views, bf16, vectors with a fixed summation order.
//
// Kernels compute each output element by one fixed sequence of operations that depends on nothing
// but that element's own inputs: results are the same bits whatever the batch, bucket or neighbours.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <tuple>
#include <vector>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // its name before torch 2.13
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace inkling {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct bf16 {
  uint16_t bits;
};

inline float load(const float* p) { return *p; }
inline float load(const bf16* p) {
  uint32_t wide = static_cast<uint32_t>(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline void store(float* p, float value) { *p = value; }
inline void store(bf16* p, float value) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  p->bits = value != value ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

template <typename T>
inline T* data(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), "native kernels take contiguous tensors");
  return static_cast<T*>(tensor.data_ptr());
}

// Calls `body` with a null pointer of the element type that `tensor` holds: float or bf16.
template <typename Body>
inline auto by_dtype(const Tensor& tensor, Body body) {
  if (tensor.scalar_type() == ScalarType::BFloat16) return body(static_cast<bf16*>(nullptr));
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, "expected float32 or bfloat16");
  return body(static_cast<float*>(nullptr));
}

// An uninitialised contiguous CPU tensor; the C call costs a fraction of a dispatched `empty`.
inline Tensor make(ScalarType dtype, std::initializer_list<int64_t> sizes) {
  int64_t strides[8], step = 1;
  for (int64_t i = sizes.size() - 1; i >= 0; i--) strides[i] = step, step *= sizes.begin()[i];
  AtenTensorHandle handle;
  int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.begin(), strides, code, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// a * b + c, fused where the target has the instruction (from x86-64-v3 on; never a libm call).
inline float multiply_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// 2^n for -127 < n < 128.
inline float power_of_two(int32_t n) { return std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23); }

// exp(x) to about 1 ulp, free of branches and calls so that loops over it vectorise. Overflow gives
// infinity, underflow goes through the subnormals to 0, NaN stays NaN. Cephes' polynomial.
inline float exponential(float x) {
  x = x > 89.0f ? 89.0f : x;  // in this form a NaN passes
  x = x < -104.0f ? -104.0f : x;
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float shifted = multiply_add(x, 1.44269504f, MAGIC);
  float n = shifted - MAGIC;
  int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(MAGIC);
  float r = multiply_add(n, -0.693359375f, x);  // ln 2 in two parts, the first exact
  r = multiply_add(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = multiply_add(p, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  float y = multiply_add(p, r * r, r) + 1.0f;
  int32_t half = whole >> 1;  // in two steps: 2^128 and 2^-150 are no floats
  return y * power_of_two(half) * power_of_two(whole - half);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
inline float silu(float x) { return x / (1.0f + exponential(-x)); }

constexpr int LANES = 16;

// Sum of f(i) for i < count: lane i%16 takes every sixteenth term, lanes are added in order.
template <typename F>
inline float lane_sum(int64_t count, F f) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int lane = 0; lane < LANES; lane++) lanes[lane] += f(i + lane);
  for (int lane = 0; i < count; i++, lane++) lanes[lane] += f(i);
  float total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

}  // namespace inkling
