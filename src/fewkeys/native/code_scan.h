// The best keys of a query by codes of two bits a number: `fewkeys.sketch.codes` has the equations.
//
// Keys come piece by piece, in rising order. A query holds those that may still be among its best; when there are too
// many, it drops all but the best, and later keys must beat the least of these. So the scores of a piece are all that
// is stored.
#pragma once
#include <memory>

#include "code_scores.h"

namespace fewkeys {

// One bit for each of a block's scores above `least`.
static inline uint32_t bits_above(const int16_t *score, int16_t least) {
#if defined(__AVX512BW__)
  return _mm512_cmpgt_epi16_mask(_mm512_loadu_si512(score), _mm512_set1_epi16(least));
#else
  const eight *x = (const eight *)score;
  uint32_t bits = 0;
  for (int half = 0; half < 2; half++, x += 2) {
#if defined(__SSE2__)
    const __m128i both = _mm_packs_epi16((__m128i)(x[0] > least), (__m128i)(x[1] > least));
    bits |= (uint32_t)_mm_movemask_epi8(both) << (16 * half);
#elif defined(__aarch64__)
    const uint8x8_t bit = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int part = 0; part < 2; part++)
      bits |= (uint32_t)vaddv_u8(vand_u8(vmovn_u16((uint16x8_t)(x[part] > least)), bit)) << (16 * half + 8 * part);
#else
    for (int i = 0; i < 16; i++) bits |= (uint32_t)(x[i / 8][i % 8] > least) << (16 * half + i);
#endif
  }
  return bits;
#endif
}

// The numbers of a block whose bits are set, side by side; something may be written behind them.
static inline void pack(const int16_t *number, uint32_t bits, int16_t *to) {
#if defined(__AVX512VBMI2__)
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(bits, _mm512_loadu_si512(number)));
#else
  for (; bits; bits &= bits - 1) *to++ = number[__builtin_ctz(bits)];
#endif
}
static inline void pack(const int32_t *number, uint32_t bits, int32_t *to) {
#if defined(__AVX512F__)
  const uint32_t half = bits & 0xffff;
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(half, _mm512_loadu_si512(number)));
  to += __builtin_popcount(half);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(bits >> 16, _mm512_loadu_si512(number + 16)));
#else
  for (; bits; bits &= bits - 1) *to++ = number[__builtin_ctz(bits)];
#endif
}

// The `count` best of the keys that a query has seen, of equal scores the first.
class Largest {
 public:
  static constexpr int PIECE = 512;  // keys that come at once at most

  void begin(int64_t best) {
    count = best, held = 0, least = INT16_MIN;
    const int64_t room = 2 * count + 2 * PIECE + CODED;
    if ((int64_t)score.size() < room) score.resize(room), place.resize(room);
  }

  // Scores and places of blocks of keys, of which the bits of `shown` are there.
  void add(const int16_t *from, const int32_t *at, const uint32_t *shown, int64_t blocks) {
    int64_t to = held;
    for (int64_t b = 0; b < blocks; b++, from += CODED, at += CODED) {
      const uint32_t bits = bits_above(from, least) & shown[b];
      pack(from, bits, &score[to]), pack(at, bits, &place[to]);
      to += __builtin_popcount(bits);
    }
    held = to;
    if (held > 2 * count + PIECE / 2) cut(count / 2);
  }

  // How many there are; then `places` gives them, ascending.
  int64_t finish() {
    cut(0);
    return held;
  }
  const int32_t *places() const { return place.data(); }

 private:
  int64_t count = 0, held = 0;
  int16_t least = INT16_MIN;  // later keys must have more
  aligned_vector<int16_t> score;
  aligned_vector<int32_t> place;

  // How many of those held are above a bound.
  int64_t above(int16_t bound) const {
    int64_t total = 0;
    for (int64_t v = 0; v < held; v += CODED) total += __builtin_popcount(bits_above(&score[v], bound));
    return total;
  }

  // Drops all but the `count` best, and at most `slack` of the next.
  void cut(int64_t slack) {
    if (held <= count) return;
    std::fill_n(&score[held], CODED, INT16_MIN);  // up to whole blocks
    // The largest bound that `count` reach, or one that at most so many more do.
    int32_t low = least, high = INT16_MAX;
    int64_t reach = held;
    while (low < high && reach > count + slack) {
      // The first steps double the bound: the largest score is not known.
      const int32_t middle = high == INT16_MAX ? std::clamp(2 * low, 16, high) : low + (high - low + 1) / 2;
      const int64_t there = above(middle - 1);
      if (there >= count)
        low = middle, reach = there;
      else
        high = middle - 1;
    }
    // Of those that are equal to it, the first ones.
    int64_t equal = reach > count + slack ? count - above(low) : held;
    int64_t to = 0;
    for (int64_t v = 0; v < held; v += CODED) {
      const uint32_t more = bits_above(&score[v], low);
      uint32_t same = held - v < CODED ? ~0u >> (CODED - (held - v)) : ~0u;
      same &= bits_above(&score[v], low - 1) ^ more;
      for (; equal < __builtin_popcount(same);) same ^= 1u << (31 - __builtin_clz(same));
      equal -= __builtin_popcount(same);
      const uint32_t bits = more | same;
      pack(&score[v], bits, &score[to]), pack(&place[v], bits, &place[to]);
      to += __builtin_popcount(bits);
    }
    held = to, least = low;
  }
};

// What a thread needs to find the keys of at most TILE queries of a key head that choose among the same keys.
template <class T>
class Scanner {
 public:
  explicit Scanner(const Scan &p)
      : p(p), turned(p.wide), query(TILE * p.wide), score(TILE * PIECE), tables(TILE, p.wide) {}

  // Chooses among the first `seen` keys; `query_of(i)` is where the i-th query lies.
  template <class QueryOf>
  void choose(int64_t batch, int64_t head, int64_t seen, int rows, QueryOf query_of) {
    for (int i = 0; i < rows; i++) {
      best[i].begin(p.count);
      round_query(query_of(i), p.dim, p.wide, p.sign, turned.data(), &query[i * p.wide]);
    }
#ifdef FEWKEYS_MATRIX
    if (rows > FEW && AmxProducts::is_there()) {
      if (!matrix) matrix.reset(new MatrixScores(p.wide));
      return scan(*matrix, batch, head, seen, rows);
    }
#endif
    scan(tables, batch, head, seen, rows);
  }
  // What the i-th of them has chosen.
  Largest &chosen(int i) { return best[i]; }

 private:
  static constexpr int FEW = 4, PIECE = Largest::PIECE;
  const Scan &p;
  aligned_vector<float> turned;
  aligned_vector<int8_t> query;
  aligned_vector<int16_t> score;
  TableScores tables;
#ifdef FEWKEYS_MATRIX
  std::unique_ptr<MatrixScores> matrix;
#endif
  Largest best[TILE];

  template <class Scores>
  void scan(Scores &scores, int64_t batch, int64_t head, int64_t seen, int rows) {
    const int64_t from = (batch * (p.heads / p.gqa_ratio) + head) * p.room;
    scores.set(query.data(), rows);
    for (int64_t first = 0; first < seen; first += PIECE) {
      const int64_t blocks = std::min<int64_t>(PIECE, seen - first + CODED - 1) / CODED, block = from + first / CODED;
      scores.write(p.packed + block * p.wide / 2 * TABLE, p.sigma + block * CODED, blocks, score.data(), PIECE);
      uint32_t shown[PIECE / CODED];
      for (int64_t b = 0, j = first; b < blocks; b++, j += CODED) {
        shown[b] = seen - j < CODED ? (1u << (seen - j)) - 1 : UINT32_MAX;
        for (int i = 0; p.real && i < std::min<int64_t>(CODED, seen - j); i++)
          if (!p.real[batch * p.keys + j + i]) shown[b] &= ~(1u << i);
      }
      int32_t place[PIECE];
      for (int i = 0; i < PIECE; i++) place[i] = first + i;
      for (int i = 0; i < rows; i++) best[i].add(&score[i * PIECE], place, shown, blocks);
    }
  }
};

// At most TILE queries of a key head that choose among the same keys: of those start .. stop - 1 of its query heads,
// head after head, the ones from `first` on.
struct Asking {
  int64_t start, stop, first;
  int rows;
  int64_t head(int i) const { return (first + i) / (stop - start); }  // of those that share the key head
  int64_t query(int i) const { return start + (first + i) % (stop - start); }
};
static inline std::vector<Asking> asking(const Scan &p) {
  std::vector<Asking> all;
  for (int64_t start = 0, stop; start < p.queries; start = stop) {
    for (stop = start + 1; stop < p.queries && stop - start < CODED && p.seen[stop] == p.seen[start];) stop++;
    const int64_t many = p.gqa_ratio * (stop - start);
    for (int64_t first = 0; first < many; first += TILE)
      all.push_back({start, stop, first, (int)std::min<int64_t>(TILE, many - first)});
  }
  return all;
}

template <class T>
static void scan_codes(const Scan &p, int threads) {
  const std::vector<Asking> all = asking(p);
  const int64_t kv_heads = p.heads / p.gqa_ratio, each = all.size();
  in_parallel(
      threads, p.batch * kv_heads * each, [&] { return std::make_unique<Scanner<T>>(p); },
      [&](std::unique_ptr<Scanner<T>> &scanner, int64_t t) {
        const Asking &one = all[t % each];
        const int64_t head = t / each % kv_heads, batch = t / each / kv_heads;
        const auto head_of = [&](int i) { return head * p.gqa_ratio + one.head(i); };
        scanner->choose(batch, head, p.seen[one.start], one.rows,
                        [&](int i) { return p.query.at<T>(batch, head_of(i), one.query(i)); });
        for (int i = 0; i < one.rows; i++) {
          Largest &best = scanner->chosen(i);
          int32_t *to = p.index + ((batch * p.heads + head_of(i)) * p.queries + one.query(i)) * p.count;
          const int64_t count = best.finish();
          std::copy_n(best.places(), count, to);
          std::fill(to + count, to + p.count, -1);
        }
      });
}

}  // namespace fewkeys
