// Scores of keys by their codes: (sum * 1024 / wide * sigma + 2^14) >> 15, where sum = sum_d query_d level_d.
//
// By tables, for few queries: a nibble is the code of two dimensions of a key. The products of two dimensions of a
// query with all 16 codes are a table of 16 bytes in a register, and one shuffle looks up 16 keys. Entries are from 4
// to 124, so the sum of two tables fits into a byte. Pairs of bytes are added as 16-bit numbers, which wrap around. A
// second sum of the upper bytes alone makes it possible to separate the two halves at the end.
//
// By products of bytes, for many queries and on processors with such instructions: the levels of a block are unpacked
// once for all queries.
//
// Either way a piece of blocks is scored at once, and the scores of each query are compared with its bound.
#pragma once
#include "codes.h"
#include "matrix.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define FEWKEYS_LEVELS
#endif

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

// Writes the scores of a block for one query, and returns the bits of those above a bound. `all` and `upper`: the sums
// of 16-bit numbers and of their upper bytes, for both halves of the block. The 128-bit parts of a register are sums
// over different dimensions.
static inline uint32_t finish(const shorts (&all)[2], const shorts (&upper)[2], uint16_t middle, int16_t unit,
                              const int16_t *sigma, int16_t bound, int16_t *score) {
#if defined(__AVX512BW__)
  // Adds the upper to the lower 256 bits of two registers, then the parts of these two results: four registers become
  // one.
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

#ifdef FEWKEYS_LEVELS
// For each byte of an unpacked row (16 keys, four dimensions), which of 32 packed bytes has its code, for both halves.
struct ByteOf {
  alignas(64) uint8_t place[2][64];
  constexpr ByteOf() : place() {
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 64; i++) place[half][i] = (half * 4 + i / 4 % 4) * 2 + i / 16 % 2 + (i & 2) * 8;
  }
};
constexpr ByteOf BYTE_OF;
constexpr int KEYS = 16;  // of a row: half a block, four numbers of each
constexpr int DEEP = 64;  // numbers are filled up, so many at a time

// Queries and the levels of some blocks as bytes, whose products are the sums of scores: with the factor of queries,
// that of levels is 1024 / wide.
class Levels {
 public:
  // More blocks and their scores would not fit into the first-level cache.
  static constexpr int AT_ONCE = 4;
  const int64_t wide, deep;
  const int unit;                // levels are multiplied by it
  aligned_vector<int8_t> query;  // (TILE, deep)

  // `lowest`: added to levels, in units; 3 makes all levels non-negative.
  Levels(int64_t wide, int lowest)
      : wide(wide), deep(round_up(wide, DEEP)), unit(std::min<int64_t>(LARGEST_WIDE / wide, 16)), query(TILE * deep),
        number(), level(AT_ONCE * 2 * deep * KEYS) {
    // The levels of a code that is in bits 0 and 1, or in bits 2 and 3.
    for (int code = 0; code < 4; code++) number[code] = number[4 * code] = (2 * code - 3 + lowest) * unit;
  }

  void set(const int8_t *integers, int rows) {
    const int8_t factor = LARGEST_WIDE / wide / unit;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t d = 0; d < wide; d++) query[i * deep + d] = integers[i * wide + d] * factor;
  }

  // The levels of block b: (deep / DEEP, halves, DEEP / 4, KEYS, 4).
  const int8_t *of(int64_t b) const { return &level[b * 2 * deep * KEYS]; }

  // Unpacks the levels of all blocks of a piece. Four dimensions of 16 keys are a row of a half. Each half has four
  // keys of every eight: packing the 32-bit sums of both halves, which takes four from each in turn, then restores the
  // order.
  void unpack(const Piece &piece) {
    const __m512i mask = _mm512_set1_epi32(0x0c030c03), numbers = _mm512_broadcast_i32x4(*(const __m128i *)number);
    for (int64_t b = 0; b < piece.blocks; b++) {
      const uint8_t *packed = piece.packed + piece.block[b] * wide / 2 * TABLE;
      for (int64_t d = 0; d < wide; d += 4, packed += 2 * TABLE) {
        const __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)packed));
        int8_t *to = &level[b * 2 * deep * KEYS] + d / DEEP * DEEP * 2 * KEYS + d % DEEP * KEYS;
        for (int half = 0; half < 2; half++, to += KEYS * DEEP) {
          const __m512i code = _mm512_permutexvar_epi8(_mm512_load_si512(BYTE_OF.place[half]), both);
          const __m512i low = _mm512_mask_srli_epi16(code, 0xffff0000, code, 4);  // 16 keys are in upper halves
          _mm512_storeu_si512(to, _mm512_shuffle_epi8(numbers, _mm512_and_si512(low, mask)));
        }
      }
    }
  }

  // Writes the scores of a block from the sums of both halves, and returns the bits of those above the bound.
  static uint32_t finish(__m512i one, __m512i other, __m512i factor, __m512i bound, int16_t *score) {
    const __m512i x = _mm512_mulhrs_epi16(_mm512_packs_epi32(one, other), factor);
    _mm512_store_si512(score, x);
    return _mm512_cmpgt_epi16_mask(x, bound);
  }

 private:
  alignas(16) int8_t number[16];
  aligned_vector<int8_t> level;
};

// Scores by `vpdpbusd`, which adds four products of bytes to a 32-bit sum. Levels must not be negative.
class VectorScores {
 public:
  static constexpr int AT_ONCE = Levels::AT_ONCE;

  explicit VectorScores(int64_t wide) : levels(wide, 3) {}

  void set(const int8_t *integers, int rows) {
    this->rows = rows;
    levels.set(integers, rows);
    for (int i = 0; i < rows; i++) {
      int32_t total = 0;
      for (int64_t d = 0; d < levels.wide; d++) total += levels.query[i * levels.deep + d];
      begin[i] = -3 * levels.unit * total;
    }
  }

  void write(const Piece &piece, const int16_t *bound, PieceScores &to) {
    levels.unpack(piece);
    for (int64_t b = 0; b < piece.blocks; b++)
      for (int i = 0; i < rows; i += EIGHT) add_up(piece, b, i, bound, to);
  }

 private:
  static constexpr int EIGHT = 8;  // queries that are multiplied at once: 16 sums in registers
  Levels levels;
  int rows = 0;
  int32_t begin[TILE] = {};  // the first value of each sum, which makes up for the levels' offset

  __attribute__((noinline)) void add_up(const Piece &piece, int64_t b, int i, const int16_t *bound, PieceScores &to) {
    count_multiply_adds(EIGHT * CODED * levels.wide);
    const int64_t deep = levels.deep;
    const int8_t *level = levels.of(b), *query = &levels.query[i * deep];
    __m512i sum[EIGHT][2];
#pragma GCC unroll 8
    for (int r = 0; r < EIGHT; r++) sum[r][0] = sum[r][1] = _mm512_set1_epi32(begin[i + r]);
    for (int64_t d = 0; d < levels.wide; d += 4) {
      const int8_t *at = level + d / DEEP * DEEP * 2 * KEYS + d % DEEP * KEYS;
      const __m512i one = _mm512_load_si512(at), other = _mm512_load_si512(at + KEYS * DEEP);
#pragma GCC unroll 8
      for (int r = 0; r < EIGHT; r++) {
        int32_t four;
        memcpy(&four, query + r * deep + d, sizeof four);
        const __m512i all = _mm512_set1_epi32(four);
        sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], one, all);
        sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], other, all);
      }
    }
    const __m512i factor = _mm512_loadu_si512(piece.sigma + piece.block[b] * CODED);
#pragma GCC unroll 8
    for (int r = 0; r < EIGHT; r++)
      to.above[b][i + r] =
          Levels::finish(sum[r][0], sum[r][1], factor, _mm512_set1_epi16(bound[i + r]), to.score[b][i + r]);
  }
};
#endif

#ifdef FEWKEYS_MATRIX
// Scores on the matrix unit (AMX). The second operand is 16 rows of 16 keys, four dimensions each.
class MatrixScores {
 public:
  static constexpr int AT_ONCE = Levels::AT_ONCE;

  explicit MatrixScores(int64_t wide) : levels(wide, 0) {}

  void set(const int8_t *integers, int rows) {
    this->rows = rows;
    levels.set(integers, rows);
  }

  __attribute__((noinline)) void write(const Piece &piece, const int16_t *bound, PieceScores &to) {
    count_multiply_adds(piece.blocks * CODED * rows * levels.deep);
    // The matrix unit reads from the cache and its stores take long. So all blocks are unpacked first, and the sums of
    // a block become scores after the next block was multiplied.
    levels.unpack(piece);
    written(levels.query.data()), written(levels.of(0));
    for (int i = 0; i < TILE; i++) _mm512_store_si512(bounds[i], _mm512_set1_epi16(i < rows ? bound[i] : INT16_MAX));
    if (levels.deep == DEEP) load_queries(0);
    for (int64_t b = 0; b <= piece.blocks; b++) {
      if (b < piece.blocks) add_up(levels.of(b), sum[b % 2]);
      if (b) to_scores(sum[(b - 1) % 2], piece.sigma + piece.block[b - 1] * CODED, to.score[b - 1], to.above[b - 1]);
    }
  }

 private:
  Levels levels;
  int rows = 0;
  AmxProducts::Session session;
  alignas(64) int16_t bounds[TILE][CODED];
  alignas(64) float sum[2][TILE * CODED];  // 32-bit integers, with the keys in the order of `unpack`

  void load_queries(int64_t d) const {
    const int8_t *from = &levels.query[d];
    _tile_loadd(4, from, levels.deep);
    _tile_loadd(5, from + EDGE * levels.deep, levels.deep);
  }

  // Computes the sums of a block.
  void add_up(const int8_t *level, float *to) const {
    clear_sums();
    for (int64_t d = 0; d < levels.deep; d += DEEP, level += 2 * KEYS * DEEP) {
      if (levels.deep > DEEP) load_queries(d);
      _tile_loadd(6, level, DEEP);
      _tile_loadd(7, level + KEYS * DEEP, DEEP);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    store_sums(to, to + EDGE * TILE);
  }

  void to_scores(const float *from, const int16_t *sigma, int16_t (*score)[CODED], uint32_t *above) const {
    const __m512i factor = _mm512_loadu_si512(sigma);
#pragma GCC unroll 4
    for (int i = 0; i < TILE; i++, from += CODED)
      above[i] = Levels::finish(_mm512_load_si512(from), _mm512_load_si512(from + KEYS), factor,
                                _mm512_load_si512(bounds[i]), score[i]);
  }
};
#endif

}  // namespace fewkeys
