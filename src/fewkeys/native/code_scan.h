// The best keys of a query by codes of two bits a number: `fewkeys.sketch.codes` has the equations.
//
// A nibble holds two numbers of a key. So a table of 16 bytes in a register has all that two of a query's numbers can
// give, and one shuffle looks up 16 keys. A table's numbers are from 4 to 124: those of two tables fit into a byte. Bytes
// are added up as numbers of 16 bits, which wrap, and their upper halves once more: that tells the lower ones.
#pragma once
#include "lanes.h"
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
constexpr int CODED = 32;    // keys of a block
constexpr int TABLE = 16;    // bytes of a table, and of a pair's codes in a block
constexpr int MIDDLE = 64;   // what a table adds to its numbers

typedef uint8_t bytes __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint16_t shorts __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint16_t eight __attribute__((vector_size(16), aligned(2), may_alias));

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
  bytes found;
  for (int i = 0; i < BYTES; i++) found[i] = table[index[i]];
  return found;
#endif
}

// One bit for each lane in which x >= least.
static inline uint32_t bits_from(vec x, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ);
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)(x >= least));
#elif defined(__SSE__)
  return _mm_movemask_ps((__m128)(x >= least));
#else
  const ivec bit = {1, 2, 4, 8}, found = (x >= least) & bit;
  return found[0] | found[1] | found[2] | found[3];
#endif
}

// The tables (pairs, 16) of a query's integers.
static inline void make_tables(const int8_t *query, int64_t dim, int64_t pairs, uint8_t *table) {
  for (int64_t p = 0; p < pairs; p++, table += TABLE) {
    const int a = 2 * p < dim ? query[2 * p] : 0, b = 2 * p + 1 < dim ? query[2 * p + 1] : 0;
    for (int c = 0; c < TABLE; c++) table[c] = MIDDLE + a * (2 * (c & 3) - 3) + b * (2 * (c >> 2) - 3);
  }
}

// The sum of a register's parts, which are of different pairs.
static inline eight over_parts(shorts x) {
  eight part[BYTES / 16], found = {};
  memcpy(part, &x, sizeof x);
  for (const eight &one : part) found += one;
  return found;
}

// Sums of eight keys as scores.
static inline void to_scores(eight sum, int middle, const float *sigma, float *score) {
  typedef int32_t ints __attribute__((vector_size(32), aligned(4), may_alias));
  typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));
  const floats number = __builtin_convertvector(__builtin_convertvector(sum, ints) - middle, floats);
  *(floats *)score = number * *(const floats *)sigma;
}

// Those of a half of a block's keys, from both kinds of sums.
static inline void half_to_scores(shorts all, shorts upper, int middle, const float *sigma, float *score) {
  const eight high = over_parts(upper), low = over_parts(all) - (high << 8);
  to_scores(low, middle, sigma, score);
  to_scores(high, middle, sigma + 8, score + 8);
}

// The scores (R, 32 blocks), `pitch` apart, of R queries by their tables (R, pairs, 16).
template <int R>
static __attribute__((noinline)) void scan_rows(const uint8_t *packed, const float *sigma, int64_t blocks, int64_t pairs,
                                                const uint8_t *tables, float *score, int64_t pitch) {
  const int64_t bytes_each = pairs * TABLE;
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
      for (int half = 0; half < 2; half++)
        half_to_scores(all[r][half], upper[r][half], MIDDLE * pairs, sigma + half * CODED / 2,
                       score + r * pitch + half * CODED / 2);
  }
}

// The places of the `count` largest of many scores, ascending, of equal ones the first; there is room for LANES more.
class Largest {
 public:
  // How many there are: those of -inf are none. `score` has room for a multiple of CODED.
  int64_t choose(float *score, int64_t keys, int64_t count, int32_t *place) {
    const int64_t whole = (keys + CODED - 1) / CODED * CODED;
    std::fill(score + keys, score + whole, -INFINITY);
    if ((int64_t)key.size() < whole + LANES) key.resize(whole + LANES), at.resize(whole + LANES);
    count_multiply_adds(2 * whole);
    vec sum[2] = {}, square[2] = {};  // two of each: no addition waits for the one before
    for (int64_t v = 0; v < whole; v += 2 * LANES)
#pragma GCC unroll 2
      for (int w = 0; w < 2; w++) {
        const vec x = load(score + v + w * LANES), real = x == broadcast(-INFINITY) ? vec{} : x;
        sum[w] += real, square[w] += real * real;
      }
    const float mean = sum_of_lanes(sum[0] + sum[1]) / keys;
    const float spread = std::sqrt(std::max(0.0f, sum_of_lanes(square[0] + square[1]) / keys - mean * mean));
    // A little below where the query before had its last one; then further down, until there are enough.
    float least = mean + height * spread, step = spread;
    for (int turn = 0;; turn++, least -= step, step *= 2) {
      if (turn == 12 || !(spread > 0)) least = -std::numeric_limits<float>::max();
      collect(score, whole, least);
      if (held >= count || least == -std::numeric_limits<float>::max()) break;
    }
    const float last = cut(count, place);
    if (spread > 0 && held > count) height = (last - mean) / spread - MARGIN;
    return std::min(held, count);
  }

 private:
  static constexpr float MARGIN = 0.15f;
  float height = 1.5f;
  int64_t held = 0;
  aligned_vector<int32_t> key, at;  // of what was collected: its score, in the order of integers, and its place

  // Keeps what reaches `least`; there is room for all, and LANES more.
  void collect(const float *score, int64_t whole, float least) {
    int32_t *to_key = key.data(), *to_place = at.data();
    count_multiply_adds(whole);
    ivec place = count_up();
    for (int64_t v = 0; v < whole; v += LANES, place += LANES) {
      const vec x = load(score + v);
      uint32_t bits = bits_from(x, least);
      const ivec number = in_order((ivec)(x + 0.0f));  // zeros of both signs are equal
#if defined(__AVX512F__)
      pack(bits, place, to_place);
      const int count = pack(bits, number, to_key);
      to_key += count, to_place += count;
#else
      for (; bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        *to_key++ = number[lane], *to_place++ = place[lane];
      }
#endif
    }
    held = to_key - key.data();
  }

  // Integers in the order of the floats whose bits these are, and back.
  static ivec in_order(ivec bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
  static float number_of(int32_t key) {
    key ^= (key >> 31) & 0x7fffffff;
    float found;
    memcpy(&found, &key, sizeof found);
    return found;
  }

#if defined(__AVX512F__)
  // Writes the numbers whose bits are set, side by side, and something after them; how many they are.
  static int pack(uint32_t bits, ivec number, int32_t *to) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(bits, (__m512i)number));
    return __builtin_popcount(bits);
  }
#endif

  int64_t reached(int32_t least) const {
    ivec found = {};
    const int64_t whole = held / LANES * LANES;
    for (int64_t v = 0; v < whole; v += LANES) found -= *(const ivec *)&key[v] >= least;
    int64_t total = 0;
    for (int l = 0; l < LANES; l++) total += found[l];
    for (int64_t v = whole; v < held; v++) total += key[v] >= least;
    return total;
  }

  // Writes the places of the `count` largest of what was collected, and gives the least of their scores, or about that.
  float cut(int64_t count, int32_t *place) const {
    if (held <= count) {
      std::copy_n(at.begin(), held, place);
      return 0.0f;
    }
    // The largest number that `count` of them reach, or one that no more than these do.
    int32_t smallest = key[0], largest = key[0];
    for (int64_t i = 1; i < held; i++) smallest = std::min(smallest, key[i]), largest = std::max(largest, key[i]);
    int64_t low = smallest, high = largest, found = held;
    while (low < high && found != count) {
      const int64_t middle = low + (high - low + 1) / 2, reach = reached(middle);
      if (reach >= count)
        low = middle, found = reach;
      else
        high = middle - 1;
    }
    const int32_t least = low;
    int64_t to = 0;
#if defined(__AVX512F__)
    if (found == count) {
      for (int64_t v = 0; v < held; v += LANES) {
        const uint32_t there = held - v < LANES ? (1u << (held - v)) - 1 : 0xffff;
        const ivec x = *(const ivec *)&key[v];
        to += pack(_mm512_mask_cmpge_epi32_mask(there, (__m512i)x, _mm512_set1_epi32(least)), *(const ivec *)&at[v],
                   place + to);
      }
      return number_of(least);
    }
#endif
    // Of those that are equal to it, as many as are left.
    int64_t left = found == count ? held : count - (least == largest ? 0 : reached(least + 1));
    for (int64_t i = 0; i < held; i++) {  // without branches, which nothing could foretell
      const bool last = (key[i] == least) & (left > 0);
      left -= last;
      place[to] = at[i];
      to += (key[i] > least) | last;
    }
    return number_of(least);
  }
};

// What a thread needs to find the keys of queries.
class Scanner {
 public:
  explicit Scanner(const Scan &p) : p(p), tables(ABREAST_ROWS * p.pairs * TABLE), held(p.count + 2 * LANES) {}

  // The places of the keys of `rows` queries of a key head, all of which choose among the first `seen` keys; `query(i)`
  // tells where the integers of the i-th lie, and `take(i, place, count)` gets what it chooses.
  template <class Query, class Take>
  void choose(int64_t batch, int64_t head, int64_t seen, int rows, Query query, Take take) {
    const int64_t own = batch * (p.heads / p.gqa_ratio) + head, blocks = (seen + CODED - 1) / CODED;
    const uint8_t *packed = p.packed + own * p.room * p.pairs * TABLE;
    const float *sigma = p.sigma + own * p.room * CODED;
    const int64_t pitch = blocks * CODED;
    if ((int64_t)score.size() < ABREAST_ROWS * pitch) score.resize(ABREAST_ROWS * pitch);
    if (seen <= p.count) {
      int64_t count = 0;
      if ((int64_t)held.size() < seen) held.resize(seen);
      for (int64_t j = 0; j < seen; j++)
        if (!p.real || p.real[batch * p.keys + j]) held[count++] = j;
      for (int i = 0; i < rows; i++) take(i, held.data(), count);
      return;
    }
    for (int first = 0; first < rows; first += ABREAST_ROWS) {
      const int some = std::min(ABREAST_ROWS, rows - first);
      for (int r = 0; r < some; r++)
        make_tables(query(first + r), p.dim, p.pairs, &tables[r * p.pairs * TABLE]);
      scan(some, packed, sigma, blocks, pitch);
      for (int r = 0; r < some; r++) {
        float *own_score = &score[r * pitch];
        for (int64_t j = 0; p.real && j < seen; j++)
          if (!p.real[batch * p.keys + j]) own_score[j] = -INFINITY;
        take(first + r, held.data(), largest.choose(own_score, seen, p.count, held.data()));
      }
    }
  }

 private:
  const Scan &p;
  aligned_vector<uint8_t> tables;
  aligned_vector<float> score;
  aligned_vector<int32_t> held;
  Largest largest;

  void scan(int rows, const uint8_t *packed, const float *sigma, int64_t blocks, int64_t pitch) {
    const uint8_t *table = tables.data();
    if (rows == ABREAST_ROWS) return scan_rows<ABREAST_ROWS>(packed, sigma, blocks, p.pairs, table, score.data(), pitch);
    if (rows == 3) return scan_rows<3>(packed, sigma, blocks, p.pairs, table, score.data(), pitch);
    if (rows == 2) return scan_rows<2>(packed, sigma, blocks, p.pairs, table, score.data(), pitch);
    scan_rows<1>(packed, sigma, blocks, p.pairs, table, score.data(), pitch);
  }
};

// Runs of queries that choose among the same keys, at most `most` of them at a time.
struct Run {
  int64_t start, stop;
};
static inline std::vector<Run> runs_of(const Scan &p, int64_t most) {
  std::vector<Run> runs;
  for (int64_t n = 0; n < p.queries;) {
    int64_t stop = n + 1;
    while (stop < p.queries && stop - n < most && p.seen[stop] == p.seen[n]) stop++;
    runs.push_back({n, stop});
    n = stop;
  }
  return runs;
}

static void scan_codes(const Scan &p, int threads) {
  const std::vector<Run> runs = runs_of(p, CODED);
  const int64_t kv_heads = p.heads / p.gqa_ratio, each = runs.size();
  in_parallel(
      threads, p.batch * kv_heads * each, [&] { return Scanner(p); },
      [&](Scanner &scanner, int64_t t) {
        const Run run = runs[t % each];
        const int64_t head = t / each % kv_heads, batch = t / each / kv_heads, length = run.stop - run.start;
        const auto row = [&](int i) {
          return (batch * p.heads + head * p.gqa_ratio + i / length) * p.queries + run.start + i % length;
        };
        scanner.choose(
            batch, head, p.seen[run.start], p.gqa_ratio * length, [&](int i) { return p.query + row(i) * p.dim; },
            [&](int i, const int32_t *place, int64_t count) {
              int32_t *to = p.index + row(i) * p.count;
              std::copy_n(place, count, to);
              std::fill(to + count, to + p.count, -1);
            });
      });
}

}  // namespace fewkeys
