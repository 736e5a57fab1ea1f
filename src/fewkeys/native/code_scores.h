// Scores of keys by their codes: (sum * 1024 / wide * sigma + 2^14) >> 15, where sum = sum_d query_d level_d.
//
// A piece of blocks is scored at once, here by tables; for many queries `byte_scores.h` is faster on processors that
// multiply bytes.
//
// A nibble is the code of two dimensions of a key. The products of two dimensions of a query with all 16 codes are a
// table of 16 bytes in a register, and one shuffle looks up 16 keys. Entries are from 4 to 124, so the sum of two fits
// into a byte. Pairs of bytes are added as 16-bit numbers, which wrap around. A second sum, of the upper bytes alone,
// separates the two halves at the end.
#pragma once
#include "codes.h"

namespace fewkeys {

#if defined(__AVX512BW__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
// Queries that are scored at once. Each needs four sums in registers; AVX-512 and NEON have 32 registers.
constexpr int ABREAST_ROWS = ROWS == 12 ? 4 : 2;
constexpr int MIDDLE = 64;        // added to the entries of a table, so that they are positive
constexpr int LARGEST_WIDE = 1024;  // a sum of more numbers would not fit into 16 bits

// Blocks of a key head, in rising order.
struct Piece {
  const uint8_t *packed;  // of the head
  const int16_t *sigma;
  int64_t blocks;
  int32_t block[TOGETHER];
};

// The scores of a piece for TILE queries, and one bit for each score: 1 if it is above the query's bound.
struct PieceScores {
  alignas(64) int16_t score[TOGETHER][TILE][CODED];
  alignas(64) uint32_t above[TOGETHER][TILE];
};

typedef uint8_t bytes __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint16_t shorts __attribute__((vector_size(BYTES), aligned(1), may_alias));

static inline bytes look_up(bytes table, bytes index) {
#if defined(__AVX512BW__)
  return (bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
  return (bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(__SSSE3__)
  return (bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#else
  return (bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#endif
}

// (a b + 2^14) >> 15.
static inline eight scaled(eight a, eight b) {
#if defined(__SSSE3__)
  return (eight)_mm_mulhrs_epi16((__m128i)a, (__m128i)b);
#else
  return (eight)vqrdmulhq_s16((int16x8_t)a, (int16x8_t)b);
#endif
}

// Writes the scores of a block for one query, and returns the bits of those above a bound. `all` and `upper`: the sums
// of 16-bit numbers and of their upper bytes, for both halves of the block; the 128-bit parts of a register are sums
// over different dimensions.
static inline uint32_t finish(const shorts (&all)[2], const shorts (&upper)[2], uint16_t middle, int16_t unit,
                              const int16_t *sigma, int16_t bound, int16_t *score) {
#if defined(__AVX512BW__)
  // Adds the upper to the lower 256 bits of two registers, then the parts of both results: four registers become one.
  const auto of_two = [](shorts a, shorts b) {
    return _mm512_add_epi16(_mm512_shuffle_i64x2((__m512i)a, (__m512i)b, 0x44),
                            _mm512_shuffle_i64x2((__m512i)a, (__m512i)b, 0xee));
  };
  const __m512i first = of_two(all[0], upper[0]), second = of_two(all[1], upper[1]);
  const __m512i sum =
      _mm512_add_epi16(_mm512_shuffle_i64x2(first, second, 0x88), _mm512_shuffle_i64x2(first, second, 0xdd));
  const __m512i raised = _mm512_slli_epi16(sum, 8);
  const __m512i low_sum = _mm512_sub_epi16(sum, _mm512_maskz_shuffle_i64x2(0x33, raised, raised, 0xf5));
  const __m512i centred = _mm512_sub_epi16(low_sum, _mm512_set1_epi16(middle));
  const __m512i factor = _mm512_mullo_epi16(centred, _mm512_set1_epi16(unit));
  const __m512i x = _mm512_mulhrs_epi16(factor, _mm512_loadu_si512(sigma));
  _mm512_store_si512(score, x);
  return _mm512_cmpgt_epi16_mask(x, _mm512_set1_epi16(bound));
#else
  typedef uint16_t eight_sums __attribute__((vector_size(16)));
  // The sum of a register's 128-bit parts, modulo 2^16.
  const auto over_parts = [](shorts x) {
    eight_sums part[BYTES / 16], sum = {};
    memcpy(part, &x, sizeof x);
    for (const eight_sums &one : part) sum += one;
    return sum;
  };
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const eight_sums high = over_parts(upper[half]), low = over_parts(all[half]) - (high << 8);
    const eight *factor = (const eight *)(sigma + half * CODED / 2);
    eight *at = (eight *)(score + half * CODED / 2);
    at[0] = scaled((eight)(low - middle) * unit, factor[0]);
    at[1] = scaled((eight)(high - middle) * unit, factor[1]);
  }
  return bits_above(score, bound);
#endif
}

// Scores the queries i .. i + R - 1 by their tables (R, pairs, 16).
template <int R>
static __attribute__((noinline)) void scores_by_tables(const Piece &piece, int64_t pairs, const uint8_t *tables,
                                                       const int16_t *bound, int i, PieceScores &to) {
  const int64_t bytes_each = pairs * TABLE;
  const uint16_t middle = MIDDLE * pairs;
  const int16_t unit = LARGEST_WIDE / 2 / pairs;
  count_multiply_adds(R * piece.blocks * pairs * TABLE);
  for (int64_t b = 0; b < piece.blocks; b++) {
    const uint8_t *packed = piece.packed + piece.block[b] * bytes_each;
    const int16_t *sigma = piece.sigma + piece.block[b] * CODED;
    shorts all[R][2] = {}, upper[R][2] = {};
    for (int64_t at = 0; at < bytes_each; at += 2 * BYTES) {
      const bytes first = *(const bytes *)(packed + at), second = *(const bytes *)(packed + at + BYTES);
      const bytes code[2][2] = {{first & 15, second & 15}, {first >> 4, second >> 4}};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const uint8_t *table = tables + r * bytes_each + at;
        const bytes one = *(const bytes *)table, other = *(const bytes *)(table + BYTES);
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
      to.above[b][i + r] = finish(all[r], upper[r], middle, unit, sigma, bound[i + r], to.score[b][i + r]);
  }
}

class TableScores {
 public:
  static constexpr int AT_ONCE = TOGETHER;

  explicit TableScores(int64_t wide) : pairs(wide / 2) {}

  // The integers (rows, wide) of queries.
  void set(const int8_t *query, int rows) {
    this->rows = rows;
    tables.resize(rows * pairs * TABLE);
    uint8_t *to = tables.data();
    for (const int8_t *end = query + rows * 2 * pairs; query < end; query += 2, to += TABLE)
      for (int c = 0; c < TABLE; c++)
        to[c] = MIDDLE + query[0] * (2 * (c & 3) - 3) + query[1] * (2 * (c >> 2) - 3);
  }

  void write(const Piece &piece, const int16_t *bound, PieceScores &to) const {
    int i = 0;
    const auto run = [&](auto scores, int count) {
      scores(piece, pairs, &tables[i * pairs * TABLE], bound, i, to);
      i += count;
    };
    while (rows - i >= ABREAST_ROWS) run(scores_by_tables<ABREAST_ROWS>, ABREAST_ROWS);
    if (rows - i == 3) run(scores_by_tables<3>, 3);
    if (rows - i == 2) run(scores_by_tables<2>, 2);
    if (rows - i == 1) run(scores_by_tables<1>, 1);
  }

 private:
  const int64_t pairs;
  int rows = 0;
  aligned_vector<uint8_t> tables;
};

}  // namespace fewkeys
