// Scores of keys by their codes: (sum * 1024 / wide * sigma + 2^14) >> 15, where sum = sum_d query_d level_d.
//
// By tables: a nibble holds two numbers of a key. So a table of 16 bytes in a register has all that two of a query's
// numbers can give, and one shuffle looks up 16 keys. A table's numbers are from 4 to 124: those of two tables fit into
// a byte. Bytes are added up as numbers of 16 bits, which wrap, and their upper halves once more, which gives the lower.
// By the matrix unit, where there are many queries: levels are written out once for all of them.
#pragma once
#include "codes.h"
#include "matrix.h"
#if defined(__SSSE3__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fewkeys {

#if defined(__AVX512BW__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
// Queries that are scanned at once: each has four sums in registers, of which the widest and NEON have 32.
constexpr int ABREAST_ROWS = ROWS == 12 ? 4 : 2;
constexpr int MIDDLE = 64;        // what a table adds to its numbers
constexpr int LARGEST_WIDE = 1024;  // a sum of more numbers would not fit into 16 bits

typedef uint8_t bytes __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint16_t shorts __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef int16_t eight __attribute__((vector_size(16), aligned(2), may_alias));

static inline bytes look_up(bytes table, bytes index) {
#if defined(__AVX512BW__)
  return (bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
  return (bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(__SSSE3__)
  return (bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#elif defined(__aarch64__)
  return (bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
  bytes number;
  for (int i = 0; i < BYTES; i++) number[i] = table[index[i]];
  return number;
#endif
}

// (a b + 2^14) >> 15.
static inline eight scaled(eight a, eight b) {
#if defined(__SSSE3__)
  return (eight)_mm_mulhrs_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (eight)vqrdmulhq_s16((int16x8_t)a, (int16x8_t)b);
#else
  for (int i = 0; i < 8; i++) a[i] = (a[i] * b[i] + 0x4000) >> 15;
  return a;
#endif
}

// The sum of a register's parts, which are of different pairs.
static inline eight over_parts(shorts x) {
  eight part[BYTES / 16], sum = {};
  memcpy(part, &x, sizeof x);
  for (const eight &one : part) sum += one;
  return sum;
}

// Scores of R queries by their tables (R, pairs, 16): (R, 32 blocks), `pitch` apart.
template <int R>
static __attribute__((noinline)) void scores_by_tables(const uint8_t *packed, const int16_t *sigma, int64_t blocks,
                                                       int64_t pairs, const uint8_t *tables, int16_t *score,
                                                       int64_t pitch) {
  const int64_t bytes_each = pairs * TABLE;
  const int16_t middle = MIDDLE * pairs, unit = LARGEST_WIDE / 2 / pairs;
  count_multiply_adds(R * blocks * pairs * TABLE);
  for (int64_t b = 0; b < blocks; b++, packed += bytes_each, sigma += CODED, score += CODED) {
    shorts all[R][2] = {}, upper[R][2] = {};
    for (int64_t at = 0; at < bytes_each; at += 2 * BYTES) {
      const bytes first = *(const bytes *)(packed + at), second = *(const bytes *)(packed + at + BYTES);
      const bytes code[2][2] = {{first & 15, second & 15}, {first >> 4, second >> 4}};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const uint8_t *own = tables + r * bytes_each + at;
        const bytes one = *(const bytes *)own, other = *(const bytes *)(own + BYTES);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          const shorts sum = (shorts)(look_up(one, code[half][0]) + look_up(other, code[half][1]));
          all[r][half] += sum;
          upper[r][half] += sum >> 8;
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const eight high = over_parts(upper[r][half]), low = over_parts(all[r][half]) - (high << 8);
        const eight *factor = (const eight *)(sigma + half * CODED / 2);
        eight *to = (eight *)(score + r * pitch + half * CODED / 2);
        to[0] = scaled((low - middle) * unit, factor[0]), to[1] = scaled((high - middle) * unit, factor[1]);
      }
  }
}

class TableScores {
 public:
  TableScores(int most, int64_t wide) : pairs(wide / 2), tables(most * pairs * TABLE) {}

  // The integers (rows, wide) of queries.
  void set(const int8_t *query, int rows) {
    this->rows = rows;
    uint8_t *to = tables.data();
    for (const int8_t *end = query + rows * 2 * pairs; query < end; query += 2, to += TABLE)
      for (int c = 0; c < TABLE; c++)
        to[c] = MIDDLE + query[0] * (2 * (c & 3) - 3) + query[1] * (2 * (c >> 2) - 3);
  }

  void write(const uint8_t *packed, const int16_t *sigma, int64_t blocks, int16_t *score, int64_t pitch) const {
    const uint8_t *own = tables.data();
    const auto run = [&](auto scores, int count) {
      scores(packed, sigma, blocks, pairs, own, score, pitch);
      own += count * pairs * TABLE, score += count * pitch;
    };
    int left = rows;
    for (; left >= ABREAST_ROWS; left -= ABREAST_ROWS) run(scores_by_tables<ABREAST_ROWS>, ABREAST_ROWS);
    if (left == 3) run(scores_by_tables<3>, 3);
    if (left == 2) run(scores_by_tables<2>, 2);
    if (left == 1) run(scores_by_tables<1>, 1);
  }

 private:
  const int64_t pairs;
  int rows = 0;
  aligned_vector<uint8_t> tables;
};

#ifdef FEWKEYS_MATRIX
// Of TILE queries, numbers filled up to `deep`, 64 at a time. The unit's B is 16 rows of 16 keys, four numbers each.
class MatrixScores {
 public:
  static constexpr int DEEP = 64;

  explicit MatrixScores(int64_t wide)
      : wide(wide), deep(round_up(wide, DEEP)), query(TILE * deep), level(2 * deep * EDGE), sum(TILE * CODED) {}

  void set(const int8_t *integers, int rows) {
    this->rows = rows;
    for (int i = 0; i < rows; i++) std::copy_n(integers + i * wide, wide, &query[i * deep]);
    written(query.data());
  }

  __attribute__((noinline)) void write(const uint8_t *packed, const int16_t *sigma, int64_t blocks, int16_t *score,
                                       int64_t pitch) {
    const __m512i unit = _mm512_set1_epi16(LARGEST_WIDE / wide);
    count_multiply_adds(blocks * CODED * rows * deep);
    for (int64_t b = 0; b < blocks; b++, packed += wide / 2 * TABLE, sigma += CODED, score += CODED) {
      unpack(packed);
      clear_sums();
      for (int64_t d = 0; d < deep; d += DEEP) {
        const int8_t *row = &query[d], *own = &level[d * 2 * EDGE];
        _tile_loadd(4, row, deep);
        _tile_loadd(5, row + EDGE * deep, deep);
        _tile_loadd(6, own, DEEP);
        _tile_loadd(7, own + EDGE * DEEP, DEEP);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
      store_sums(sum.data(), sum.data() + EDGE * TILE);
      const __m512i factor = _mm512_loadu_si512(sigma);
      for (int i = 0; i < rows; i++) {
        const __m256i low = _mm512_cvtepi32_epi16(_mm512_loadu_si512(&sum[i * CODED]));
        const __m256i high = _mm512_cvtepi32_epi16(_mm512_loadu_si512(&sum[i * CODED + EDGE]));
        const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        _mm512_storeu_si512(score + i * pitch, _mm512_mulhrs_epi16(_mm512_mullo_epi16(all, unit), factor));
      }
    }
  }

 private:
  const int64_t wide, deep;
  int rows = 0;
  AmxProducts::Session session;
  aligned_vector<int8_t> query;  // (TILE, deep)
  aligned_vector<int8_t> level;  // (deep / DEEP, halves of a block, DEEP / 4, EDGE, 4)
  aligned_vector<float> sum;     // (TILE, CODED), of 32 bits each

  // Writes out the levels of a block: two pairs of numbers are a row of each half.
  void unpack(const uint8_t *packed) {
    alignas(64) uint8_t place[64];
    for (int i = 0; i < 64; i++) place[i] = i / 4 % 8 * 2 + i / 32 + (i & 2) * 8;
    const __m512i order = _mm512_load_si512(place), mask = _mm512_set1_epi32(0x0c030c03);
    const __m512i number = _mm512_broadcast_i32x4(_mm_setr_epi8(-3, -1, 1, 3, -1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0));
    const auto levels = [&](__m512i x) { return _mm512_shuffle_epi8(number, _mm512_and_si512(x, mask)); };
    for (int64_t d = 0; d < wide; d += 4, packed += 2 * TABLE) {
      const __m256i both = _mm256_loadu_si256((const __m256i *)packed);
      const __m512i x = _mm512_permutexvar_epi8(order, _mm512_castsi256_si512(both));
      int8_t *to = &level[d / DEEP * DEEP * 2 * EDGE + d % DEEP * EDGE];
      _mm512_storeu_si512(to, levels(x));
      _mm512_storeu_si512(to + EDGE * DEEP, levels(_mm512_srli_epi16(x, 4)));
    }
    written(level.data());
  }
};
#endif

}  // namespace fewkeys
