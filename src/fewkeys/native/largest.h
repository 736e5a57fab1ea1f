// The keys with the largest scores, from scores that come block by block. When the list of candidates is full, all but
// the best are dropped, and later keys must exceed the smallest score that is left.
#pragma once
#include <limits>

#include "lanes.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fewkeys {

constexpr int CODED = 32;  // keys of a block
constexpr int TOGETHER = 16;  // the most blocks that are scored at once

typedef int16_t eight __attribute__((vector_size(16), aligned(2), may_alias));

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
#else
    const uint8x8_t bit = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int part = 0; part < 2; part++)
      bits |= (uint32_t)vaddv_u8(vand_u8(vmovn_u16((uint16x8_t)(x[part] > least)), bit)) << (16 * half + 8 * part);
#endif
  }
  return bits;
#endif
}

// Writes the numbers of a block whose bits are set side by side. What follows them in `to` may be overwritten.
template <class T>
static inline void pack(const T *number, uint32_t bits, T *to) {
  for (; bits; bits &= bits - 1) *to++ = number[__builtin_ctz(bits)];
}
#if defined(__AVX512VBMI2__)
static inline void pack(const int16_t *number, uint32_t bits, int16_t *to) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(bits, _mm512_loadu_si512(number)));
}
#endif
#if defined(__AVX512F__)
static inline void pack(__m512i low, __m512i high, uint32_t bits, int32_t *to) {
  const uint32_t half = bits & 0xffff;
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(half, low));
  _mm512_storeu_si512(to + __builtin_popcount(half), _mm512_maskz_compress_epi32(bits >> 16, high));
}
static inline void pack(const int32_t *number, uint32_t bits, int32_t *to) {
  pack(_mm512_loadu_si512(number), _mm512_loadu_si512(number + LANES), bits, to);
}
#endif

// Writes the positions of a block's keys whose bits are set.
static inline void pack_places(int32_t first, uint32_t bits, int32_t *to) {
#if defined(__AVX512F__)
  pack((__m512i)(count_up() + first), (__m512i)(count_up() + first + LANES), bits, to);
#else
  for (; bits; bits &= bits - 1) *to++ = first + __builtin_ctz(bits);
#endif
}

// One bit for each of TILE words: 1 if the word has any of `bits`.
static inline uint32_t that_have(const uint32_t *word, uint32_t bits) {
#if defined(__AVX512F__)
  const __m512i wanted = _mm512_set1_epi32(bits);
  const uint32_t low = _mm512_test_epi32_mask(_mm512_loadu_si512(word), wanted);
  return low | (uint32_t)_mm512_test_epi32_mask(_mm512_loadu_si512(word + LANES), wanted) << LANES;
#else
  uint32_t rows = 0;
  for (int i = 0; i < TILE; i++) rows |= (uint32_t)((word[i] & bits) != 0) << i;
  return rows;
#endif
}

// The `count` keys of a query with the largest scores; of equal scores, those of the first keys.
class Largest {
 public:
  // Begins anew, for keys with scores above `bound`.
  void begin(int64_t best, int16_t bound = INT16_MIN) {
    count = best, held = 0, least = bound;
    const int64_t room = most() + 3 * CODED;
    if ((int64_t)score.size() < room) score.resize(room), place.resize(room);
  }

  // Keys with scores at or below it are not needed.
  int16_t bound() const { return least; }

  // Adds the keys of a block whose bits are set.
  void add(const int16_t *from, int32_t block, uint32_t bits) {
    pack(from, bits, &score[held]), pack_places(block * CODED, bits, &place[held]);
    held += __builtin_popcount(bits);
    if (held > most()) cut(count / 2);
  }

  // Adds the candidates of another list, which are of later keys.
  void join(const Largest &later) {
    least = INT16_MIN;
    for (int64_t j = 0; j < later.held; j += CODED) {
      const int64_t moved = std::min<int64_t>(CODED, later.held - j);
      std::copy_n(&later.score[j], moved, &score[held]), std::copy_n(&later.place[j], moved, &place[held]);
      held += moved;
      if (held > most()) cut(count / 2);
    }
  }

  // Drops all but the best and returns their number; `places` then holds their positions, ascending.
  int64_t finish() {
    cut(0);
    return held;
  }
  // A bound just below the smallest of the `count` best scores; no bound where there are fewer keys.
  int16_t reached() {
    if (held < count) return INT16_MIN;
    cut(0);
    int16_t smallest = INT16_MAX;
    for (int64_t j = 0; j < held; j++) smallest = std::min(smallest, score[j]);
    return smallest - 1;
  }
  // Ignores all keys from now on.
  void close() { least = INT16_MAX; }
  const int32_t *places() const { return place.data(); }

 private:
  int64_t count = 0, held = 0;
  int16_t least = INT16_MIN;  // later keys must have larger scores
  aligned_vector<int16_t> score;
  aligned_vector<int32_t> place;

  int64_t most() const { return 2 * count + 4 * CODED; }

  // The number of candidates above a bound.
  int64_t above(int16_t bound) const {
    int64_t total = 0;
    for (int64_t v = 0; v < held; v += CODED) total += __builtin_popcount(bits_above(&score[v], bound));
    return total;
  }

  // Drops all candidates but the `count` best and at most `slack` of the next.
  void cut(int64_t slack) {
    if (held <= count) return;
    std::fill_n(&score[held], CODED, INT16_MIN);  // scores are read in whole blocks
    // Bisection for the largest bound that `count` candidates reach; it ends early where at most `slack` more do.
    int32_t low = least, high = INT16_MAX;
    int64_t reach = held;
    while (low < high && reach > count + slack) {
      // The largest score is unknown, so the first steps double the bound.
      const int32_t middle = high == INT16_MAX ? std::clamp(2 * low, 16, high) : low + (high - low + 1) / 2;
      const int64_t there = above(middle - 1);
      if (there >= count)
        low = middle, reach = there;
      else
        high = middle - 1;
    }
    // Of the candidates that equal the bound, the first ones are kept.
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

}  // namespace fewkeys
