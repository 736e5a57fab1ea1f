// Scores of keys by their codes: (sum * 1024 / wide * sigma + 2^14) >> 15, where sum = sum_d query_d level_d.
//
// By tables: a nibble holds two numbers of a key. So a table of 16 bytes in a register has all that two of a query's
// numbers can give, and one shuffle looks up 16 keys. A table's numbers are from 4 to 124: those of two tables fit into
// a byte. Bytes are added up as numbers of 16 bits, which wrap, and their upper halves once more, which gives the lower.
// By the matrix unit, where there are many queries: levels are written out once for all of them.
// Either way a piece of blocks is scored at once, and each query's scores are compared with a bound of its own.
#pragma once
#include "codes.h"
#include "matrix.h"
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

// Blocks of a key head, in rising order.
struct Piece {
  const uint8_t *packed;  // of the head
  const int16_t *sigma;
  int64_t blocks;
  int32_t block[TOGETHER];
};

// Of TILE queries: the scores of a piece, and one bit for each that is above the query's bound.
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

typedef uint16_t eight_sums __attribute__((vector_size(16)));

// The sum, modulo 2^16, of a register's parts, which are of different pairs.
static inline eight_sums over_parts(shorts x) {
  eight_sums part[BYTES / 16], sum = {};
  memcpy(part, &x, sizeof x);
  for (const eight_sums &one : part) sum += one;
  return sum;
}

// Scores of R queries, from the i-th on, by their tables (R, pairs, 16).
template <int R>
static __attribute__((noinline)) void scores_by_tables(const Piece &piece, int64_t pairs, const uint8_t *tables, int i,
                                                       PieceScores &to) {
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
    for (int r = 0; r < R; r++) {
      int16_t *score = to.score[b][i + r];
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const eight_sums high = over_parts(upper[r][half]), low = over_parts(all[r][half]) - (high << 8);
        const eight *factor = (const eight *)(sigma + half * CODED / 2);
        eight *at = (eight *)(score + half * CODED / 2);
        at[0] = scaled((eight)(low - middle) * unit, factor[0]);
        at[1] = scaled((eight)(high - middle) * unit, factor[1]);
      }
    }
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
      scores(piece, pairs, &tables[i * pairs * TABLE], i, to);
      i += count;
    };
    while (rows - i >= ABREAST_ROWS) run(scores_by_tables<ABREAST_ROWS>, ABREAST_ROWS);
    if (rows - i == 3) run(scores_by_tables<3>, 3);
    if (rows - i == 2) run(scores_by_tables<2>, 2);
    if (rows - i == 1) run(scores_by_tables<1>, 1);
    // Not earlier: scores are read in wider moves than they are written in.
    for (int64_t b = 0; b < piece.blocks; b++)
      for (int r = 0; r < rows; r++) to.above[b][r] = bits_above(to.score[b][r], bound[r]);
  }

 private:
  const int64_t pairs;
  int rows = 0;
  aligned_vector<uint8_t> tables;
};

#ifdef FEWKEYS_MATRIX
// Which byte of two pairs of numbers has each of the levels that are a row of the unit's B, in both halves.
struct ByteOf {
  alignas(64) uint8_t place[2][64];
  constexpr ByteOf() : place() {
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 64; i++) place[half][i] = (half * 4 + i / 4 % 4) * 2 + i / 16 % 2 + (i & 2) * 8;
  }
};
constexpr ByteOf BYTE_OF;

// Numbers are filled up to `deep`, 64 at a time. The unit's B is 16 rows of 16 keys, four numbers each.
class MatrixScores {
 public:
  // More blocks at once would not fit into the nearest cache beside their scores.
  static constexpr int DEEP = 64, AT_ONCE = 4;

  explicit MatrixScores(int64_t wide)
      : wide(wide), deep(round_up(wide, DEEP)), query(TILE * deep), level(AT_ONCE * 2 * deep * EDGE) {}

  void set(const int8_t *integers, int rows) {
    this->rows = rows;
    const int8_t factor = LARGEST_WIDE / wide / unit();  // levels bear the rest
    for (int64_t i = 0; i < rows; i++)
      for (int64_t d = 0; d < wide; d++) query[i * deep + d] = integers[i * wide + d] * factor;
  }

  __attribute__((noinline)) void write(const Piece &piece, const int16_t *bound, PieceScores &to) {
    count_multiply_adds(piece.blocks * CODED * rows * deep);
    // The unit reads what has reached the cache, and what it writes takes its time: so all blocks are unpacked first,
    // and sums become scores one block later.
    for (int64_t b = 0; b < piece.blocks; b++)
      unpack(piece.packed + piece.block[b] * wide / 2 * TABLE, &level[b * 2 * deep * EDGE]);
    written(query.data()), written(level.data());
    for (int i = 0; i < TILE; i++) _mm512_store_si512(bounds[i], _mm512_set1_epi16(i < rows ? bound[i] : INT16_MAX));
    if (deep == DEEP) load_queries(query.data());
    for (int64_t b = 0; b <= piece.blocks; b++) {
      if (b < piece.blocks) add_up(&level[b * 2 * deep * EDGE], sum[b % 2]);
      if (b) to_scores(sum[(b - 1) % 2], piece.sigma + piece.block[b - 1] * CODED, to.score[b - 1], to.above[b - 1]);
    }
  }

 private:
  const int64_t wide, deep;
  int rows = 0;
  AmxProducts::Session session;
  aligned_vector<int8_t> query;  // (TILE, deep)
  aligned_vector<int8_t> level;  // (blocks, deep / DEEP, halves of a block, DEEP / 4, EDGE, 4)
  alignas(64) int16_t bounds[TILE][CODED];
  alignas(64) float sum[2][TILE * CODED];  // of 32 bits each, keys as `unpack` orders them

  // What levels are multiplied by: with that of queries, 1024 / wide.
  int unit() const { return std::min<int64_t>(LARGEST_WIDE / wide, 16); }

  void load_queries(const int8_t *from) const {
    _tile_loadd(4, from, deep);
    _tile_loadd(5, from + EDGE * deep, deep);
  }

  // The sums of a block.
  void add_up(const int8_t *own, float *to) const {
    clear_sums();
    for (int64_t d = 0; d < deep; d += DEEP, own += 2 * EDGE * DEEP) {
      if (deep > DEEP) load_queries(&query[d]);
      _tile_loadd(6, own, DEEP);
      _tile_loadd(7, own + EDGE * DEEP, DEEP);
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
    for (int i = 0; i < TILE; i++, from += CODED) {
      const __m512i all = _mm512_packs_epi32(_mm512_load_si512(from), _mm512_load_si512(from + EDGE));
      const __m512i x = _mm512_mulhrs_epi16(all, factor);
      _mm512_store_si512(score[i], x);
      above[i] = _mm512_cmpgt_epi16_mask(x, _mm512_load_si512(bounds[i]));
    }
  }

  // Writes out the levels of a block: two pairs of numbers are a row of each half. Both have four keys of every eight,
  // so that sums come out in order when registers of 32 bits are packed: part by part, 4 of one, 4 of the other.
  void unpack(const uint8_t *packed, int8_t *into) const {
    const __m512i mask = _mm512_set1_epi32(0x0c030c03);
    const int8_t one = unit(), three = 3 * one;
    const __m512i number = _mm512_broadcast_i32x4(
        _mm_setr_epi8(-three, -one, one, three, -one, 0, 0, 0, one, 0, 0, 0, three, 0, 0, 0));
    for (int64_t d = 0; d < wide; d += 4, packed += 2 * TABLE) {
      const __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)packed));
      int8_t *to = into + d / DEEP * DEEP * 2 * EDGE + d % DEEP * EDGE;
      for (int half = 0; half < 2; half++, to += EDGE * DEEP) {
        const __m512i code = _mm512_permutexvar_epi8(_mm512_load_si512(BYTE_OF.place[half]), both);
        const __m512i low = _mm512_mask_srli_epi16(code, 0xffff0000, code, 4);  // the last 16 keys are in upper halves
        _mm512_storeu_si512(to, _mm512_shuffle_epi8(number, _mm512_and_si512(low, mask)));
      }
    }
  }
};
#endif

}  // namespace fewkeys
