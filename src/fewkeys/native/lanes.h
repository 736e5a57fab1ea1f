// Vectors of floats as wide as the registers of the machine, and operations on them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "counters.h"
#include "problems.h"
#include "team.h"

namespace fewkeys {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12, ABREAST = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6, ABREAST = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, ROWS = 12, ABREAST = 4;
#else
constexpr int LANES = 4, ROWS = 6, ABREAST = 2;
#endif
// ROWS x 2 sums fill the registers (32 with AVX-512 and NEON, otherwise 16), except for three that hold the operands.
// So do SOME x ABREAST sums.
constexpr int TILE = 32, WIDE = TILE / LANES;
constexpr int FILL = 16;  // rows of values are padded to a multiple of it; the widest vector divides it
constexpr int SOME = 4;   // rows of weighted sums that are computed at once
static inline int64_t round_up(int64_t count, int64_t to = FILL) { return divide_up(count, to) * to; }

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct bf16 {
  uint16_t bits;
};

// Arrays aligned to cache lines.
template <class T>
struct AlignedAllocator {
  typedef T value_type;
  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U> &) {}
  T *allocate(size_t count) {
    count_bytes(count * sizeof(T));
    return (T *)::operator new(count * sizeof(T), LINE);
  }
  void deallocate(T *array, size_t) { ::operator delete(array, LINE); }
  bool operator==(const AlignedAllocator &) const { return true; }
  bool operator!=(const AlignedAllocator &) const { return false; }

 private:
  static constexpr std::align_val_t LINE{64};  // bytes
};
template <class T>
using aligned_vector = std::vector<T, AlignedAllocator<T>>;
using Floats = aligned_vector<float>;

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}
static inline float to_float(int8_t x) { return x; }
static inline void round_to(float x, float &into) { into = x; }
static inline void round_to(float x, bf16 &into) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  // To nearest, ties to even. NaN is separate, because the addition could turn it into a number.
  into.bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

// Small numbers as integers. By themselves some compilers convert such vectors number by number.
static inline ivec widened(const int8_t *from) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__SSE4_1__)
  int32_t four;
  memcpy(&four, from, sizeof four);
  return (ivec)_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four));
#else
  typedef int8_t bytes __attribute__((vector_size(LANES)));
  bytes result;
  memcpy(&result, from, sizeof result);
  return __builtin_convertvector(result, ivec);
#endif
}
static inline ivec widened(const uint16_t *from) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
  typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
  halves result;
  memcpy(&result, from, sizeof result);
  return __builtin_convertvector(result, ivec);
#endif
}

// Loads and stores by one instruction. For memcpy some compilers generate several, through the stack.
static inline vec load(const float *from) { return *(const vec *)from; }
static inline vec load(const bf16 *from) { return (vec)(widened(&from->bits) << 16); }
static inline vec load(const int8_t *from) { return __builtin_convertvector(widened(from), vec); }
static inline void store(float *to, vec x) { *(vec *)to = x; }
static inline vec broadcast(float x) { return vec{} + x; }
static inline vec max(vec a, vec b) { return a > b ? a : b; }
static inline ivec count_up() {
  ivec result;
  for (int i = 0; i < LANES; i++) result[i] = i;
  return result;
}
// A bit for each lane of a comparison.
static inline uint32_t bits_of(ivec is) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)is);
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)is);
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)is);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= uint32_t(is[i] & 1) << i;
  return bits;
#endif
}
// x where first <= lane <= last, else other.
static inline vec within(ivec lane, int first, int last, vec x, vec other) {
  return ((lane >= first) & (lane <= last)) ? x : other;
}

// e^x for x <= 0 to 2e-7, zero below -80: negligible beside the largest weight of a row, which is one. NaN stays NaN.
// The polynomial 1 + r + r^2 q(r) errs by 3e-9 of itself where |r| <= log(2) / 2.
static inline vec exponential(vec x) {
  // 1.5 * 2^23 rounds to an integer in the lowest bits; 127 makes these the exponent of a float.
  constexpr float ROUND = 12582912.0f + 127.0f;
  const vec shifted = x * 1.44269504f + ROUND;
  const vec whole = shifted - ROUND;
  const vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // log 2 in two parts
  vec p = r * 1.38145988e-3f + 8.36871658e-3f;
  p = p * r + 4.16683890e-2f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return x < -80.0f ? vec{} : p * (vec)((ivec)shifted << 23);
}

// log x of positive normal numbers to 1e-7 of itself or of one: Cephes' polynomial between the roots of 1/2 and 2.
static inline vec logarithm(vec x) {
  constexpr int32_t ROOT = 0x3f3504f3;  // the bits of the root of 1/2
  const ivec power = ((ivec)x - ROOT) >> 23;
  const vec r = (vec)((ivec)x - (power << 23)) - 1.0f, whole = __builtin_convertvector(power, vec);
  vec p = r * 7.0376836292e-2f - 1.1514610310e-1f;
  for (const float next : {1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                           -2.4999993993e-1f, 3.3333331174e-1f})
    p = p * r + next;
  return (p * r * r * r - whole * 2.12194440e-4f) - 0.5f * r * r + r + whole * 0.693359375f;
}

// The lanes `lane` of two vectors, of which the second has the lanes from LANES on. Clang compiles a loop over lanes to
// moves of single numbers.
template <int... lane>
static inline vec lanes_of(vec a, vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lane...);
#else
  return __builtin_shuffle(a, b, ivec{lane...});
#endif
}

// Swaps lanes i and i ^ step.
template <int step, int... i>
static inline vec crossed_of(vec x, std::integer_sequence<int, i...>) {
  return lanes_of<(i ^ step)...>(x, x);
}
template <int step>
static inline vec crossed(vec x) {
  return crossed_of<step>(x, std::make_integer_sequence<int, LANES>());
}

template <int step = LANES / 2, class Join>
static inline float over_lanes(vec x, Join join) {
  if constexpr (step == 0)
    return x[0];
  else
    return over_lanes<step / 2>(join(x, crossed<step>(x)), join);
}
static inline float sum_of_lanes(vec x) { return over_lanes(x, [](vec a, vec b) { return a + b; }); }
static inline float max_of_lanes(vec x) { return over_lanes(x, [](vec a, vec b) { return max(a, b); }); }

// The inner product of two rows.
static inline float product(const float *x, const float *y, int count) {
  count_multiply_adds(count);
  vec sum = {};
  int d = 0;
  for (; d + LANES <= count; d += LANES) sum += load(x + d) * load(y + d);
  float result = sum_of_lanes(sum);
  for (; d < count; d++) result += x[d] * y[d];
  return result;
}

// Adds `scale` times a row of any dtype.
template <class T>
static inline void add(float *to, const T *from, float scale, int64_t count) {
  count_multiply_adds(count);
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) store(to + d, load(to + d) + load(from + d) * scale);
  for (; d < count; d++) to[d] += to_float(from[d]) * scale;
}

// For rows padded to a multiple of FILL.
static inline void copy(float *to, const float *from, int count) {
  for (int d = 0; d < count; d += LANES) store(to + d, load(from + d));
}
static inline void scale(float *to, float by, int count) {
  count_multiply_adds(count);
  for (int d = 0; d < count; d += LANES) store(to + d, load(to + d) * by);
}

// One step of a transposition: swaps the lanes of a whose bit `step` is set with the lanes of b where it is not.
template <int step, int... i>
static inline __attribute__((always_inline)) void exchange_of(vec &a, vec &b, std::integer_sequence<int, i...>) {
  const vec low = lanes_of<(i & step ? LANES + i - step : i)...>(a, b);
  b = lanes_of<(i & step ? LANES + i : i + step)...>(a, b);
  a = low;
}
template <int step>
static inline __attribute__((always_inline)) void exchange(vec &a, vec &b) {
  exchange_of<step>(a, b, std::make_integer_sequence<int, LANES>());
}

// Transposes LANES vectors. Once unrolled, everything stays in registers.
template <int step>
static inline __attribute__((always_inline)) void transpose_step(vec (&x)[LANES]) {
  if constexpr (step > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & step)) exchange<step>(x[i], x[i + step]);
    transpose_step<step / 2>(x);
  }
}

}  // namespace fewkeys
