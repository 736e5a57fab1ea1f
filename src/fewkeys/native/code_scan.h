// The best keys of a query by codes of two bits a number: `fewkeys.sketch.codes` has the equations.
//
// Keys come piece by piece, in rising order. A query holds those that may still be among its best; when there are too
// many, it drops all but the best, and later keys must beat the least of these. So scores are never stored.
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

// The scores above `least` of blocks of keys, of which the bits of `shown` count, and their places. How many they are;
// something may be written behind them.
static inline int64_t pick(const int16_t *score, int16_t least, const uint32_t *shown, int64_t blocks, int16_t *number,
                           uint16_t *place) {
  int64_t to = 0;
#if defined(__AVX512VBMI2__)
  alignas(64) uint16_t lane[CODED];
  for (int i = 0; i < CODED; i++) lane[i] = i;
  __m512i at = _mm512_load_si512(lane);
  for (int64_t b = 0; b < blocks; b++, score += CODED, at = _mm512_add_epi16(at, _mm512_set1_epi16(CODED))) {
    const uint32_t bits = bits_above(score, least) & shown[b];
    _mm512_storeu_si512(number + to, _mm512_maskz_compress_epi16(bits, _mm512_loadu_si512(score)));
    _mm512_storeu_si512(place + to, _mm512_maskz_compress_epi16(bits, at));
    to += __builtin_popcount(bits);
  }
#else
  for (int64_t b = 0; b < blocks; b++)
    for (uint32_t bits = bits_above(score + b * CODED, least) & shown[b]; bits; bits &= bits - 1, to++) {
      place[to] = b * CODED + __builtin_ctz(bits);
      number[to] = score[place[to]];
    }
#endif
  return to;
}

// The `count` best of the keys that a query has seen, of equal scores the first.
class Largest {
 public:
  static constexpr int PIECE = 256;  // keys that come at once at most

  void begin(int64_t best) {
    count = best, held = 0, least = INT16_MIN;
    const int64_t room = 2 * count + 2 * PIECE + LANES;
    if ((int64_t)score.size() < room) score.resize(room), place.resize(room);
  }

  // Scores of blocks of keys from `first` on, of which the bits of `shown` are keys.
  void add(const int16_t *from, const uint32_t *shown, int64_t blocks, int32_t first) {
    int16_t number[PIECE + CODED];
    uint16_t at[PIECE + CODED];
    const int64_t more = pick(from, least, shown, blocks, number, at);
    int32_t *to_score = &score[held], *to_place = &place[held];
    for (int64_t i = 0; i < more; i++) to_score[i] = number[i];
    for (int64_t i = 0; i < more; i++) to_place[i] = first + at[i];
    held += more;
    if (held > 2 * count + PIECE) cut(count / 2);
  }

  // How many there are; then `places` gives them, ascending.
  int64_t finish() {
    cut(0);
    return held;
  }
  const int32_t *places() const { return place.data(); }

 private:
  int64_t count = 0, held = 0;
  int16_t least = INT16_MIN;             // later keys must have more
  aligned_vector<int32_t> score, place;  // of what is held, by place

  // How many of those held reach a bound.
  int64_t reached(int32_t bound) const {
    const int64_t whole = held / LANES * LANES;
    ivec sum = {};
    for (int64_t v = 0; v < whole; v += LANES) sum -= *(const ivec *)&score[v] >= bound;
    int64_t total = 0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    for (int64_t v = whole; v < held; v++) total += score[v] >= bound;
    return total;
  }

  // Drops all but the `count` best, and at most `slack` of the next.
  void cut(int64_t slack) {
    if (held <= count) return;
    for (int64_t i = held; i % LANES; i++) score[i] = score[0];  // room for whole vectors
    ivec smallest = *(const ivec *)&score[0], largest = smallest, sum = {};
    for (int64_t v = 0; v < held; v += LANES) {
      const ivec x = *(const ivec *)&score[v];
      smallest = x < smallest ? x : smallest, largest = x > largest ? x : largest, sum += x;
    }
    int32_t low = score[0], high = score[0];
    int64_t total = 0;
    for (int l = 0; l < LANES; l++)
      low = std::min(low, smallest[l]), high = std::max(high, largest[l]), total += sum[l];
    // The largest bound that `count` reach, or one that at most so many more do; the first guess is the median of scores
    // that fall off exponentially.
    int64_t reach = held;
    for (int32_t middle = low + (int32_t)(total / held - low) * 2 / 3 + 1; low < high && reach > count + slack;
         middle = low + (high - low + 1) / 2) {
      const int64_t there = reached(middle);
      if (there >= count)
        low = middle, reach = there;
      else
        high = middle - 1;
    }
    // Of those that are equal to it, the first ones.
    int32_t last = INT32_MAX;
    if (reach > count + slack) {
      last = place_of(low, count - reached(low + 1));
    }
    keep(low, last);
    least = low;
  }

  // The place of the n-th, from 1, of those that have a score.
  int32_t place_of(int32_t number, int64_t n) const {
    for (int64_t i = 0;; i++)
      if (score[i] == number && --n == 0) return place[i];
  }

  // Keeps what is above `low`, and what equals it up to the place `last`.
  void keep(int32_t low, int32_t last) {
    int64_t to = 0;
#if defined(__AVX512F__)
    const __m512i bound = _mm512_set1_epi32(low), end = _mm512_set1_epi32(last);
    for (int64_t v = 0; v < held; v += LANES) {
      const __m512i number = _mm512_loadu_si512(&score[v]), at = _mm512_loadu_si512(&place[v]);
      const uint32_t there = held - v < LANES ? (1u << (held - v)) - 1 : 0xffff;
      const uint32_t first = _mm512_mask_cmple_epi32_mask(_mm512_mask_cmpeq_epi32_mask(there, number, bound), at, end);
      const uint32_t bits = _mm512_mask_cmpgt_epi32_mask(there, number, bound) | first;
      _mm512_storeu_si512(&score[to], _mm512_maskz_compress_epi32(bits, number));
      _mm512_storeu_si512(&place[to], _mm512_maskz_compress_epi32(bits, at));
      to += __builtin_popcount(bits);
    }
#else
    for (int64_t i = 0; i < held; i++) {  // without branches, which nothing could foretell
      const int32_t number = score[i], at = place[i];
      score[to] = number, place[to] = at;
      to += (number > low) | ((number == low) & (at <= last));
    }
#endif
    held = to;
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
      for (int i = 0; i < rows; i++) best[i].add(&score[i * PIECE], shown, blocks, first);
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
