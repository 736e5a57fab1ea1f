// Scores of keys by products of bytes, for many queries: the levels of a block are unpacked once for all of them.
#pragma once
#include "code_scores.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define FEWKEYS_LEVELS
#endif
#if defined(__AMX_INT8__) && defined(__linux__)
#define FEWKEYS_MATRIX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fewkeys {

#ifdef FEWKEYS_LEVELS
constexpr int KEYS = 16;  // of a row: half a block, four numbers of each
constexpr int DEEP = 64;  // numbers are padded to a multiple of it
constexpr int EDGE = 16;  // rows of a tile of the matrix unit

// Queries and the levels of some blocks as bytes. Their products are the sums of scores: the factors of queries and of
// levels multiply to 1024 / wide.
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
    for (int code = 0; code < 4; code++) number[code] = number[4 * code] = (2 * code - 3 + lowest) * unit;
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 64; i++) place[half][i] = (half * 4 + i / 4 % 4) * 2 + i / 16 % 2 + (i & 2) * 8;
  }

  void set(const int8_t *integers, int rows) {
    const int8_t factor = LARGEST_WIDE / wide / unit;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t d = 0; d < wide; d++) query[i * deep + d] = integers[i * wide + d] * factor;
  }

  // The levels of block b: (deep / DEEP, halves, DEEP / 4, KEYS, 4).
  const int8_t *of(int64_t b) const { return &level[b * 2 * deep * KEYS]; }

  // Unpacks the levels of block b. Four dimensions of 16 keys are a row of a half. Each half has four keys of every
  // eight: `finish` restores the order when it packs sums of both halves, which takes four from each in turn.
  void unpack(const Piece &piece, int64_t b) {
    const __m512i mask = _mm512_set1_epi32(0x0c030c03), numbers = _mm512_broadcast_i32x4(*(const __m128i *)number);
    const uint8_t *packed = piece.packed + piece.block[b] * wide / 2 * TABLE;
    for (int64_t d = 0; d < wide; d += 4, packed += 2 * TABLE) {
      const __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)packed));
      int8_t *to = &level[(b * 2 * deep + d / DEEP * DEEP + d) * KEYS];
      for (int half = 0; half < 2; half++, to += KEYS * DEEP) {
        const __m512i code = _mm512_permutexvar_epi8(_mm512_load_si512(place[half]), both);
        const __m512i low = _mm512_mask_srli_epi16(code, 0xffff0000, code, 4);  // 16 keys are in upper halves
        _mm512_storeu_si512(to, _mm512_shuffle_epi8(numbers, _mm512_and_si512(low, mask)));
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
  alignas(16) int8_t number[16];  // the level of a code that is in bits 0 and 1, or in bits 2 and 3
  // For both halves: which of 32 packed bytes has the code of each byte of an unpacked row (16 keys, four dimensions).
  alignas(64) uint8_t place[2][64];
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
    fours.resize(levels.deep / 4 * TILE);
    for (int64_t d = 0; d < levels.deep; d += 4)
      for (int i = 0; i < TILE; i++) memcpy(&fours[d / 4 * TILE + i], &levels.query[i * levels.deep + d], 4);
  }

  void write(const Piece &piece, const int16_t *bound, PieceScores &to) {
    for (int64_t b = 0; b < piece.blocks; b++) {
      levels.unpack(piece, b);
      for (int i = 0; i < rows; i += EIGHT) add_up(piece, b, i, bound, to);
    }
  }

 private:
  static constexpr int EIGHT = 8;  // queries that are multiplied at once: 16 sums in registers
  Levels levels;
  int rows = 0;
  int32_t begin[TILE] = {};       // the first value of each sum, which makes up for the levels' offset
  aligned_vector<int32_t> fours;  // (deep / 4, TILE): four numbers of each query, as one

  // GCC makes two copies of every sum around `_mm512_dpbusd_epi32`, which took a sixth of the time of a prefill.
  static void add_products(__m512i &sum, __m512i level, __m512i query) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(level), "v"(query));
  }

  __attribute__((noinline)) void add_up(const Piece &piece, int64_t b, int i, const int16_t *bound, PieceScores &to) {
    count_multiply_adds(EIGHT * CODED * levels.wide);
    const int32_t *four = &fours[i];
    __m512i sum[EIGHT][2];
#pragma GCC unroll 8
    for (int r = 0; r < EIGHT; r++) sum[r][0] = sum[r][1] = _mm512_set1_epi32(begin[i + r]);
    for (int64_t d = 0; d < levels.wide; d += 4, four += TILE) {
      const int8_t *level = levels.of(b) + (d / DEEP * DEEP + d) * KEYS;
      const __m512i one = _mm512_load_si512(level), other = _mm512_load_si512(level + KEYS * DEEP);
#pragma GCC unroll 8
      for (int r = 0; r < EIGHT; r++) {
        const __m512i all = _mm512_set1_epi32(four[r]);
        add_products(sum[r][0], one, all);
        add_products(sum[r][1], other, all);
      }
    }
    const __m512i factor = _mm512_loadu_si512(piece.sigma + piece.block[b] * CODED);
#pragma GCC unroll 8
    for (int r = 0; r < EIGHT; r++)
      to.above[b][i + r] =
          Levels::finish(sum[r][0], sum[r][1], factor, _mm512_set1_epi16(bound[i + r]), to.score[b][i + r]);
  }
};

#ifdef FEWKEYS_MATRIX
// Scores on the matrix unit of the processor (AMX), which adds A B to C. B is 16 rows of 16 keys, four dimensions each.
class MatrixScores {
 public:
  static constexpr int AT_ONCE = Levels::AT_ONCE;

  // Linux enables the unit for a process on request.
  static bool is_there() {
    constexpr int ASK = 0x1023, TILES = 18;
    static const bool lent = syscall(SYS_arch_prctl, ASK, TILES) == 0;
    return lent;
  }

  explicit MatrixScores(int64_t wide) : levels(wide, 0) {
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
  MatrixScores(const MatrixScores &) = delete;
  ~MatrixScores() { _tile_release(); }

  void set(const int8_t *integers, int rows) {
    this->rows = rows;
    levels.set(integers, rows);
  }

  __attribute__((noinline)) void write(const Piece &piece, const int16_t *bound, PieceScores &to) {
    count_multiply_adds(piece.blocks * CODED * rows * levels.deep);
    // The matrix unit reads from the cache and its stores take long. So a block is unpacked while the one before it is
    // multiplied, and its sums become scores while the next one is.
    levels.unpack(piece, 0);
    written(levels.query.data());
    for (int i = 0; i < TILE; i++) _mm512_store_si512(bounds[i], _mm512_set1_epi16(i < rows ? bound[i] : INT16_MAX));
    if (levels.deep == DEEP) load_queries(0);
    for (int64_t b = 0; b <= piece.blocks; b++) {
      written(levels.of(0));
      if (b < piece.blocks) add_up(levels.of(b), sum[b % 2]);
      if (b + 1 < piece.blocks) levels.unpack(piece, b + 1);
      if (b) to_scores(sum[(b - 1) % 2], piece.sigma + piece.block[b - 1] * CODED, to.score[b - 1], to.above[b - 1]);
    }
  }

 private:
  Levels levels;
  int rows = 0;
  alignas(64) int16_t bounds[TILE][CODED];
  alignas(64) int32_t sum[2][TILE * CODED];  // with the keys in the order of `unpack`

  // Tells the compiler that the unit reads memory. Otherwise it could delay or omit writes to it.
  static void written(const void *there) { asm volatile("" : : "r"(there) : "memory"); }

  void load_queries(int64_t d) const {
    const int8_t *from = &levels.query[d];
    _tile_loadd(4, from, levels.deep);
    _tile_loadd(5, from + EDGE * levels.deep, levels.deep);
  }

  // Computes the sums of a block: four tiles hold those of EDGE queries above and as many below.
  void add_up(const int8_t *level, int32_t *to) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < levels.deep; d += DEEP, level += 2 * KEYS * DEEP) {
      if (levels.deep > DEEP) load_queries(d);
      _tile_loadd(6, level, DEEP);
      _tile_loadd(7, level + KEYS * DEEP, DEEP);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    constexpr int PITCH = CODED * sizeof(int32_t);
    _tile_stored(0, to, PITCH);
    _tile_stored(1, to + EDGE, PITCH);
    _tile_stored(2, to + EDGE * CODED, PITCH);
    _tile_stored(3, to + EDGE * CODED + EDGE, PITCH);
  }

  void to_scores(const int32_t *from, const int16_t *sigma, int16_t (*score)[CODED], uint32_t *above) const {
    const __m512i factor = _mm512_loadu_si512(sigma);
#pragma GCC unroll 4
    for (int i = 0; i < TILE; i++, from += CODED)
      above[i] = Levels::finish(_mm512_load_si512(from), _mm512_load_si512(from + KEYS), factor,
                                _mm512_load_si512(bounds[i]), score[i]);
  }
};
#endif
#endif

}  // namespace fewkeys
