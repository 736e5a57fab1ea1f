// Vectors of floats as wide as the machine's, and the two products that attention is made of.
//
// Queries (or keys) stand side by side: a tile holds TILE of them, one in each lane, dimension after dimension. So rows
// of scores are vectors too, and no score is ever summed across lanes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12, ABREAST = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6, ABREAST = 2;
#else
constexpr int LANES = 4, ROWS = 6, ABREAST = 2;
#endif
// ROWS x 2 sums fill the registers, but for the two vectors and the number that are multiplied.
constexpr int TILE = 32, WIDE = TILE / LANES;
// Rows of values are filled up to a multiple of this; the widest vector divides it.
constexpr int FILL = 16;
constexpr int SOME = 4;  // rows that are mixed at once
static inline int filled(int64_t dim) { return (dim + FILL - 1) / FILL * FILL; }

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct bf16 {
  uint16_t bits;
};

// Numbers that begin where a line of the cache does.
template <class T>
struct Lined {
  typedef T value_type;
  static constexpr std::align_val_t LINE{64};
  Lined() = default;
  template <class U>
  Lined(const Lined<U> &) {}
  T *allocate(size_t count) { return (T *)::operator new(count * sizeof(T), LINE); }
  void deallocate(T *held, size_t) { ::operator delete(held, LINE); }
  bool operator==(const Lined &) const { return true; }
  bool operator!=(const Lined &) const { return false; }
};
template <class T>
using Numbers = std::vector<T, Lined<T>>;

// (B, H, N, dim) in any layout whose last dimension is dense; strides are counted in elements
struct Rows {
  const void *data;
  int64_t batch, head, row;
  template <class T>
  const T *at(int64_t b, int64_t h, int64_t n) const {
    return (const T *)data + b * batch + h * head + n * row;
  }
};

static inline float number(float x) { return x; }
static inline float number(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}
static inline void put(float x, float &into) { into = x; }
static inline void put(float x, bf16 &into) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  // To nearest, ties to even; the sum would carry a NaN over to a number.
  into.bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

// One move each. Through memcpy, compilers split moves as they think best for the processor, and do so through the stack.
static inline vec load(const float *from) { return *(const vec *)from; }
static inline vec load(const bf16 *from) {
  typedef uint16_t half __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
  half bits;
  memcpy(&bits, from, sizeof bits);
  return (vec)(__builtin_convertvector(bits, ivec) << 16);
}
static inline void store(float *to, vec x) { *(vec *)to = x; }
static inline vec all(float x) { return vec{} + x; }
static inline vec larger(vec a, vec b) { return a > b ? a : b; }
static inline ivec count_up() {
  ivec found;
  for (int i = 0; i < LANES; i++) found[i] = i;
  return found;
}
// x where first <= lane <= last, else other.
static inline vec within(ivec lane, int first, int last, vec x, vec other) {
  return (lane >= first) & (lane <= last) ? x : other;
}

// e^x for x <= 0 to 2e-7, zero below -80: beside the largest weight of a row, one, that is nothing. NaN stays NaN.
static inline vec exponential(vec x) {
  const vec safe = x < -80.0f ? all(-80.0f) : x;
  const vec shifted = safe * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the lowest bits
  const ivec power = (ivec)shifted << 23;
  const vec whole = shifted - 12582912.0f;
  const vec r = safe - whole * 0.693359375f + whole * 2.12194440e-4f;  // log 2 in two parts
  vec p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const vec found = (vec)((ivec)p + power);
  return x < -80.0f ? all(0.0f) : x == x ? found : x;
}

// Lanes i and i ^ step change places.
template <int step>
static inline vec crossed(vec x) {
#if defined(__clang__)
  vec found;
  for (int i = 0; i < LANES; i++) found[i] = x[i ^ step];
  return found;
#else
  return __builtin_shuffle(x, count_up() ^ step);
#endif
}

template <int step = LANES / 2>
static inline float total_of(vec x) {
  if constexpr (step == 0)
    return x[0];
  else
    return total_of<step / 2>(x + crossed<step>(x));
}

// Products of two rows of whole vectors, still to be summed.
static inline vec products(const float *x, const float *y, int count) {
  vec sum = {};
  for (int d = 0; d < count; d += LANES) sum += load(x + d) * load(y + d);
  return sum;
}

// The inner product of two rows.
static inline float product(const float *x, const float *y, int count) {
  const int whole = count / LANES * LANES;
  float found = total_of(products(x, y, whole));
  for (int d = whole; d < count; d++) found += x[d] * y[d];
  return found;
}

// Adds a row of any type.
template <class T>
static inline void add(float *to, const T *from, float share, int64_t count) {
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) store(to + d, load(to + d) + load(from + d) * share);
  for (; d < count; d++) to[d] += number(from[d]) * share;
}

// Of rows filled up to a multiple of FILL.
static inline void copy(float *to, const float *from, int count) {
  for (int d = 0; d < count; d += LANES) store(to + d, load(from + d));
}
static inline void scale(float *to, float by, int count) {
  for (int d = 0; d < count; d += LANES) store(to + d, load(to + d) * by);
}

// One step of transposing: where bit `step` of the lane is set, lanes of a and b change sides.
template <int step>
static inline __attribute__((always_inline)) void exchange(vec &a, vec &b) {
#if defined(__clang__)
  vec low, high;
  for (int i = 0; i < LANES; i++) {
    low[i] = i & step ? b[i - step] : a[i];
    high[i] = i & step ? b[i] : a[i + step];
  }
#else
  ivec from_low = {}, from_high = {};
  for (int i = 0; i < LANES; i++) {
    from_low[i] = i & step ? LANES + i - step : i;
    from_high[i] = i & step ? LANES + i : i + step;
  }
  const vec low = __builtin_shuffle(a, b, from_low), high = __builtin_shuffle(a, b, from_high);
#endif
  a = low;
  b = high;
}

// All in registers, once unrolled.
template <int step>
static inline __attribute__((always_inline)) void transpose(vec (&x)[LANES]) {
  if constexpr (step > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & step)) exchange<step>(x[i], x[i + step]);
    transpose<step / 2>(x);
  }
}

// The rows at(0), at(1), .. (count, dim) of any type, turned into lanes (dim, TILE) and scaled; lanes beyond count are
// zero.
template <class At>
static __attribute__((noinline)) void turn(At at, int count, int dim, float scale, float *into) {
  for (int part = 0; part < TILE; part += LANES) {
    int d = 0;
    for (; d + LANES <= dim; d += LANES) {
      vec x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) x[i] = part + i < count ? load(at(part + i) + d) * scale : vec{};
      transpose<LANES / 2>(x);
#pragma GCC unroll 16
      for (int e = 0; e < LANES; e++) store(into + (d + e) * TILE + part, x[e]);
    }
    for (; d < dim; d++)
      for (int i = 0; i < LANES; i++)
        into[d * TILE + part + i] = part + i < count ? number(at(part + i)[d]) * scale : 0.0f;
  }
}

template <class T>
static void to_lanes(const T *rows, int64_t stride, int count, int dim, float scale, float *into) {
  turn([=](int i) { return rows + i * stride; }, count, dim, scale, into);
}

template <int R>
static __attribute__((noinline)) void dots_of(const float *row, int64_t stride, int dim, const float *lanes,
                                              float *into) {
  for (int part = 0; part < TILE; part += 2 * LANES) {
    vec sum[R][2] = {};
    const float *x = lanes + part;
    for (int d = 0; d < dim; d++, x += TILE) {
      const vec a = load(x), b = load(x + LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        sum[r][0] += a * row[r * stride + d];
        sum[r][1] += b * row[r * stride + d];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {  // unrolled like the loop above: sums that are ever indexed live in memory
      store(into + r * TILE + part, sum[r][0]);
      store(into + r * TILE + part + LANES, sum[r][1]);
    }
  }
}

// The same for `count` rows, at most R.
template <int R>
static inline void dots_up_to(int count, const float *row, int64_t stride, int dim, const float *lanes, float *into) {
  if constexpr (R > 0) {
    if (count == R)
      dots_of<R>(row, stride, dim, lanes, into);
    else
      dots_up_to<R - 1>(count, row, stride, dim, lanes, into);
  }
}

// Inner products (count, TILE) of rows (count, dim) with lanes (dim, TILE).
static inline void dots(const float *row, int64_t stride, int count, int dim, const float *lanes, float *into) {
  int c = 0;
  for (; c + ROWS <= count; c += ROWS) dots_of<ROWS>(row + c * stride, stride, dim, lanes, into + c * TILE);
  dots_up_to<ROWS - 1>(count - c, row + c * stride, stride, dim, lanes, into + c * TILE);
}

template <int Q, int V>
static __attribute__((noinline)) void mix_of(const float *value, int64_t stride, int count, const float *weight,
                                             int64_t pitch, float *into, int64_t to) {
  vec sum[Q][V];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sum[q][v] = load(into + q * to + v * LANES);
  for (int c = 0; c < count; c++, value += stride, weight += pitch) {
    vec x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) x[v] = load(value + v * LANES);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sum[q][v] += x[v] * weight[q];
  }
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(into + q * to + v * LANES, sum[q][v]);
}

// Adds to rows (Q, dim) the values (count, dim) under weights (count, Q), `pitch` apart; FILL divides dim.
template <int Q>
static inline void mix(const float *value, int64_t stride, int count, int dim, const float *weight, int64_t pitch,
                       float *into, int64_t to) {
  int v = 0;
  constexpr int STEP = ABREAST * LANES;
  for (; v + STEP <= dim; v += STEP) mix_of<Q, ABREAST>(value + v, stride, count, weight, pitch, into + v, to);
  for (; v + LANES <= dim; v += LANES) mix_of<Q, 1>(value + v, stride, count, weight, pitch, into + v, to);
}
