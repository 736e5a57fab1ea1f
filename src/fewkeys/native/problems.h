// The arguments of the kernels, whose headers say what they compute. Python parses the structs from this file
// (`tensors.struct`). `heads`: of all sequences; of attention those of the queries, else those of the keys. `real`
// (B, Nk) is zero for padding; null: no padding.
#pragma once
#include <cstdint>

#define FEWKEYS_EXPORT extern "C" __attribute__((visibility("default")))

namespace fewkeys {

// A tensor (B, H, N, ...) in any layout whose last dimensions are dense. Heads are numbered through all sequences.
struct Rows {
  const void *data;
  int64_t batch, head, row;  // strides, in elements
  int64_t heads;             // H
  template <class T>
  const T *at(int64_t of_head, int64_t n) const {
    return (const T *)data + of_head / heads * batch + of_head % heads * head + n * row;
  }
};

// Which keys of a head of `rows` are real, from the flags (B, Nk) of a kernel's arguments; null if all keys are.
static inline const uint8_t *real_keys(const uint8_t *real, const Rows &rows, int64_t head, int64_t keys) {
  return real ? real + head / rows.heads * keys : nullptr;
}

// `near_cohorts.h`. Each cohort counts as a head with its list and stand-ins; `cohorts` of them share a key head with
// its labels.
struct Near {
  Rows query, key, value, out;
  const int64_t *place;  // (heads, entries): positions of the list's keys
  const uint8_t *used;   // (heads, entries): zero for unused entries
  const float *mean_key, *mean_value;       // (heads, means, D or Dv)
  const float *left_factor, *right_factor;  // (heads, D, rank), (heads, rank, Dv)
  const float *bias, *total, *factor;       // (heads, means); no bias: null
  const float *bounds;   // (heads, 2, rank): middle and reach of the queries' coordinates
  const float *size;     // (heads, means): the number of keys of a stand-in
  const int64_t *label;  // (B Hkv, Nk)
  const uint8_t *real;
  // (heads, queries): the queries of a cohort, numbered through the `asking` query heads of the key head with `asked`
  // queries each, or -1. Null: all of a key head, in order.
  const int64_t *order;
  int64_t heads, queries, keys, dim, value_dim, entries, means, rank, offset, left, right, causal;
  int64_t cohorts, asking, asked;
  float scale;
};

// `extent.h`.
struct Extents {
  Rows query, key, value;
  void *query_copy, *key_copy, *value_copy;  // contiguous, of the same dtype; null: no copy
  float *largest;                            // (3): of queries, keys and values
  int64_t heads, queries, keys, dim, value_dim;
};

// `frame.h`.
struct Framed {
  Rows query, key, value;          // (B, Hq, M, D): a sample; padding of keys and values is zero
  const float *asked, *real;       // (B): numbers of queries and of keys of a head, without padding
  float *mean_query;               // (B Hkv, D)
  float *second, *covariance;      // (B Hkv, D, D)
  float *mean, *value_mean;        // (B Hkv, D), (B Hkv, Dv)
  float *unit;                     // (B Hkv)
  float *root, *form, *shift;      // (B Hkv, D, D), (B Hkv, D + 1, D), (B Hkv, D + 1)
  int64_t heads, gqa_ratio, queries, keys, dim, value_dim;
  float scale, ridge;
};

// `lloyd.h`. `real`: of the sample.
struct Clustered {
  Rows key, value, sample_key, sample_value;
  const uint8_t *real;
  const float *form, *shift;   // as in `Framed`
  const float *middle, *unit;  // (B Hkv, Dv): the mean value; (B Hkv): the unit of values
  float *centre, *constant;    // (B Hkv, C, D + Dv), (B Hkv, C)
  int64_t *label;              // (B Hkv, Nk): the first cluster with the largest x . centre + constant
  float *distance;             // (B Hkv, Nk)
  float *half_variance;        // (B Hkv, Nk): k^T C k / 2 for all queries
  int64_t heads, keys, sampled, dim, value_dim, count, steps;
  float tilt, lowest;
  float near;  // the least squared distance from a centre, relative to that from the mean
};

// `Halver` of `cohorts.h`.
struct Halves {
  const float *rows;    // (B H, rows_each, dim)
  Rows key;             // float: their covariance is the metric
  const uint8_t *real;
  int64_t *place;       // (B H, rows_each padded to a multiple of count): -1 for none
  float *mean;          // (B H, count, dim)
  float *within;        // (B H, dim, dim)
  int64_t heads, rows_each, keys, dim, count, step, sample, power, refine;
  float scale;  // of rows, in `mean` and `within`
};

// `Choosing` of `cohorts.h`.
struct Best {
  Rows key;
  const float *mean, *within;  // (B Hkv, H, D), (B Hkv, D, D); no `within`: `half_variance` is given
  const float *middle;         // (B Hkv, D): the mean key
  const float *distance;       // (B Hkv, Nk): squared distance of a key from its centre
  const uint8_t *real;
  float *half_variance;        // (B Hkv, Nk): k^T W k / 2
  int64_t *index;              // (B Hkv, H, S)
  uint8_t *used;               // (B Hkv, H, S)
  int64_t heads, keys, dim, cohorts, count;
  float near, power;  // the least distance, relative to the largest; the power of distances
};

// `tilts.h`.
struct Tilts {
  Rows key, value;
  const uint8_t *real;
  const int64_t *label;        // (B Hkv, Nk)
  const float *half_variance;  // (B Hkv, Nk): k^T W k / 2
  const float *middle;         // (B Hkv, D): the mean key
  const float *mean;           // (B Hkv, H, D)
  const int64_t *filled;       // (B Hkv): the first so many cohorts have queries; the sums of the others are zero
  const int64_t *index;        // (B Hkv, H, S): the list of a cohort
  const uint8_t *used;         // (B Hkv, H, S)
  float *level;                // (B Hkv, H, C): g_hc
  float *mass, *energy;        // (B Hkv, H, C)
  float *size;                 // (B Hkv, H, C): number of keys of a cluster that are not in the list
  float *key_sum, *value_sum;  // (B Hkv, H, C, D or Dv): of centred keys and of values
  float *together;             // (B Hkv, D, Dv): the sum of e (k - middle) v^T over keys and cohorts; or null
  int64_t heads, keys, dim, value_dim, cohorts, count, kept;
  float tilt, largest;
};

// `cohort_means.h`. The sums of `Tilts` are overwritten.
struct StandIns {
  const float *mass, *energy, *level, *together;  // as in `Tilts`
  const float *mean, *within;                     // (B Hkv, H, D), (B Hkv, D, D)
  const float *middle, *unit;                     // (B Hkv, D), (B Hkv)
  float *key, *value;                             // (B Hkv, H, C, D or Dv): sums become means in place
  float *bias, *factor;                           // (B Hkv, H, C)
  float *left, *right, *bounds;                   // (B Hkv, H, D, r), (B Hkv, H, r, Dv), (B Hkv, H, 2, r)
  int64_t heads, cohorts, count, dim, value_dim, rank, steps;
  float tilt, largest_tilt, largest_spread, reach, least;
};

// `codes.h`.
struct Coding {
  Rows key;
  const float *sign;    // (wide,)
  const float *middle;  // (B Hkv, D)
  const float *spread;  // (B Hkv,)
  uint8_t *packed;      // (B Hkv, blocks, wide / 2, 16)
  int16_t *sigma;       // (B Hkv, 32 blocks)
  int64_t heads, keys, dim, wide, blocks;
};

// `code_scan.h`.
struct Scan {
  Rows packed, sigma;   // uint8 (B, Hkv, blocks, wide / 2, 16), int16 (B, Hkv, 32 blocks): blocks of 32 keys
  Rows query;
  const float *sign;    // (wide,): includes the sign of the scale
  const int64_t *seen;  // (Nq,): each query chooses among the first `seen` keys; ascending
  const uint8_t *real;
  int32_t *index;       // (B, Hq, Nq, count): ascending, then -1
  int64_t heads, gqa_ratio, queries, keys, dim, wide, count;
};

// `scan_attend.h`.
struct ScanAttend {
  Scan of;  // its `index` is not written
  Rows key, value, out;
  Rows scales;           // (B, Hkv, Nk, 2), float: scales of int8 keys and values; or null
  Rows total;            // (B, Hkv, blocks + 1, D + Dv), float64: sums of the keys and values before each block
  const double *size;    // (B, blocks + 1): numbers of keys before each block; null: no padding
  const int64_t *edges;  // (steps, means + 1): the first key of each range, and the end of the last
  // (B, Hkv, 1, D or Dv): the last key and value, which are first stored in `key` and `value`; or null. Nothing is
  // stored or computed if a magnitude in them or in the only query of a head exceeds the limit.
  Rows new_key, new_value;
  int64_t steps, means, blocks, value_dim, offset, causal;
  float scale, limit;
};

}  // namespace fewkeys
