// Products of bfloat16 on the matrix unit (AMX), summed in float32, where the machine has one.
//
// The unit adds A B to C: A holds 16 rows of 32 numbers, B 32 rows of 16, of which it wants two rows' numbers side by
// side, C 16 x 16 sums. Scores are keys x queries: keys are A, row by row. Sums of values are dimensions x queries:
// weights are B, in the order in which scores come, and values are transposed once for all queries.
#pragma once
#include "columns.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define FEWKEYS_MATRIX
#include <sys/syscall.h>
#include <unistd.h>

namespace fewkeys {

constexpr int EDGE = 16;  // rows of a tile of the unit

typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// Two numbers as bfloat16 side by side, rounded to nearest.
static inline uvec pair(vec low, vec high) {
  return ((uvec)low + 0x8000) >> 16 | (((uvec)high + 0x8000) & 0xffff0000);
}

// EDGE floats of a row of `dim` from d on, zeros beyond its end.
template <class R>
static inline vec floats_of(const R *row, int d, int dim) {
  if (d + EDGE <= dim) return load(row + d);
  vec result = {};
  for (int e = d; e < dim; e++) result[e - d] = to_float(row[e]);
  return result;
}

// STEP numbers of a row of `dim` from d on as bfloat16, zeros beyond its end.
static inline vec numbers_of(const bf16 *row, int d, int dim) {
  vec result = {};
  if (d + STEP <= dim)
    memcpy(&result, row + d, sizeof result);
  else
    memcpy(&result, row + d, (dim - d) * sizeof(bf16));
  return result;
}
static inline vec numbers_of(const float *row, int d, int dim) {
  const vec low = floats_of(row, d, dim), high = floats_of(row, d + EDGE, dim);
  const auto both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  vec result;
  memcpy(&result, &both, sizeof result);
  return result;
}

// Transposes EDGE rows of EDGE numbers of 32 bits; compiled once.
static __attribute__((noinline)) void transpose_block(vec *rows) {
  vec x[EDGE];
#pragma GCC unroll 16
  for (int i = 0; i < EDGE; i++) x[i] = rows[i];
  transpose_step<EDGE / 2>(x);
#pragma GCC unroll 16
  for (int i = 0; i < EDGE; i++) rows[i] = x[i];
}

// The same from and to wherever they lie.
template <class From, class To>
static inline void transpose_square(From from, To to) {
  alignas(64) vec x[EDGE];
  for (int i = 0; i < EDGE; i++) x[i] = from(i);
  transpose_block(x);
  for (int i = 0; i < EDGE; i++) to(i, x[i]);
}

// The compiler does not know that the unit reads memory, and could otherwise delay or omit writes to it.
static inline void written(const void *there) { asm volatile("" : : "r"(there) : "memory"); }

// Four tiles of the unit hold the sums of TILE queries: EDGE rows above, and as many below.
static inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
static inline void load_sums(const float *above, const float *below) {
  constexpr int PITCH = TILE * sizeof(float);
  _tile_loadd(0, above, PITCH);
  _tile_loadd(1, above + EDGE, PITCH);
  _tile_loadd(2, below, PITCH);
  _tile_loadd(3, below + EDGE, PITCH);
}
static inline void store_sums(float *above, float *below) {
  constexpr int PITCH = TILE * sizeof(float);
  _tile_stored(0, above, PITCH);
  _tile_stored(1, above + EDGE, PITCH);
  _tile_stored(2, below, PITCH);
  _tile_stored(3, below + EDGE, PITCH);
}
// Adds the products of rows, `pitch` bytes apart, with pairs (EDGE, TILE).
static inline void multiply(const bf16 *above, const bf16 *below, int64_t pitch, const float *pairs) {
  count_multiply_adds(2 * EDGE * TILE * STEP);
  constexpr int PITCH = TILE * sizeof(float);
  _tile_loadd(4, above, pitch);
  _tile_loadd(5, below, pitch);
  _tile_loadd(6, pairs, PITCH);
  _tile_loadd(7, pairs + EDGE, PITCH);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

struct AmxProducts {
  typedef bf16 Number;

  // Linux lends the unit to a process on request.
  static bool is_there() {
    constexpr int ASK = 0x1023, TILES = 18;
    static const bool lent = syscall(SYS_arch_prctl, ASK, TILES) == 0;
    return lent;
  }

  struct Session {
    Session() {
      struct {
        uint8_t palette = 1, start = 0, none[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
      } shape;
      for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = EDGE;
      written(&shape);
      _tile_loadconfig(&shape);
    }
    // The destructor of a copy would release the unit of the thread.
    Session(const Session &) = delete;
    ~Session() { _tile_release(); }
  };

  class Queries {
   public:
    explicit Queries(int dim) : dim(dim), deep(round_up(dim, STEP)), pairs(deep / 2 * TILE) {}

    void set(const bf16 *rows, int64_t stride, int count) {
      take([=](int i) { return rows + i * stride; }, count);
    }
    void set(const bf16 *const *rows, int count) {
      take([=](int i) { return rows[i]; }, count);
    }

   private:
    friend AmxProducts;
    const int dim, deep;
    aligned_vector<float> pairs;  // (dimensions / 2, TILE)

    template <class RowAt>
    void take(RowAt row_at, int count) {
      for (int part = 0; part < TILE; part += EDGE)
        for (int d = 0; d < deep; d += STEP)
          transpose_square(
              [&](int i) { return part + i < count ? numbers_of(row_at(part + i), d, dim) : vec{}; },
              [&](int i, vec x) { store(&pairs[(d / 2 + i) * TILE + part], x); });
    }
  };

  class Mixed {
   public:
    explicit Mixed(int value_dim) : wide(round_up(value_dim)), sums(wide * TILE), transposed(TILE * wide) {}
    void clear() { std::fill(sums.begin(), sums.end(), 0.0f); }

    float *rows() {
      for (int part = 0; part < TILE; part += EDGE)
        for (int d = 0; d < wide; d += EDGE)
          transpose_square([&](int i) { return load(&sums[(d + i) * TILE + part]); },
                      [&](int i, vec x) { store(&transposed[(part + i) * wide + d], x); });
      return transposed.data();
    }

   private:
    friend AmxProducts;
    const int wide;
    aligned_vector<float> sums, transposed;  // (Dv, TILE), (TILE, Dv)
  };

  class Columns {
   public:
    Columns(int dim, int value_dim)
        : dim(dim), value_dim(value_dim), deep(round_up(dim, STEP)), wide(round_up(value_dim)) {}

    template <class R>
    void read(const R *keys, int64_t key_pitch, const R *values, int64_t value_pitch, int count) {
      take([=](int i) { return keys + i * key_pitch; }, [=](int i) { return values + i * value_pitch; }, count);
    }

    __attribute__((noinline)) void dots(const Queries &query, int count, float *score) const {
      written(query.pairs.data());
      for (int c = 0; c < count; c += STEP) {
        const bf16 *row = &key[c * deep];
        clear_sums();
        for (int d = 0; d < deep; d += STEP)
          multiply(row + d, row + EDGE * deep + d, deep * sizeof(bf16), &query.pairs[d / 2 * TILE]);
        store_sums(score + c * TILE, score + (c + EDGE) * TILE);
      }
    }

    // Weights beyond the queries' reach are zeros.
    template <class Reach>
    void mix(float *weight, int count, int, Reach, Mixed &into) const {
      for (int c = 0; c < count; c += 2)
        for (int v = 0; v < TILE; v += LANES) {
          const vec other = c + 1 < count ? load(weight + (c + 1) * TILE + v) : vec{};
          const uvec both = pair(load(weight + c * TILE + v), other);
          memcpy(weight + c / 2 * TILE + v, &both, sizeof both);
        }
      std::fill(weight + (count + 1) / 2 * TILE, weight + round_up(count, STEP) / 2 * TILE, 0.0f);
      mix_pairs(weight, count, into);
    }

   private:
    int dim, value_dim, deep, wide;
    aligned_vector<bf16> key;    // (count, D), both padded to STEP
    aligned_vector<bf16> value;  // (count / STEP, padded Dv, STEP)

    __attribute__((noinline)) void mix_pairs(const float *weight, int count, Mixed &into) const {
      written(weight);
      for (int d = 0; d < wide; d += 2 * EDGE) {
        // If the number of halves is odd, the last is summed twice.
        const int other = d + EDGE < wide ? EDGE : 0;
        float *sums = &into.sums[d * TILE];
        load_sums(sums, sums + other * TILE);
        for (int c = 0; c < count; c += STEP) {
          const bf16 *row = &value[(c / STEP * wide + d) * STEP];
          multiply(row, row + other * STEP, STEP * sizeof(bf16), weight + c / 2 * TILE);
        }
        store_sums(sums, sums + other * TILE);
      }
    }

    template <class KeyAt, class ValueAt>
    void take(KeyAt key_at, ValueAt value_at, int count) {
      const int64_t room = round_up(count, STEP);
      if ((int64_t)key.size() < room * deep) key.resize(room * deep), value.resize(room * wide);
      for (int i = 0; i < count; i++)
        for (int d = 0; d < deep; d += STEP) {
          const vec x = numbers_of(key_at(i), d, dim);
          memcpy(&key[i * deep + d], &x, sizeof x);
        }
      for (int c = 0; c < room; c += STEP)
        for (int d = 0; d < wide; d += EDGE)
          transpose_square(
              [&](int i) {
                const int low = c + 2 * i;
                const vec first = low < count ? floats_of(value_at(low), d, value_dim) : vec{};
                return (vec)pair(first, low + 1 < count ? floats_of(value_at(low + 1), d, value_dim) : vec{});
              },
              [&](int i, vec x) { store((float *)&value[((int64_t)c / STEP * wide + d + i) * STEP], x); });
    }
  };
};

}  // namespace fewkeys
#endif

namespace fewkeys {

// Calls `run` with the products of the dtype: of floats, or of bfloat16.
template <class Call>
static void with_products(int is_bf16, Call call) {
  if (!is_bf16) return call(LaneProducts<float>());
#ifdef FEWKEYS_MATRIX
  if (AmxProducts::is_there()) return call(AmxProducts());
#endif
  call(LaneProducts<bf16>());
}

}  // namespace fewkeys
